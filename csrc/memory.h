// Aligned arrays of floats.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace toque {

struct Free {
  void operator()(float* array) const { std::free(array); }
};

using FloatArray = std::unique_ptr<float[], Free>;

// `count` floats, not set to anything. Throws std::bad_alloc. Large arrays ask for huge pages:
// a matrix is read from end to end each step, and every small page costs an address translation.
inline FloatArray allocate_floats(size_t count) {
  constexpr size_t CACHE_LINE = 64, HUGE_PAGE = size_t{2} << 20;
  const size_t bytes = count * sizeof(float);
  const size_t alignment = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : CACHE_LINE;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded ? rounded : alignment);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == HUGE_PAGE) madvise(memory, rounded, MADV_HUGEPAGE);  // a hint: may be refused
#endif
  return FloatArray(static_cast<float*>(memory));
}

}  // namespace toque
