// Aligned blocks of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace toque {

struct Free {
  void operator()(uint8_t* bytes) const { std::free(bytes); }
};

using ByteArray = std::unique_ptr<uint8_t[], Free>;

// What packed weights start on, wherever they come from: a cache line.
constexpr size_t PACKED_ALIGNMENT = 64;

// `bytes` bytes, not set to anything. Throws std::bad_alloc. Large blocks ask for huge pages: a
// matrix is read from end to end each step, and every small page costs an address translation.
inline ByteArray allocate_bytes(size_t bytes) {
  constexpr size_t HUGE_PAGE = size_t{2} << 20;
  const size_t alignment = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : PACKED_ALIGNMENT;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded ? rounded : alignment);
  if (!memory) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == HUGE_PAGE) madvise(memory, rounded, MADV_HUGEPAGE);  // a hint: may be refused
#endif
  return ByteArray(static_cast<uint8_t*>(memory));
}

}  // namespace toque
