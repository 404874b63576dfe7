// What the native tests share: drawn inputs in blocks of exactly the bytes that a kernel may touch,
// so that a sanitizer sees the first one beyond them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

// Checks in every build: assert() is left out of optimized ones.
#define REQUIRE(holds, ...)                                    \
  do {                                                         \
    if (!(holds)) {                                            \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #holds);  \
      std::printf(__VA_ARGS__);                                \
      std::printf("\n");                                       \
      std::exit(1);                                            \
    }                                                          \
  } while (0)

namespace toque {

// `size` numbers on a multiple of 64 bytes, all ones (NaN) until written.
template <class Number>
class Block {
 public:
  explicit Block(long size = 0) : size_(size) {
    void* memory = nullptr;
    const size_t bytes = size * sizeof(Number);
    REQUIRE(posix_memalign(&memory, 64, bytes) == 0, "%zu bytes", bytes);
    data_ = static_cast<Number*>(memory);
    if (bytes) std::memset(memory, 0xff, bytes);
  }
  Block(Block&& other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
  Block& operator=(Block&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Block() { std::free(data_); }

  Block copy() const {
    Block other(size_);
    if (size_) std::memcpy(other.data_, data_, size_ * sizeof(Number));
    return other;
  }
  Number* data() { return data_; }
  const Number* data() const { return data_; }
  long size() const { return size_; }
  Number& operator[](long i) { return data_[i]; }
  const Number& operator[](long i) const { return data_[i]; }

 private:
  Number* data_ = nullptr;
  long size_ = 0;
};

template <class Number>
bool same_bits(const Number* a, const Number* b, long count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(Number)) == 0;
}

template <class Number>
bool same_bits(const Block<Number>& a, const Block<Number>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

// The largest difference, in units of the largest number; infinite where only one is a number.
inline double difference(const Block<float>& a, const Block<float>& b) {
  double largest = 0, worst = 0;
  for (long i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) != std::isnan(b[i])) return INFINITY;
    if (std::isnan(a[i])) continue;
    largest = std::fmax(largest, std::fabs(b[i]));
    worst = std::fmax(worst, std::fabs(double{a[i]} - b[i]));
  }
  return worst == 0 ? 0 : worst / largest;
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : bits_(seed) {}

  long of(long low, long high) { return low + static_cast<long>(bits_() % (high - low + 1)); }
  bool coin() { return of(0, 1) == 1; }
  template <class Any>
  Any one_of(const std::vector<Any>& all) {
    return all[of(0, static_cast<long>(all.size()) - 1)];
  }
  float normal() { return normal_(bits_); }
  uint8_t byte() { return static_cast<uint8_t>(bits_()); }

  Block<float> normals(long size, float scale = 1) {
    Block<float> x(size);
    for (long i = 0; i < size; ++i) x[i] = normal() * scale;
    return x;
  }

  // Rows of a file: any integers and small scales, finite large ones.
  Block<uint8_t> stored(Kind kind, long rows, long columns) {
    const BlockSize block = block_size(kind);
    Block<uint8_t> bytes(rows * (columns / block.values) * block.bytes);
    for (long i = 0; i < bytes.size(); ++i) bytes[i] = byte();
    for (long at = 0; at < bytes.size(); at += block.bytes) {
      if (kind == Kind::F32 || kind == Kind::BF16) {
        const float x = normal();
        const auto* upper = reinterpret_cast<const uint8_t*>(&x) + (4 - block.bytes);
        std::memcpy(&bytes[at], upper, block.bytes);
      } else {
        tame_half(&bytes[at + (kind == Kind::Q6_K ? 208 : 0)]);
        if (has_offset(kind)) tame_half(&bytes[at + 2]);
      }
    }
    return bytes;
  }

 private:
  // Exponents from 2^-10 to 2^-3.
  void tame_half(uint8_t* half) {
    half[1] = static_cast<uint8_t>((half[1] & 0x83) | of(5, 12) << 2);
  }

  std::mt19937_64 bits_;
  std::normal_distribution<float> normal_;
};

constexpr Kind KINDS[] = {Kind::F32,  Kind::F16,  Kind::BF16, Kind::Q4_0, Kind::Q4_1, Kind::Q5_0,
                          Kind::Q5_1, Kind::Q8_0, Kind::Q4_K, Kind::Q5_K, Kind::Q6_K};
constexpr KvType KV_TYPES[] = {KvType::F32, KvType::F16, KvType::BF16, KvType::I8, KvType::E4M3};

// A weight as a file has it, and packed.
struct Weight {
  Block<uint8_t> file;
  Block<uint8_t> bytes;
  StoredRows rows;
  Packed packed;
};

inline Weight pack(const Kernels& kernels, Pool& pool, Block<uint8_t> file, Kind kind, long out,
                   long in) {
  Weight w{std::move(file), Block<uint8_t>(packed_bytes(kind, out, in)), {}, {}};
  w.rows = {kind, w.file.data(), out, in};
  w.packed = {kind, w.bytes.data(), out, in};
  kernels.pack(pool, w.rows, w.bytes.data());
  return w;
}

}  // namespace toque
