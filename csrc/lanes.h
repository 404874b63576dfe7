// Vectors of LANES numbers: types, and what the vector extensions of GCC and Clang give anywhere.
//
// The sources are compiled once per instruction set, each time into another namespace:
// -DTOQUE_ISA=avx2 with -mavx2 -mfma -mf16c, for example. LANES is the width that suits it.
// TOQUE_HAS_NEON is said on the command line: every 64-bit ARM has it, the portable path too. So is
// TOQUE_HAS_DOT, for NEON with the dot product of bytes: neighbouring sets may be compiled with it.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "layout.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define TOQUE_HAS_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TOQUE_HAS_AVX2 1
#endif

namespace toque {
namespace TOQUE_ISA {

#if defined(TOQUE_HAS_AVX512)
constexpr long LANES = 16;
#elif defined(TOQUE_HAS_NEON)
constexpr long LANES = 4;
#else
constexpr long LANES = 8;
#endif

// Whether integer products take inputs by four, as bytes (quads.h), or by two, as 16 bits.
#if defined(TOQUE_HAS_DOT)
constexpr bool BY_QUADS = true;
#else
constexpr bool BY_QUADS = false;
#endif

constexpr int SIDES = PANEL / LANES;  // vectors that hold one number of each output of a panel

// LANES numbers of 32 bits, or twice as many of 16.
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef uint16_t ushorts __attribute__((vector_size(4 * LANES)));
typedef int8_t quads __attribute__((vector_size(4 * LANES)));
typedef uint8_t uquads __attribute__((vector_size(4 * LANES)));
// LANES numbers of fewer bits, and twice as many bytes.
typedef int16_t few_shorts __attribute__((vector_size(2 * LANES)));
typedef uint16_t few_ushorts __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(2 * LANES)));
typedef int8_t few_bytes __attribute__((vector_size(LANES)));
typedef uint8_t few_ubytes __attribute__((vector_size(LANES)));
typedef uint16_t half;  // the bits of an IEEE binary16

#define TOQUE_MEMBER inline __attribute__((always_inline))
#define TOQUE_INLINE static TOQUE_MEMBER

// Subtracting zero leaves every number as it is, negative zero included.
TOQUE_INLINE floats splat(float x) { return x - floats{}; }
TOQUE_INLINE ints splat_integer(int32_t x) { return x - ints{}; }

TOQUE_INLINE floats load(const float* from) {
  floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

TOQUE_INLINE void store(float* to, floats x) { memcpy(to, &x, sizeof x); }

// Zeros in the lanes from `count` on.
TOQUE_INLINE floats load_first(const float* from, long count) {
  floats x = splat(0);
  memcpy(&x, from, count * sizeof(float));
  return x;
}

TOQUE_INLINE void store_first(float* to, floats x, long count) {
  memcpy(to, &x, count * sizeof(float));
}

TOQUE_INLINE shorts load_shorts(const void* from) {
  shorts x;
  memcpy(&x, from, sizeof x);
  return x;
}

// Of integers that fit.
TOQUE_INLINE void store_shorts(int16_t* to, ints x) {
  const few_shorts narrow = __builtin_convertvector(x, few_shorts);
  memcpy(to, &narrow, sizeof narrow);
}

// Rounds to nearest; halfway cases to even.
TOQUE_INLINE floats to_floats(ints x) { return __builtin_convertvector(x, floats); }

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

// -------------------------------------------------------------------- all lanes to one number

typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints4 __attribute__((vector_size(16)));

// operation(x[i], x[i + n / 2]) for i < n / 2, then the same of those, until four are left.
template <class Four, class Vector, class Operation>
TOQUE_INLINE Four fold_to_four(Vector x, Operation operation) {
  Four parts[LANES / 4];
  memcpy(parts, &x, sizeof x);
  for (long n = LANES / 8; n > 0; n /= 2) {
    for (long i = 0; i < n; ++i) parts[i] = operation(parts[i], parts[i + n]);
  }
  return parts[0];
}

// Added pairwise in a fixed order: lanes i and i + LANES / 2 first, i and i + 1 last.
TOQUE_INLINE float sum(floats x) {
  const floats4 y = fold_to_four<floats4>(x, [](floats4 a, floats4 b) { return a + b; });
  return (y[0] + y[2]) + (y[1] + y[3]);
}

TOQUE_INLINE int32_t sum(ints x) {
  const ints4 y = fold_to_four<ints4>(x, [](ints4 a, ints4 b) { return a + b; });
  return y[0] + y[1] + y[2] + y[3];
}

TOQUE_INLINE float larger(float a, float b) { return a > b ? a : b; }
TOQUE_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

TOQUE_INLINE float max_lane(floats x) {
  const floats4 y = fold_to_four<floats4>(x, [](floats4 a, floats4 b) { return a > b ? a : b; });
  return larger(larger(y[0], y[1]), larger(y[2], y[3]));
}

TOQUE_INLINE int32_t max_lane(ints x) {
  const ints4 y = fold_to_four<ints4>(x, [](ints4 a, ints4 b) { return a > b ? a : b; });
  return larger(larger(y[0], y[1]), larger(y[2], y[3]));
}

}  // namespace TOQUE_ISA
}  // namespace toque
