// What integer products could do at best here: their own multiply-add, and nothing else.

#include "kernels.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

// Sums that do not wait for each other, as many as hide an instruction's latency.
constexpr int CHAINS = 12;

static void multiply_round(const int16_t* weights, const int16_t* inputs, ints (&sums)[CHAINS]) {
  asm volatile("" : : "r"(weights), "r"(inputs) : "memory");  // other numbers in every round
  shorts w = load_shorts(weights);
  pin(w);
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; ++i) {
    sums[i] = add_pair_products(w, splat_pair(inputs + 2 * i), sums[i]);
  }
}

// Multiplications and additions, by all threads together.
double multiply_adds(Pool& pool, long rounds) {
  constexpr long PARTS = 64;  // more than threads: one that starts late does fewer
  parallel(pool, PARTS, [=](long, int) {
    alignas(64) int16_t weights[2 * LANES] = {1}, inputs[2 * CHAINS] = {1};
    ints sums[CHAINS] = {};
    for (long i = 0; i < rounds; ++i) multiply_round(weights, inputs, sums);
    for (int i = 0; i < CHAINS; ++i) memcpy(weights, &sums[i], sizeof weights);
    asm volatile("" : : "r"(weights) : "memory");  // somebody might look at the result
  });
  return 2.0 * PARTS * rounds * CHAINS * 2 * LANES;
}

}  // namespace TOQUE_ISA
}  // namespace toque
