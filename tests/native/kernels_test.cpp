// All kernels, the program and the sampler over drawn shapes, for each instruction set that is here:
//
//     kernels_test [ROUNDS] [SEED]
//
// Says which sets ran and exits with 0, or says what went wrong.

#include "cases.h"
#include "isa.h"

using namespace toque;

int main(int count, char** words) {
  const long rounds = count > 1 ? std::atol(words[1]) : 4;
  const long seed = count > 2 ? std::atol(words[2]) : 1;
  const std::vector<KvType> types(std::begin(KV_TYPES), std::end(KV_TYPES));
  Pools pools;
  for (const Isa& isa : compiled_isas()) {
    if (!isa.supported) {
      std::printf("%s: not on this machine\n", isa.name().c_str());
      continue;
    }
    Draw draw(seed);  // the same problems for all
    for (long round = 0; round < rounds; ++round) {
      for (Kind kind : KINDS) {
        check_products(*isa.kernels, pools, draw, kind);
        check_program(*isa.kernels, pools, draw, kind, draw.one_of(types));
      }
      check_group_sums(*isa.kernels, pools, draw);
      check_largest_sums(*isa.kernels, pools);
      check_rows(*isa.kernels, pools, draw);
      for (KvType type : KV_TYPES) {
        for (int i = 0; i < 3; ++i) check_attention(*isa.kernels, pools, draw, type);
      }
      check_sampler(*isa.kernels, pools, draw);
    }
    std::printf("%s: ran\n", isa.name().c_str());
  }
}
