// The inputs of products with integer weights: 14-bit integers with a scale per row and GROUP.
//
//     x[k] = scale * q[k],  q = round(x / scale),  scale = largest |x| of the group / 8191
//
// 14 bits are as many as keep the sums exact: an instruction adds two products, and a group's 32
// products of 14 and 8 bits (Q6_K: with its scales 13) stay below 2^31. The error of a value is at
// most half a step, 6.1e-5 of the group's largest: 64 times less than that of 8 bits.
//
// A group that holds NaN or infinity has the scale NaN, and makes every output of its row NaN.
// A group below 2^-100 is zero: the inverse of its scale would not be a float.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

constexpr float LARGEST_ACTIVATION = 8191;

struct Activations {
  long in;
  int16_t* q;         // [rows, in]
  float* scale;       // [rows, in / GROUP]
  float* scaled_sum;  // [rows, in / GROUP]: scale * sum of q, what an offset is multiplied with
  int32_t* sum;       // [rows, in / GROUP]: of q

  long groups() const { return in / GROUP; }

  Activations from_row(long row) const {
    return {in, q + row * in, scale + row * groups(), scaled_sum + row * groups(),
            sum + row * groups()};
  }
};

inline Activations lay_out(const Input& input) {
  const long groups = input.rows * (input.in / GROUP);
  float* scales = (float*)((int16_t*)input.scratch + input.rows * input.in);
  return {input.in, (int16_t*)input.scratch, scales, scales + groups,
          (int32_t*)(scales + 2 * groups)};
}

inline int32_t max_lane(i32x8 x) {
  int32_t best = x[0];
  for (int i = 1; i < LANES; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// Group `g` of the row that `to` begins with.
inline void quantize_group(const float* x, long g, const Activations& to) {
  constexpr int VECTORS = GROUP / LANES;
  constexpr int32_t INFINITE = 0x7f800000;
  f32x8 values[VECTORS];
  i32x8 largest = splat_integer(0);  // as bits, which are in the order of magnitudes, NaN last
  for (int i = 0; i < VECTORS; ++i) {
    values[i] = load(x + g * GROUP + i * LANES);
    const i32x8 magnitude = (i32x8)values[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const int32_t bits = max_lane(largest);
  const float magnitude = bits_to_float((uint32_t)bits);
  const bool is_number = bits < INFINITE, is_zero = magnitude < 0x1p-100f;
  const float inverse = is_number && !is_zero ? LARGEST_ACTIVATION / magnitude : 0;
  const float scale = !is_number ? NAN : is_zero ? 0 : magnitude / LARGEST_ACTIVATION;
  i32x8 sums = splat_integer(0);
  for (int i = 0; i < VECTORS; ++i) {
    const i32x8 q = is_number ? to_nearest(values[i] * splat(inverse)) : splat_integer(0);
    store_shorts(to.q + g * GROUP + i * LANES, q);
    sums += q;
  }
  int32_t sum = 0;
  for (int i = 0; i < LANES; ++i) sum += sums[i];
  to.scale[g] = scale;
  to.scaled_sum[g] = scale * (float)sum;
  to.sum[g] = sum;
}

// All rows. The caller waits: products need whole rows.
inline Activations quantize(Pool& pool, const Input& input) {
  const Activations all = lay_out(input);
  parallel_ranges(pool, input.rows, 4.0 * input.rows * input.in, [=](long begin, long end, int) {
    for (long row = begin; row < end; ++row) {
      for (long g = 0; g < all.groups(); ++g) {
        quantize_group(input.x + row * input.in, g, all.from_row(row));
      }
    }
  });
  return all;
}

}  // namespace TOQUE_ISA
}  // namespace toque
