// Half precision without instructions for it.
//
//     half:   | sign | 5 exponent, bias 15  | 10 fraction |
//     float:  | sign | 8 exponent, bias 127 | 23 fraction |
#pragma once

#include "lanes.h"

namespace toque {
namespace TOQUE_ISA {

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

}  // namespace TOQUE_ISA
}  // namespace toque
