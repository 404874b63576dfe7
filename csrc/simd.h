// Eight floats or sixteen short integers at a time. The only file that knows an instruction set.
//
// Included by kernel sources, which are compiled once per instruction set, each time into another
// namespace: -DTOQUE_ISA=avx2 with -mavx2 -mfma -mf16c, and -DTOQUE_ISA=portable with none.
//
// The vector extensions of GCC and Clang give arithmetic, comparison and selection on any machine.
// What they lack is here: a fused multiply-add that is one wherever it is written and is never made
// up by the compiler (-ffp-contract=off), so that two loops over the same numbers round alike; half
// precision; products of short integers added pairwise; and transposition.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TOQUE_HAS_AVX2 1
#include <immintrin.h>
#endif

namespace toque {
namespace TOQUE_ISA {

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef int8_t i8x8 __attribute__((vector_size(8)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));
typedef uint16_t half;  // the bits of an IEEE binary16

constexpr long LANES = 8;

#define TOQUE_MEMBER inline __attribute__((always_inline))
#define TOQUE_INLINE static TOQUE_MEMBER

TOQUE_INLINE f32x8 splat(float x) { return f32x8{x, x, x, x, x, x, x, x}; }

TOQUE_INLINE f32x8 load(const float* from) {
  f32x8 x;
  memcpy(&x, from, sizeof x);
  return x;
}

TOQUE_INLINE void store(float* to, f32x8 x) { memcpy(to, &x, sizeof x); }

// Zeros in the lanes from `count` on.
TOQUE_INLINE f32x8 load_first(const float* from, long count) {
  f32x8 x = splat(0);
  memcpy(&x, from, count * sizeof(float));
  return x;
}

TOQUE_INLINE void store_first(float* to, f32x8 x, long count) {
  memcpy(to, &x, count * sizeof(float));
}

// a * b + c. Fused on AVX2; multiplied and added on the portable path, everywhere on it.
TOQUE_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
#ifdef TOQUE_HAS_AVX2
  return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Keeps x in a register. GCC otherwise reloads an operand that several instructions share from
// memory each time, and the loads become the bottleneck.
TOQUE_INLINE void pin(f32x8& x) {
#ifdef TOQUE_HAS_AVX2
  asm("" : "+x"(x));
#else
  (void)x;
#endif
}

// Added pairwise in a fixed order: lanes i and i + 4, then i and i + 2, then i and i + 1.
TOQUE_INLINE float sum(f32x8 x) {
  const float a = x[0] + x[4], b = x[1] + x[5], c = x[2] + x[6], d = x[3] + x[7];
  return (a + c) + (b + d);
}

TOQUE_INLINE f32x8 max(f32x8 a, f32x8 b) { return a > b ? a : b; }

TOQUE_INLINE float max_lane(f32x8 x) {
  float best = x[0];
  for (int i = 1; i < LANES; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// e^x with a relative error below 2e-7; 0 below -87.3 (where float32 runs out of normal numbers),
// e^88.3 above that, NaN for NaN. Reduction to x = n ln 2 + r and a polynomial for e^r on
// |r| <= ln 2 / 2; its coefficients are those of Cephes' expf (https://www.netlib.org/cephes/).
TOQUE_INLINE f32x8 exp(f32x8 x) {
  const f32x8 low = splat(-87.3f), high = splat(88.3f);
  const f32x8 y = x > high ? high : (x < low ? low : x);  // this order lets NaN through
  // Adding 1.5 * 2^23 leaves no bits for a fraction: rounds to the nearest integer, and the
  // integer stands in the lowest bits.
  const f32x8 magic = splat(12582912.0f);
  const f32x8 shifted = fma(y, splat(1.44269504f), magic);
  const f32x8 n = shifted - magic;
  const f32x8 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), y));
  f32x8 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r + splat(1.0f));
  const i32x8 exponent = ((i32x8)shifted - (i32x8)magic + 127) << 23;  // the bits of 2^n
  const f32x8 result = p * (f32x8)exponent;
  return x < low ? splat(0) : result;
}

// ------------------------------------------------------------------------------ half precision

TOQUE_INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

TOQUE_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

//     half:   | sign | 5 exponent, bias 15  | 10 fraction |
//     float:  | sign | 8 exponent, bias 127 | 23 fraction |
TOQUE_INLINE float half_to_float(half x) {
  const uint32_t sign = (uint32_t)(x & 0x8000) << 16;
  const uint32_t magnitude = x & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x0400) {  // zero or subnormal: a multiple of 2^-24, exact as a float
    return bits_to_float(sign | float_to_bits((float)magnitude * 5.9604645e-8f));
  }
  return bits_to_float(sign | ((magnitude << 13) + ((127 - 15) << 23)));
}

// To the nearest half, ties to the even one, as the F16C instruction does.
TOQUE_INLINE half float_to_half(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (half)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return (half)(sign | 0x7c00);  // rounds to 65520 or more
  if (magnitude < 0x38800000) {
    // Below 2^-14 halves are the multiples of 2^-24. Adding 0.5, whose last bit is 2^-24, lets the
    // addition round there.
    const float rounded = bits_to_float(magnitude) + 0.5f;
    return (half)(sign | (float_to_bits(rounded) - 0x3f000000));
  }
  const uint32_t odd = magnitude >> 13 & 1;
  return (half)(sign | ((magnitude + 0xfff + odd - ((127 - 15) << 23)) >> 13));
}

TOQUE_INLINE f32x8 load(const half* from) {
#ifdef TOQUE_HAS_AVX2
  return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  f32x8 x;
  for (int i = 0; i < LANES; ++i) x[i] = half_to_float(from[i]);
  return x;
#endif
}

// Eight bfloat16, which are the upper halves of floats.
TOQUE_INLINE f32x8 load_bfloats(const void* from) {
#ifdef TOQUE_HAS_AVX2
  const i32x8 wide = (i32x8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  u16x8 x;
  memcpy(&x, from, sizeof x);
  const i32x8 wide = __builtin_convertvector(x, i32x8);
#endif
  return (f32x8)(wide << 16);
}

TOQUE_INLINE void store(half* to, f32x8 x) {
#ifdef TOQUE_HAS_AVX2
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < LANES; ++i) to[i] = float_to_half(x[i]);
#endif
}

// ------------------------------------------------------------------------------------- integers

TOQUE_INLINE i32x8 splat_integer(int32_t x) { return i32x8{x, x, x, x, x, x, x, x}; }

// The pair (x[0], x[1]), eight times.
TOQUE_INLINE i16x16 splat_pair(const int16_t* x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return (i16x16)splat_integer(pair);
}

TOQUE_INLINE i16x16 load_shorts(const void* from) {
  i16x16 x;
  memcpy(&x, from, sizeof x);
  return x;
}

// Sixteen int8.
TOQUE_INLINE i16x16 widen(const uint8_t* from) {
#ifdef TOQUE_HAS_AVX2
  return (i16x16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
  i8x16 x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, i16x16);
#endif
}

// sums[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1], exact in 32 bits.
//
// The empty asm keeps the additions in the order in which they are written: GCC would turn the chain
// of an unrolled loop into a tree, and run out of registers.
TOQUE_INLINE i32x8 add_pair_products(i16x16 a, i16x16 b, i32x8 sums) {
#ifdef TOQUE_HAS_AVX2
  i32x8 added = sums + (i32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  asm("" : "+x"(added));
  return added;
#else
  // Even elements are the lower halves of 32-bit lanes; shifting brings them up with their sign.
  const i32x8 even = ((i32x8)a << 16 >> 16) * ((i32x8)b << 16 >> 16);
  const i32x8 odd = ((i32x8)a >> 16) * ((i32x8)b >> 16);
  return sums + even + odd;
#endif
}

TOQUE_INLINE void pin(i16x16& x) {
#ifdef TOQUE_HAS_AVX2
  asm("" : "+x"(x));
#else
  (void)x;
#endif
}

// Rounds to nearest; halfway cases to even.
TOQUE_INLINE f32x8 to_floats(i32x8 x) { return __builtin_convertvector(x, f32x8); }

// Eight bytes as numbers.
TOQUE_INLINE f32x8 bytes_to_floats(const uint8_t* from) {
#ifdef TOQUE_HAS_AVX2
  return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si64(from)));
#else
  u8x8 x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, i32x8), f32x8);
#endif
}

// Eight int8 or uint8.
template <class Byte>
TOQUE_INLINE i32x8 widen_bytes(const uint8_t* from) {
#ifdef TOQUE_HAS_AVX2
  const __m128i x = _mm_loadl_epi64((const __m128i*)from);
  constexpr bool is_signed = (Byte)-1 < 0;
  return (i32x8)(is_signed ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
#else
  i32x8 wide;
  for (int i = 0; i < LANES; ++i) wide[i] = (Byte)from[i];
  return wide;
#endif
}

// Eight int8, each twice in neighbouring elements: what the operands of pairs are multiplied with.
TOQUE_INLINE i16x16 widen_twice(const uint8_t* from) {
#ifdef TOQUE_HAS_AVX2
  const i32x8 wide = (i32x8)_mm256_cvtepi8_epi32(_mm_loadu_si64(from));
#else
  i8x8 x;
  memcpy(&x, from, sizeof x);
  const i32x8 wide = __builtin_convertvector(x, i32x8);
#endif
  return (i16x16)((wide & 0xffff) | wide << 16);
}

// Of numbers below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction, so that the sum is rounded
// to the nearest integer, halfway cases to even, and the integer stands in the lowest bits.
TOQUE_INLINE i32x8 to_nearest(f32x8 x) {
  const f32x8 magic = splat(12582912.0f);
  return (i32x8)(x + magic) - (i32x8)magic;
}

// Of integers that fit.
TOQUE_INLINE void store_shorts(int16_t* to, i32x8 x) {
  const i16x8 narrow = __builtin_convertvector(x, i16x8);
  memcpy(to, &narrow, sizeof narrow);
}

// ------------------------------------------------------------------------------- transposition

#define TOQUE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i32x8{__VA_ARGS__})

// Rows become columns, in place. The three rounds are those that a 256-bit unit has instructions
// for: interleave within each half, exchange pairs within each half, exchange halves.
TOQUE_INLINE void transpose(f32x8 (&m)[8]) {
  f32x8 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = TOQUE_SHUFFLE(m[i], m[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = TOQUE_SHUFFLE(m[i], m[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {  // columns 2 j and 2 j + 1, and those 4 to the right
      b[i + 2 * j] = TOQUE_SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = TOQUE_SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    m[i] = TOQUE_SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    m[i + 4] = TOQUE_SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
