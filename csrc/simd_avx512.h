// AVX-512 (F, BW, VL, DQ) with VNNI, FMA and F16C: see simd.h for what each function means.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace toque {
namespace TOQUE_ISA {

TOQUE_INLINE floats fma(floats a, floats b, floats c) {
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

TOQUE_INLINE void pin(floats& x) { asm("" : "+v"(x)); }
TOQUE_INLINE void pin(shorts& x) { asm("" : "+v"(x)); }

TOQUE_INLINE floats load(const half* from) {
  return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

TOQUE_INLINE void store(half* to, floats x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}

TOQUE_INLINE floats load_bfloats(const void* from) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return (floats)_mm512_slli_epi32(wide, 16);
}

TOQUE_INLINE shorts widen(const uint8_t* from) {
  return (shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
}

template <class Byte>
TOQUE_INLINE ints widen_bytes(const uint8_t* from) {
  const __m128i x = _mm_loadu_si128((const __m128i*)from);
  constexpr bool is_signed = (Byte)-1 < 0;
  return (ints)(is_signed ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
}

// Stays in memory: the multiplication reads a pair and repeats it at no cost, if asked to. The
// compiler makes two instructions of it, and those for loading become the bottleneck.
struct InputPair {
  typedef int32_t __attribute__((may_alias)) Bits;
  const Bits* at;
};

TOQUE_INLINE InputPair splat_pair(const int16_t* x) { return {(const InputPair::Bits*)x}; }

TOQUE_INLINE ints add_pair_products(shorts a, InputPair b, ints sums) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(a), "m"(*b.at));
  return sums;
}

TOQUE_INLINE ushorts with_bits(ushorts x, uint16_t mask, ushorts from) {
  constexpr int OR_OF_FIRST_AND_BOTH_OTHERS = 0xf8;
  return (ushorts)_mm512_ternarylogic_epi32((__m512i)x, _mm512_set1_epi16((short)mask),
                                            (__m512i)from, OR_OF_FIRST_AND_BOTH_OTHERS);
}

}  // namespace TOQUE_ISA
}  // namespace toque
