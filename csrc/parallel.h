// Running a loop on the thread pool, as the kernels see it.
//
// The kernel sources are compiled once per instruction set. They must not see the pool's inside: an
// inline function of the standard library that is compiled with AVX2 flags may be the copy that the
// linker keeps for everybody, and then crashes a machine without AVX2. So they get two plain
// functions, and nothing here uses the standard library.
#pragma once

namespace toque {

class Pool;

using Body = void (*)(void* context, long chunk, int worker);

// Calls body(context, c, w) once for every c in 0..chunks-1, on any thread and in any order;
// returns when all have returned. w < pool_threads() differs between calls at the same time.
void pool_run(Pool& pool, long chunks, Body body, void* context);
int pool_threads(const Pool& pool);

// The same for a lambda (chunk, worker). Lambdas have no linkage: no two copies to choose from.
template <class Function>
inline void parallel(Pool& pool, long chunks, Function function) {
  pool_run(
      pool, chunks,
      [](void* context, long chunk, int worker) {
        (*static_cast<Function*>(context))(chunk, worker);
      },
      &function);
}

// Splits 0..items into a few ranges per thread, so that a thread which the system takes away for a
// while delays only a small part, and calls function(begin, end, worker) for each. `cost` is the
// rough number of multiply-adds of all items: below a threshold waking a thread costs more.
template <class Function>
inline void parallel_ranges(Pool& pool, long items, double cost, Function function) {
  constexpr double WORTH_WAKING = 1 << 16;
  constexpr long RANGES_PER_THREAD = 8;
  long ranges = cost < WORTH_WAKING ? 1 : RANGES_PER_THREAD * pool_threads(pool);
  if (ranges > items) ranges = items;
  parallel(pool, ranges, [=](long range, int worker) {
    function(items * range / ranges, items * (range + 1) / ranges, worker);
  });
}

}  // namespace toque
