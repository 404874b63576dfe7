// What sampling does to every logit of a row: the largest of each block, and e^x in double precision.

#include "kernels.h"

#include <math.h>
#include <string.h>

namespace toque {
namespace TOQUE_ISA {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef double f64x4 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));

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

// e^x for x <= 0, to about one unit in the last place; exactly 1 for 0, and 0 below -708, where
// doubles run out of normal numbers. x = n ln 2 + r, with ln 2 in two parts as in fdlibm
// (https://www.netlib.org/fdlibm/e_exp.c), and the Taylor series of e^r on |r| <= ln 2 / 2.
static f64x4 exp(f64x4 x) {
  const f64x4 low = {-708.0, -708.0, -708.0, -708.0};
  const f64x4 y = x < low ? low : x;
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: rounds to the nearest integer
  const f64x4 shifted = y * 1.44269504088896338700 + magic;
  const f64x4 n = shifted - magic;
  const f64x4 r = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  f64x4 p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const f64x4 magics = {magic, magic, magic, magic};
  const i64x4 exponent = ((i64x4)shifted - (i64x4)magics + 1023) << 52;  // the bits of 2^n
  const f64x4 zero = {0, 0, 0, 0};
  return x < low ? zero : p * (f64x4)exponent;
}

double weigh(const float* x, long count, float top, double inverse_temperature, double* weights) {
  f64x4 total = {0, 0, 0, 0};
  for (long i = 0; i < count; i += 4) {
    const f64x4 values = __builtin_convertvector(load_some(x + i, count - i), f64x4);
    const f64x4 e = exp((values - (double)top) * inverse_temperature);
    total += e;
    if (weights) memcpy(weights + i, &e, (count - i < 4 ? count - i : 4) * sizeof(double));
  }
  return (total[0] + total[2]) + (total[1] + total[3]);
}

}  // namespace TOQUE_ISA
}  // namespace toque
