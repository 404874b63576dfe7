// Products of quantized activations with packed integer weights.
//
// For each output and each group of 32 inputs, in this order along the inputs:
//
//     n     = sum of q * w             exact: integers
//     total = total + (weight scale * activation scale) * n
//     total = total + offset * (activation scale * sum of q)       kinds with an offset only
//
// with fused multiply-adds. There are two ways to read the weights: few rows unpack a panel as they
// go, in registers; many rows unpack a part of it once, into the L1 cache. Both see the same
// integers and the same scales and run the same tile, so that a row's bits do not depend on which.
#pragma once

#include "activations.h"
#include "groups.h"

namespace toque {
namespace TOQUE_ISA {

// Rows of a tile. An unrolled loop over pairs has constant places in the payload.
#if defined(TOQUE_HAS_AVX2)
constexpr int INTEGER_ROWS = 4;  // 8 sums + 2 weights + 1 input of 16 registers; 6 rows are slower
#define TOQUE_UNROLL_PAIRS _Pragma("GCC unroll 16")
#else
constexpr int INTEGER_ROWS = 2;
#define TOQUE_UNROLL_PAIRS
#endif

// Up to so many rows, unpacking in registers again for each tile is cheaper than writing the
// weights down. Bytes with no small scales only have to be widened, which loading does.
constexpr long few_rows(Kind kind) {
  return has_nibbles(kind) || scales_bytes(kind) > 0 ? 3 * INTEGER_ROWS : 1L << 60;
}

// A panel's weights where they lie.
template <Kind KIND>
struct InPlace {
  static constexpr bool OFFSETS = has_offset(KIND);
  static constexpr int ZERO = zero_point(KIND);
  using Reader = Group<KIND>;

  const uint8_t* panel;
  long first_group;

  Reader group(long g) const { return Reader(panel, first_group + g); }
};

// Groups that all rows pass before the next ones: 9 KB once unpacked, which leave the L1 cache room
// for the activations.
constexpr long PART_GROUPS = 8;

struct Unpacked {
  alignas(64) int16_t weights[PART_GROUPS][PAIRS][2 * PANEL];
  float scales[PART_GROUPS][PANEL];
  float offsets[PART_GROUPS][PANEL];
};

template <bool WITH_OFFSETS>
struct InCache {
  static constexpr bool OFFSETS = WITH_OFFSETS;
  static constexpr int ZERO = 0;
  struct Reader {
    const Unpacked& part;
    long g;
    TOQUE_MEMBER f32x8 scale(int side) const { return load(part.scales[g] + LANES * side); }
    TOQUE_MEMBER f32x8 offset(int side) const { return load(part.offsets[g] + LANES * side); }
    TOQUE_MEMBER i16x16 pair(long p, int side) const {
      return load_shorts(part.weights[g][p] + PANEL * side);
    }
  };

  const Unpacked& part;

  Reader group(long g) const { return {part, g}; }
};

template <Kind KIND>
inline void unpack(const uint8_t* panel, long first_group, long groups, Unpacked& to) {
  for (long i = 0; i < groups; ++i) {
    const Group<KIND> group(panel, first_group + i);
    for (int side = 0; side < 2; ++side) {
      store(to.scales[i] + LANES * side, group.scale(side));
      store(to.offsets[i] + LANES * side, group.offset(side));
      TOQUE_UNROLL_PAIRS
      for (long p = 0; p < PAIRS; ++p) {
        const i16x16 q = group.pair(p, side) - (int16_t)zero_point(KIND);
        memcpy(to.weights[i][p] + PANEL * side, &q, sizeof q);
      }
    }
  }
}

// sums[ROWS, PANEL] += `groups` groups, from the first of x and of the weights on.
template <int ROWS, class Weights>
inline void add_groups(const Weights& weights, const Activations& x, long groups, float* sums) {
  for (long g = 0; g < groups; ++g) {
    const typename Weights::Reader group = weights.group(g);
    i32x8 n[ROWS][2];
    for (int r = 0; r < ROWS; ++r) {
      const int32_t zero = Weights::ZERO ? -Weights::ZERO * x.sum[r * x.groups() + g] : 0;
      n[r][0] = n[r][1] = splat_integer(zero);
    }
    const int16_t* q = x.q + g * GROUP;
      TOQUE_UNROLL_PAIRS
    for (long p = 0; p < PAIRS; ++p) {
      i16x16 left = group.pair(p, 0), right = group.pair(p, 1);
      pin(left);
      pin(right);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const i16x16 input = splat_pair(q + r * x.in + 2 * p);
        n[r][0] = add_pair_products(left, input, n[r][0]);
        n[r][1] = add_pair_products(right, input, n[r][1]);
      }
    }
    for (int side = 0; side < 2; ++side) {
      const f32x8 scale = group.scale(side), offset = group.offset(side);
      for (int r = 0; r < ROWS; ++r) {
        const long place = r * x.groups() + g;
        float* sum = sums + r * PANEL + LANES * side;
        f32x8 total = load(sum);
        total = fma(scale * splat(x.scale[place]), to_floats(n[r][side]), total);
        if (Weights::OFFSETS) total = fma(offset, splat(x.scaled_sum[place]), total);
        store(sum, total);
      }
    }
  }
}

template <int ROWS, class Weights>
inline void add_groups_of(const Weights& w, const Activations& x, long rows, long groups,
                          float* sums) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return add_groups<ROWS>(w, x, groups, sums);
    add_groups_of<ROWS - 1>(w, x, rows, groups, sums);
  }
}

// The last two tiles share their rows evenly, as in tile.h.
template <class Weights>
inline void add_rows(const Weights& weights, Activations x, long rows, long groups, float* sums) {
  while (rows > 0) {
    const long last = rows > INTEGER_ROWS ? (rows + 1) / 2 : rows;
    const long tile = rows >= 2 * INTEGER_ROWS ? INTEGER_ROWS : last;
    add_groups_of<INTEGER_ROWS>(weights, x, tile, groups, sums);
    x = x.from_row(tile);
    sums += tile * PANEL;
    rows -= tile;
  }
}

inline Activations from_group(Activations x, long g) {
  x.q += g * GROUP;
  x.scale += g;
  x.scaled_sum += g;
  x.sum += g;
  return x;
}

// sums[rows, PANEL] += x @ panel.
template <Kind KIND>
inline void add_integer_product(const Activations& x, long rows, const uint8_t* panel,
                                float* sums) {
  Unpacked part;
  for (long g = 0; g < x.groups(); g += PART_GROUPS) {
    const long groups = x.groups() - g < PART_GROUPS ? x.groups() - g : PART_GROUPS;
    if (rows <= few_rows(KIND)) {
      add_rows(InPlace<KIND>{panel, g}, from_group(x, g), rows, groups, sums);
    } else {
      unpack<KIND>(panel, g, groups, part);
      add_rows(InCache<has_offset(KIND)>{part}, from_group(x, g), rows, groups, sums);
    }
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
