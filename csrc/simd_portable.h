// Any machine: see simd.h for what each function means.
#pragma once

#include "half.h"
#include "lanes.h"

namespace toque {
namespace TOQUE_ISA {

// Multiplied and added, which rounds twice, everywhere on this path.
TOQUE_INLINE floats fma(floats a, floats b, floats c) { return a * b + c; }

TOQUE_INLINE void pin(floats&) {}
TOQUE_INLINE void pin(shorts&) {}

TOQUE_INLINE floats load(const half* from) {
  floats x;
  for (int i = 0; i < LANES; ++i) x[i] = half_to_float(from[i]);
  return x;
}

TOQUE_INLINE void store(half* to, floats x) {
  for (int i = 0; i < LANES; ++i) to[i] = float_to_half(x[i]);
}

TOQUE_INLINE floats load_bfloats(const void* from) {
  few_ushorts x;
  memcpy(&x, from, sizeof x);
  return (floats)(__builtin_convertvector(x, ints) << 16);
}

TOQUE_INLINE shorts widen(const uint8_t* from) {
  bytes x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, shorts);
}

template <class Byte>
TOQUE_INLINE ints widen_bytes(const uint8_t* from) {
  ints wide;
  for (int i = 0; i < LANES; ++i) wide[i] = (Byte)from[i];
  return wide;
}

typedef shorts InputPair;

TOQUE_INLINE InputPair splat_pair(const int16_t* x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return (shorts)splat_integer(pair);
}

// Even elements are the lower halves of 32-bit lanes; shifting brings them up with their sign.
TOQUE_INLINE ints add_pair_products(shorts a, InputPair b, ints sums) {
  const ints even = ((ints)a << 16 >> 16) * ((ints)b << 16 >> 16);
  const ints odd = ((ints)a >> 16) * ((ints)b >> 16);
  return sums + even + odd;
}

TOQUE_INLINE ushorts with_bits(ushorts x, uint16_t mask, ushorts from) { return x | (from & mask); }

}  // namespace TOQUE_ISA
}  // namespace toque
