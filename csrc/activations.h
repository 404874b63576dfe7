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
//
// Where BY_QUADS, the place of a group's integers holds their bytes instead: q >> 7 of all, then
// q & 127. Both fit a signed byte, and q is 128 times the first plus the second. The order of each
// eight is that of quads.h: 0 4 1 5 2 6 3 7.
//
// Groups lie after one another and within each all rows, a cache line each: a tile's rows are
// neighbours at constant distances, whatever the number of inputs.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

constexpr float LARGEST_ACTIVATION = 8191;

struct Activations {
  long rows;          // from one group to the next
  int16_t* q;         // [groups, rows, GROUP]; where BY_QUADS the bytes of it
  float* scale;       // [groups, rows]
  float* scaled_sum;  // [groups, rows]: scale * sum of q, what an offset is multiplied with
  int32_t* sum;       // [groups, rows]: of q

  Activations from(long group, long row) const {
    const long place = group * rows + row;
    return {rows, q + place * GROUP, scale + place, scaled_sum + place, sum + place};
  }
};

inline Activations lay_out(const Input& input) {
  const long groups = input.rows * (input.in / GROUP);
  float* scales = (float*)((int16_t*)input.scratch + input.rows * input.in);
  return {input.rows, (int16_t*)input.scratch, scales, scales + groups,
          (int32_t*)(scales + 2 * groups)};
}

// Of inputs LANES * i.. and the LANES before them. Little-endian words make bytes of one vector and
// the other alternate, which is the order of quads if LANES is four.
TOQUE_INLINE void store_halves(int16_t* group, int i, ints before, ints q) {
  int16_t* to = group + i / 2 * LANES;
  store_shorts(to, (before >> 7 & 0xff) | (q >> 7) << 8);
  store_shorts(to + GROUP / 2, (before & 127) | (q & 127) << 8);
}

// GROUP inputs, to the group and row that `to` begins with.
inline void quantize_group(const float* x, const Activations& to) {
  constexpr int VECTORS = GROUP / LANES;
  constexpr int32_t INFINITE = 0x7f800000;
  floats values[VECTORS];
  ints largest = splat_integer(0);  // as bits, which are in the order of magnitudes, NaN last
  for (int i = 0; i < VECTORS; ++i) {
    values[i] = load(x + i * LANES);
    const ints magnitude = (ints)values[i] & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const int32_t bits = max_lane(largest);
  const float magnitude = bits_to_float((uint32_t)bits);
  const bool is_number = bits < INFINITE, is_zero = magnitude < 0x1p-100f;
  const float inverse = is_number && !is_zero ? LARGEST_ACTIVATION / magnitude : 0;
  const float scale = !is_number ? NAN : is_zero ? 0 : magnitude / LARGEST_ACTIVATION;
  ints sums = splat_integer(0), before = sums;
  for (int i = 0; i < VECTORS; ++i) {
    const ints q = is_number ? to_nearest(values[i] * splat(inverse)) : splat_integer(0);
    if constexpr (!BY_QUADS) store_shorts(to.q + i * LANES, q);
    if (BY_QUADS && i % 2) store_halves(to.q, i, before, q);
    sums += q;
    before = q;
  }
  *to.scale = scale;
  *to.sum = sum(sums);
  *to.scaled_sum = scale * (float)*to.sum;
}

// All rows. The caller waits: products need whole rows. Threads take groups, whose results lie on
// cache lines of their own.
inline Activations quantize(Pool& pool, const Input& input) {
  const Activations all = lay_out(input);
  const double cost = 4.0 * input.rows * input.in;
  parallel_ranges(pool, input.in / GROUP, cost, [=](long begin, long end, int) {
    for (long g = begin; g < end; ++g) {
      for (long row = 0; row < input.rows; ++row) {
        quantize_group(input.x + row * input.in + g * GROUP, all.from(g, row));
      }
    }
  });
  return all;
}

}  // namespace TOQUE_ISA
}  // namespace toque
