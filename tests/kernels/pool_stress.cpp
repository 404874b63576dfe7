// Many short loops on csrc/pool.h: every chunk must run exactly once, with its own loop's context,
// and before run() returns. Prints nothing and exits with 0, or says what went wrong.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pool.h"

namespace {

struct Loop {
  explicit Loop(long chunks) : runs(chunks) {}
  std::vector<std::atomic<int>> runs;
};

void count(void* context, long chunk, int) {
  auto& runs = static_cast<Loop*>(context)->runs;
  if (chunk >= static_cast<long>(runs.size())) std::abort();  // another loop's chunk
  runs[chunk].fetch_add(1, std::memory_order_relaxed);
}

bool all_once(toque::Pool& pool, long chunks) {
  Loop loop(chunks);
  pool.run(chunks, count, &loop);
  for (const auto& runs : loop.runs) {
    if (runs.load() != 1) return false;
  }
  return true;
}

}  // namespace

int main() {
  for (const int threads : {1, 2, 3, 8}) {
    toque::Pool pool(threads);
    for (int i = 0; i < 20000; ++i) {
      if (all_once(pool, 1 + i % 37)) continue;
      std::printf("loop %d on %d threads lost or repeated a chunk\n", i, threads);
      return 1;
    }
  }
  for (int i = 0; i < 300; ++i) toque::Pool started_and_stopped(4);
}
