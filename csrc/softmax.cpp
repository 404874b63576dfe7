// What sampling does to every logit of a row: the largest of each block, and e^x in double precision.

#include "kernels.h"

#include <math.h>
#include <string.h>

namespace toque {
namespace TOQUE_ISA {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));

static f32x4 load_some(const float* from, long count) {
  f32x4 x = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
  if (count >= 4) {
    memcpy(&x, from, sizeof x);
  } else {
    memcpy(&x, from, count * sizeof(float));
  }
  return x;
}

bool block_maxima(const float* x, long count, float* maxima) {
  i32x4 wrong = {0, 0, 0, 0};
  for (long block = 0; block * SAMPLE_BLOCK < count; ++block) {
    const long begin = block * SAMPLE_BLOCK;
    const long end = count - begin < SAMPLE_BLOCK ? count : begin + SAMPLE_BLOCK;
    f32x4 best = load_some(x + begin, end - begin);
    for (long i = begin; i < end; i += 4) {
      const f32x4 values = load_some(x + i, end - i);
      wrong |= values != values;
      best = values > best ? values : best;
    }
    const float left = best[0] > best[1] ? best[0] : best[1];
    const float right = best[2] > best[3] ? best[2] : best[3];
    maxima[block] = left > right ? left : right;
  }
  return !(wrong[0] | wrong[1] | wrong[2] | wrong[3]);
}

static f64x8 eight(double x) { return f64x8{x, x, x, x, x, x, x, x}; }

// e^x for x <= 0, to about one unit in the last place; exactly 1 for 0, and 0 below -708, where
// doubles run out of normal numbers. x = n ln 2 + r, with ln 2 in two parts as in fdlibm
// (https://www.netlib.org/fdlibm/e_exp.c), and the Taylor series of e^r on |r| <= ln 2 / 2.
static f64x8 exp(f64x8 x) {
  const f64x8 low = eight(-708), magic = eight(6755399441055744.0);  // 1.5 * 2^52: rounds
  const f64x8 y = x < low ? low : x;
  const f64x8 shifted = y * 1.44269504088896338700 + magic;
  const f64x8 n = shifted - magic;
  const f64x8 r = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  constexpr double OVER_FACTORIAL[] = {1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                       1.0 / 362880.0,    1.0 / 40320.0,    1.0 / 5040.0,
                                       1.0 / 720.0,       1.0 / 120.0,      1.0 / 24.0,
                                       1.0 / 6.0,         0.5,              1.0,
                                       1.0};
  f64x8 p = eight(1.0 / 6227020800.0);
#pragma GCC unroll 16
  for (double term : OVER_FACTORIAL) p = p * r + term;
  const i64x8 exponent = ((i64x8)shifted - (i64x8)magic + 1023) << 52;  // the bits of 2^n
  return x < low ? eight(0) : p * (f64x8)exponent;
}

double weigh(const float* x, long count, float top, double inverse_temperature, double* weights) {
  f64x8 total = eight(0);
  for (long i = 0; i < count; i += 8) {
    const long size = count - i < 8 ? count - i : 8;
    f32x8 logits = {-INFINITY, -INFINITY, -INFINITY, -INFINITY,
                    -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    if (size == 8) {
      memcpy(&logits, x + i, sizeof logits);  // a constant size becomes one instruction
    } else {
      memcpy(&logits, x + i, size * sizeof(float));
    }
    const f64x8 values = __builtin_convertvector(logits, f64x8);
    const f64x8 e = exp((values - (double)top) * inverse_temperature);
    total += e;
    if (!weights) continue;
    if (size == 8) {
      memcpy(weights + i, &e, sizeof e);
    } else {
      memcpy(weights + i, &e, size * sizeof(double));
    }
  }
  const double left = (total[0] + total[4]) + (total[2] + total[6]);
  return left + ((total[1] + total[5]) + (total[3] + total[7]));
}

}  // namespace TOQUE_ISA
}  // namespace toque
