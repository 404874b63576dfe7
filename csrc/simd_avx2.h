// AVX2 with FMA and F16C: see simd.h for what each function means.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace toque {
namespace TOQUE_ISA {

TOQUE_INLINE floats fma(floats a, floats b, floats c) {
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

TOQUE_INLINE void pin(floats& x) { asm("" : "+x"(x)); }
TOQUE_INLINE void pin(shorts& x) { asm("" : "+x"(x)); }

TOQUE_INLINE floats load(const half* from) {
  return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}

TOQUE_INLINE void store(half* to, floats x) {
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}

TOQUE_INLINE floats load_bfloats(const void* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  return (floats)_mm256_slli_epi32(wide, 16);
}

TOQUE_INLINE shorts widen(const uint8_t* from) {
  return (shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
}

template <class Byte>
TOQUE_INLINE ints widen_bytes(const uint8_t* from) {
  const __m128i x = _mm_loadl_epi64((const __m128i*)from);
  constexpr bool is_signed = (Byte)-1 < 0;
  return (ints)(is_signed ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x));
}

typedef shorts InputPair;

TOQUE_INLINE InputPair splat_pair(const int16_t* x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return (shorts)splat_integer(pair);
}

// The empty asm keeps the additions in the order in which they are written: GCC would turn the chain
// of an unrolled loop into a tree, and run out of registers.
TOQUE_INLINE ints add_pair_products(shorts a, InputPair b, ints sums) {
  ints added = sums + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  asm("" : "+x"(added));
  return added;
}

TOQUE_INLINE ushorts with_bits(ushorts x, uint16_t mask, ushorts from) { return x | (from & mask); }

}  // namespace TOQUE_ISA
}  // namespace toque
