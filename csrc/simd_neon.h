// NEON of ARMv8-A, any 64-bit ARM: see simd.h for what each function means.
#pragma once

#include <arm_neon.h>

#include "lanes.h"

namespace toque {
namespace TOQUE_ISA {

TOQUE_INLINE floats fma(floats a, floats b, floats c) {
  return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

TOQUE_INLINE void pin(floats& x) { asm("" : "+w"(x)); }
TOQUE_INLINE void pin(shorts& x) { asm("" : "+w"(x)); }

TOQUE_INLINE floats load(const half* from) {
  return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

TOQUE_INLINE void store(half* to, floats x) {
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
}

TOQUE_INLINE floats load_bfloats(const void* from) {
  few_ushorts x;
  memcpy(&x, from, sizeof x);
  return (floats)vshll_n_u16((uint16x4_t)x, 16);
}

TOQUE_INLINE shorts widen(const uint8_t* from) {
  return (shorts)vmovl_s8(vreinterpret_s8_u8(vld1_u8(from)));
}

template <class Byte>
TOQUE_INLINE ints widen_bytes(const uint8_t* from) {
  uint32_t four;
  memcpy(&four, from, sizeof four);
  const uint8x8_t x = vcreate_u8(four);
  constexpr bool is_signed = (Byte)-1 < 0;
  if constexpr (is_signed) {
    return (ints)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(x))));
  } else {
    return (ints)vmovl_u16(vget_low_u16(vmovl_u8(x)));
  }
}

// The pair once: multiplications name the lane they want.
typedef int16x4_t InputPair;

TOQUE_INLINE InputPair splat_pair(const int16_t* x) {
  uint32_t pair;
  memcpy(&pair, x, sizeof pair);
  return vcreate_s16(pair);
}

// The weights of even and odd inputs apart, which the rows of a tile share, then two multiply-adds.
// For processors with the dot product of bytes there is quads.h.
TOQUE_INLINE ints add_pair_products(shorts a, InputPair b, ints sums) {
  const int16x8_t x = (int16x8_t)a;
  const int16x4_t even = vget_low_s16(vuzp1q_s16(x, x)), odd = vget_low_s16(vuzp2q_s16(x, x));
  const int32x4_t added = vmlal_lane_s16((int32x4_t)sums, even, b, 0);
  return (ints)vmlal_lane_s16(added, odd, b, 1);
}

#if defined(TOQUE_HAS_DOT)
TOQUE_INLINE quads alternate(const uint8_t* a, const uint8_t* b) {
  const uint8x8_t none = vdup_n_u8(0);
  return (quads)vzip1q_u8(vcombine_u8(vld1_u8(a), none), vcombine_u8(vld1_u8(b), none));
}

template <int PLACE>
TOQUE_INLINE ints add_quad_products(quads a, quads b, ints sums) {
  return (ints)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)a, (int8x16_t)b, PLACE);
}
#endif

TOQUE_INLINE ushorts with_bits(ushorts x, uint16_t mask, ushorts from) { return x | (from & mask); }

}  // namespace TOQUE_ISA
}  // namespace toque
