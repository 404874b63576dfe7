// Vectors as the kernels use them. Instruction sets are known to lanes.h (their width) and to
// simd_*.h, one file each; everything else is written in the terms of these files.
//
// What the vector extensions of compilers lack, and every simd_*.h provides:
//
//     fma(a, b, c)               a * b + c. Rounded once where the machine can; never made up by
//                                the compiler (-ffp-contract=off), so that two loops round alike.
//     pin(x)                     keeps floats or shorts in a register. GCC otherwise loads an
//                                operand that several instructions share each time again.
//     load(half*), store(half*)  LANES halves; to the nearest one, ties to even
//     load_bfloats(p)            LANES bfloat16, which are the upper halves of floats
//     widen(p)                   2 * LANES int8 to shorts
//     widen_bytes<Byte>(p)       LANES int8 or uint8 to ints
//     splat_pair(p)              the pair (p[0], p[1]) for every lane, as an InputPair
//     add_pair_products(a, b, s) s[i] + a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1], exact in 32 bits
//     with_bits(x, mask, from)   x | (from & mask)
//
// and where TOQUE_HAS_DOT:
//
//     alternate(p, q)            p[0], q[0], p[1], q[1], ...: 2 * LANES bytes of each
//     add_quad_products<P>(a, b, s)  s[i] + the sum of a[4 i + j] * b[4 P + j], j = 0..3, exact
#pragma once

#include "half.h"
#include "lanes.h"

#if defined(TOQUE_HAS_AVX512)
#include "simd_avx512.h"
#elif defined(TOQUE_HAS_AVX2)
#include "simd_avx2.h"
#elif defined(TOQUE_HAS_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace toque {
namespace TOQUE_ISA {

TOQUE_INLINE floats max(floats a, floats b) { return a > b ? a : b; }

// e^x with a relative error below 2e-7; 0 below -87.3 (where float32 runs out of normal numbers),
// e^88.3 above that, NaN for NaN. Reduction to x = n ln 2 + r and a polynomial for e^r on
// |r| <= ln 2 / 2; its coefficients are those of Cephes' expf (https://www.netlib.org/cephes/).
TOQUE_INLINE floats exp(floats x) {
  const floats low = splat(-87.3f), high = splat(88.3f);
  const floats y = x > high ? high : (x < low ? low : x);  // this order lets NaN through
  // Adding 1.5 * 2^23 leaves no bits for a fraction: rounds to the nearest integer, and the
  // integer stands in the lowest bits.
  const floats magic = splat(12582912.0f);
  const floats shifted = fma(y, splat(1.44269504f), magic);
  const floats n = shifted - magic;
  const floats r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), y));
  floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r + splat(1.0f));
  const ints exponent = ((ints)shifted - (ints)magic + 127) << 23;  // the bits of 2^n
  const floats result = p * (floats)exponent;
  return x < low ? splat(0) : result;
}

// Bytes without a sign.
TOQUE_INLINE floats bytes_to_floats(const uint8_t* from) {
  return to_floats(widen_bytes<uint8_t>(from));
}

// LANES int8, each twice in neighbouring elements: what the operands of pairs are multiplied with.
TOQUE_INLINE shorts widen_twice(const uint8_t* from) {
  const ints wide = widen_bytes<int8_t>(from);
  return (shorts)((wide & 0xffff) | wide << 16);
}

// Of numbers below 2^22: adding 1.5 * 2^23 leaves no bits for a fraction, so that the sum is rounded
// to the nearest integer, halfway cases to even, and the integer stands in the lowest bits.
TOQUE_INLINE ints to_nearest(floats x) {
  const floats magic = splat(12582912.0f);
  return (ints)(x + magic) - (ints)magic;
}

}  // namespace TOQUE_ISA
}  // namespace toque
