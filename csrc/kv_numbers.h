// Keys and values as the numbers that pages hold: reading and writing LANES at a time.
//
//     E4M3:   | sign | 4 exponent, bias 7 | 3 fraction |    largest 448, all ones is NaN
//     I8:     an integer of -127..127 times the scale of its group
//
// E4M3 is that of the OCP specification "8-bit Floating Point" (2023), without infinities.
#pragma once

#include "pages.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

// The integers of I8 without their scale.
template <KvType TYPE>
TOQUE_INLINE floats load_numbers(const uint8_t* from) {
  if constexpr (TYPE == KvType::F32) return load((const float*)from);
  if constexpr (TYPE == KvType::F16) return load((const half*)from);
  if constexpr (TYPE == KvType::BF16) return load_bfloats(from);
  if constexpr (TYPE == KvType::I8) return to_floats(widen_bytes<int8_t>(from));
  if constexpr (TYPE == KvType::E4M3) {
    // Subnormal ones are multiples of 2^-9. Not by way of subnormal floats: those take the processor
    // a hundred cycles.
    const ints bits = widen_bytes<uint8_t>(from), code = bits & 0x7f;
    const floats normal = (floats)((code << 20) + (120 << 23));
    const floats small = to_floats(code) * splat(0x1p-9f);
    const ints size = code < 8 ? (ints)small : (ints)normal;
    return (floats)((code == 0x7f ? splat_integer(0x7fc00000) : size) | (bits & 0x80) << 24);
  }
}

// To the nearest number, ties to the even one; beyond the largest the largest, but NaN for
// infinities and NaN: a model that overflows must fail and not go on with 448.
TOQUE_INLINE ints to_e4m3(floats x) {
  const ints bits = (ints)x & 0x7fffffff;
  const floats size = (floats)bits;
  const ints normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  // Below 2^-6 the numbers are the multiples of 2^-9, which is the last bit of 2^14.
  const ints small = (ints)(size + splat(0x1p14f)) - (ints)splat(0x1p14f);
  ints code = size < splat(0x1p-6f) ? small : normal;
  code = size > splat(448) ? splat_integer(0x7e) : code;
  code = bits >= splat_integer(0x7f800000) ? splat_integer(0x7f) : code;
  return code | ((ints)x >> 24 & 0x80);
}

// To the nearest, ties to even; NaN stays one.
TOQUE_INLINE ints to_bfloat(floats x) {
  const ints bits = (ints)x;
  const ints rounded = bits + 0x7fff + (bits >> 16 & 1);
  return (x == x ? rounded : bits | 0x400000) >> 16 & 0xffff;
}

template <KvType TYPE>
TOQUE_INLINE void store_numbers(uint8_t* to, floats x) {
  if constexpr (TYPE == KvType::F32) store((float*)to, x);
  if constexpr (TYPE == KvType::F16) store((half*)to, x);
  if constexpr (TYPE == KvType::BF16) {
    const few_ushorts narrow = __builtin_convertvector(to_bfloat(x), few_ushorts);
    memcpy(to, &narrow, sizeof narrow);
  }
  if constexpr (TYPE == KvType::E4M3 || TYPE == KvType::I8) {
    const ints numbers = TYPE == KvType::I8 ? to_nearest(x) : to_e4m3(x);
    const few_ubytes narrow = __builtin_convertvector(numbers, few_ubytes);
    memcpy(to, &narrow, sizeof narrow);
  }
}

// `to` may be `from`: each number is read before its place is written.
template <KvType TYPE>
inline void narrow(const float* from, long count, float factor, uint8_t* to) {
  constexpr long BYTES = number_bytes(TYPE);
  long i = 0;
  for (; i + LANES <= count; i += LANES) {
    store_numbers<TYPE>(to + i * BYTES, load(from + i) * splat(factor));
  }
  if (i == count) return;
  uint8_t last[LANES * BYTES];
  store_numbers<TYPE>(last, load_first(from + i, count - i) * splat(factor));
  memcpy(to + i * BYTES, last, (count - i) * BYTES);
}

// The scale of a group, as the bits of a bfloat16: a 127th of the largest number, rounded up so that
// no integer exceeds 127. NaN for a group that is not all finite numbers, 0 for one of zeros.
static inline uint16_t scale_of(const float* x, long count) {
  constexpr float SMALLEST = 0x1p-100f;  // its reciprocal is still a normal number
  float largest = 0;
  bool finite = true;
  for (long i = 0; i < count; ++i) {
    const float size = fabsf(x[i]);
    finite = finite && size < INFINITY;
    largest = size > largest ? size : largest;
  }
  if (!finite) return 0x7fc0;
  if (largest < SMALLEST) return 0;
  return (uint16_t)((float_to_bits(largest / 127.0f) + 0xffff) >> 16);
}

TOQUE_INLINE float bfloat_at(const uint8_t* from) {
  uint16_t bits;
  memcpy(&bits, from, sizeof bits);
  return bits_to_float((uint32_t)bits << 16);
}

// A vector [dim] as its numbers and, `scale_stride` bytes apart, its scales.
template <KvType TYPE>
inline void narrow_vector(const float* x, long dim, uint8_t* to, uint8_t* scales,
                          long scale_stride) {
  if constexpr (TYPE != KvType::I8) return narrow<TYPE>(x, dim, 1, to);
  for (long d = 0; d < dim; d += SCALE_GROUP, scales += scale_stride) {
    const long count = dim - d < SCALE_GROUP ? dim - d : SCALE_GROUP;
    const uint16_t bits = scale_of(x + d, count);
    memcpy(scales, &bits, sizeof bits);
    const float scale = bits_to_float((uint32_t)bits << 16);
    if (scale > 0) {
      narrow<TYPE>(x + d, count, 1.0f / scale, to + d);
    } else {
      memset(to + d, 0, count);
    }
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
