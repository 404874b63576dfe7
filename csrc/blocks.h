// Blocks of a file taken apart: the integers and the scales of every quantized kind. The layouts
// are drawn in src/toque/kernels/ref/dequantize.py.
#pragma once

#include "layout.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

// Blocks lie at odd addresses, so that numbers of several bytes are copied out.
TOQUE_INLINE float half_at(const uint8_t* from) {
  half x;
  memcpy(&x, from, sizeof x);
  return half_to_float(x);
}

// Where d and the halves' second number (m or dmin) stand in a block.
constexpr long place_of_d(Kind kind) { return kind == Kind::Q6_K ? 208 : 0; }
constexpr long PLACE_OF_M = 2;

typedef uint8_t ubytes16 __attribute__((vector_size(16)));

// 16 bytes -> 32 values: first all low halves, then all high ones.
static inline void nibbles(const uint8_t* from, int8_t* q) {
  ubytes16 both;
  memcpy(&both, from, sizeof both);
  const ubytes16 low = both & 15, high = both >> 4;
  memcpy(q, &low, sizeof low);
  memcpy(q + 16, &high, sizeof high);
}

// Nibbles plus 16 times the fifth bits, of which value i has bit i.
static inline void fifth_bits(const uint8_t* word, int8_t* q) {
  constexpr uint64_t EACH_BYTE = 0x0101010101010101;
  for (int i = 0; i < 4; ++i) {  // eight values at once, in the eight bytes of a word
    const uint64_t own_bit = word[i] * EACH_BYTE & 0x8040201008040201;
    const uint64_t as_16 = (own_bit + 0x7f * EACH_BYTE) >> 3 & 16 * EACH_BYTE;
    uint64_t values;
    memcpy(&values, q + 8 * i, sizeof values);
    values |= as_16;
    memcpy(q + 8 * i, &values, sizeof values);
  }
}

// Four runs of 32 bytes -> eight of 32 values: low halves, high halves.
static inline void nibbles_of_eight(const uint8_t* from, int8_t* q) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 32; ++i) {
      q[64 * j + i] = (int8_t)(from[32 * j + i] & 15);
      q[64 * j + 32 + i] = (int8_t)(from[32 * j + i] >> 4);
    }
  }
}

static inline void q5_k(const uint8_t* high, const uint8_t* low, int8_t* q) {
  nibbles_of_eight(low, q);
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 32; ++i) {
      q[32 * j + i] = (int8_t)(q[32 * j + i] | (high[i] >> j & 1) << 4);
    }
  }
}

static inline void q6_k(const uint8_t* block, int8_t* q) {
  for (int run = 0; run < 8; ++run) {  // of 32 values; four runs are a half of the block
    const int in_half = run % 4;
    const uint8_t* low = block + 64 * (run / 4) + 32 * (in_half % 2);
    const uint8_t* high = block + 128 + 32 * (run / 4);
    const int shift = 4 * (in_half / 2);
    for (int i = 0; i < 32; ++i) {
      q[32 * run + i] = (int8_t)((low[i] >> shift & 15) | (high[i] >> (2 * in_half) & 3) << 4);
    }
  }
}

// The block's integers; zero_point() is still to be subtracted.
template <Kind KIND>
inline void integers(const uint8_t* block, int8_t* q) {
  if constexpr (KIND == Kind::Q8_0) memcpy(q, block + 2, 32);
  if constexpr (KIND == Kind::Q4_0) nibbles(block + 2, q);
  if constexpr (KIND == Kind::Q4_1) nibbles(block + 4, q);
  if constexpr (KIND == Kind::Q5_0) {
    nibbles(block + 6, q);
    fifth_bits(block + 2, q);
  }
  if constexpr (KIND == Kind::Q5_1) {
    nibbles(block + 8, q);
    fifth_bits(block + 4, q);
  }
  if constexpr (KIND == Kind::Q4_K) nibbles_of_eight(block + 16, q);
  if constexpr (KIND == Kind::Q5_K) q5_k(block + 16, block + 48, q);
  if constexpr (KIND == Kind::Q6_K) q6_k(block, q);
}

// The two small integers of group j of 32 values: scale and minimum (6 bits each), or for Q6_K the
// scales of its two halves (int8).
struct SmallScales {
  uint8_t first;
  uint8_t second;
};

template <Kind KIND>
inline SmallScales small_scales(const uint8_t* block, long j) {
  if constexpr (KIND == Kind::Q6_K) return {block[192 + 2 * j], block[193 + 2 * j]};
  const uint8_t* s = block + 4;
  if (j < 4) return {(uint8_t)(s[j] & 63), (uint8_t)(s[j + 4] & 63)};
  return {(uint8_t)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4),
          (uint8_t)(s[j + 4] >> 4 | (s[j] >> 6) << 4)};
}

// Calls function with the quantized kind as a compile-time constant: function(Constant<KIND>()).
template <Kind KIND>
struct Constant {
  static constexpr Kind kind = KIND;
};

template <class Function>
inline void with_kind(Kind kind, Function function) {
  switch (kind) {
    case Kind::Q4_0: return function(Constant<Kind::Q4_0>());
    case Kind::Q4_1: return function(Constant<Kind::Q4_1>());
    case Kind::Q5_0: return function(Constant<Kind::Q5_0>());
    case Kind::Q5_1: return function(Constant<Kind::Q5_1>());
    case Kind::Q8_0: return function(Constant<Kind::Q8_0>());
    case Kind::Q4_K: return function(Constant<Kind::Q4_K>());
    case Kind::Q5_K: return function(Constant<Kind::Q5_K>());
    case Kind::Q6_K: return function(Constant<Kind::Q6_K>());
    default: return;  // floats have no integers
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
