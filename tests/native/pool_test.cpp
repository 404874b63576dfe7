// Many short loops on csrc/pool.h: every chunk must run exactly once, with its own loop's context,
// and before run() returns, whoever calls. Prints nothing and exits with 0, or says what went wrong.
//
//     pool_test [LOOPS]
//
// The chunks write plain memory that the caller then reads: under a thread sanitizer that is where
// a missing order shows.

#include "pool.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace {

struct Loop {
  explicit Loop(long chunks) : runs(chunks) {}
  std::vector<int> runs;  // of each chunk, which one thread has to itself
};

void count(void* context, long chunk, int) {
  auto& runs = static_cast<Loop*>(context)->runs;
  if (chunk >= static_cast<long>(runs.size())) std::abort();  // another loop's chunk
  ++runs[chunk];
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

void run_loops(toque::Pool& pool, long loops) {
  for (long i = 0; i < loops; ++i) {
    Loop loop(1 + i % 37);
    pool.run(1 + i % 37, count, &loop);
    for (int runs : loop.runs) require(runs == 1, "a loop lost or repeated a chunk");
  }
}

// A sum of each worker's own, as the kernels use their scratch.
void keep_workers_apart(toque::Pool& pool) {
  std::vector<long> sums(pool.threads());
  toque::parallel(pool, 500, [&](long chunk, int worker) { sums[worker] += chunk; });
  long total = 0;
  for (long sum : sums) total += sum;
  require(total == 499 * 500 / 2, "two workers had one number");
}

void call_from_several_threads(toque::Pool& pool, long loops) {
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back([&] { run_loops(pool, loops); });
  for (std::thread& caller : callers) caller.join();
}

// A loop within a body would wait for itself: an exception in that body, and the pool goes on.
void nest(toque::Pool& pool, toque::Pool& other) {
  std::vector<int> refused(40);
  toque::parallel(pool, 40, [&](long chunk, int) {
    try {
      Loop loop(3);
      (chunk % 2 ? pool : other).run(chunk % 4 < 2 ? 3 : 1, count, &loop);
    } catch (const std::logic_error&) {
      refused[chunk] = 1;
    }
  });
  for (int once : refused) require(once == 1, "a loop ran within another one");
}

}  // namespace

int main(int words, char** word) {
  const long loops = words > 1 ? std::atol(word[1]) : 20000;
  toque::Pool other(2);
  for (const int threads : {1, 2, 3, 8}) {
    toque::Pool pool(threads);
    run_loops(pool, loops);
    keep_workers_apart(pool);
    call_from_several_threads(pool, loops / 10);
    nest(pool, other);
    run_loops(pool, 10);
  }
  for (int i = 0; i < 300; ++i) toque::Pool started_and_stopped(1 + i % 5);
  for (int i = 0; i < 300; ++i) {
    toque::Pool pool(1 + i % 5);
    run_loops(pool, 2);
  }
}
