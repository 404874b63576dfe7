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
// BY_QUADS, unpacking is so cheap beside the products that there is only the first way.
#pragma once

#include "activations.h"
#include "groups.h"
#if defined(TOQUE_HAS_DOT)
#include "quads.h"
#endif

namespace toque {
namespace TOQUE_ISA {

// Rows of a tile: as many as keep their sums, the weights and one input in registers.
#if defined(TOQUE_HAS_AVX512)
constexpr int INTEGER_ROWS = 16;  // 16 sums + 1 weight of 32 registers
#elif defined(TOQUE_HAS_AVX2)
constexpr int INTEGER_ROWS = 4;  // 8 sums + 2 weights + 1 input of 16 registers; 6 rows are slower
#elif defined(TOQUE_HAS_NEON)
constexpr int INTEGER_ROWS = 4;  // 16 sums + 8 halves of weights + 1 input of 32 registers
#else
constexpr int INTEGER_ROWS = 2;
#endif

// Up to so many rows, unpacking in registers is cheaper than writing the weights down. Bytes only
// have to be widened, which loading does.
constexpr long FEW_ROWS = 4;
constexpr long few_rows(Kind kind) {
  if (BY_QUADS) return 1L << 60;
  return has_nibbles(kind) || INTEGER_ROWS > FEW_ROWS ? FEW_ROWS : 1L << 60;
}

// An unrolled loop over pairs has constant places in the payload.
#if defined(TOQUE_HAS_AVX512) || defined(TOQUE_HAS_AVX2) || defined(TOQUE_HAS_NEON)
#define TOQUE_UNROLL_PAIRS _Pragma("GCC unroll 16")
#else
#define TOQUE_UNROLL_PAIRS
#endif

// Weights are asked for so many bytes before they are used: what a processor foresees by itself ends
// with a page, and while many rows pass a part, it foresees nothing.
constexpr long AHEAD = 4096;

TOQUE_INLINE void prefetch(const uint8_t* from, long bytes) {
  constexpr long LINE = 64, INTO_L2 = 2;
  for (long i = 0; i < bytes; i += LINE) __builtin_prefetch(from + i, 0, INTO_L2);
}

// A panel's weights where they lie.
template <Kind KIND>
struct InPlace {
  static constexpr bool OFFSETS = has_offset(KIND);
  static constexpr int ZERO = Group<KIND>::ZERO;
  static constexpr int ROWS = INTEGER_ROWS < FEW_ROWS ? INTEGER_ROWS : FEW_ROWS;
  using Reader = Group<KIND>;

  const uint8_t* panel;
  long first_group;
  bool prefetches = true;

  Reader group(long g) const { return Reader(panel, first_group + g); }
  TOQUE_MEMBER void prefetch_after(long g) const {
    constexpr long BYTES = record_bytes(KIND) / groups_per_record(KIND);
    if (prefetches) prefetch(panel + (first_group + g) * BYTES + AHEAD, BYTES);
  }
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
  static constexpr int ROWS = INTEGER_ROWS;
  struct Reader {
    const Unpacked& part;
    long g;
    TOQUE_MEMBER floats scale(int side) const { return load(part.scales[g] + LANES * side); }
    TOQUE_MEMBER floats offset(int side) const { return load(part.offsets[g] + LANES * side); }
    TOQUE_MEMBER shorts pair(long p, int side) const {
      return load_shorts(part.weights[g][p] + 2 * LANES * side);
    }
  };

  const Unpacked& part;
  const uint8_t* from;  // where the part lay
  long bytes;           // of a group
  bool prefetches = true;

  Reader group(long g) const { return {part, g}; }
  TOQUE_MEMBER void prefetch_after(long g) const {
    if (prefetches) prefetch(from + g * bytes + AHEAD, bytes);
  }
};

template <Kind KIND>
inline void unpack(const uint8_t* panel, long first_group, long groups, Unpacked& to) {
  for (long i = 0; i < groups; ++i) {
    const Group<KIND> group(panel, first_group + i);
    for (int side = 0; side < SIDES; ++side) {
      store(to.scales[i] + LANES * side, group.scale(side));
      store(to.offsets[i] + LANES * side, group.offset(side));
      TOQUE_UNROLL_PAIRS
      for (long p = 0; p < PAIRS; ++p) {
        const shorts q = group.pair(p, side) - (int16_t)Group<KIND>::ZERO;
        memcpy(to.weights[i][p] + 2 * LANES * side, &q, sizeof q);
      }
    }
  }
}

// The integer sums of a tile.
template <int ROWS>
struct Sums32 {
  ints n[ROWS][SIDES];
};

template <int ROWS, class Reader>
TOQUE_INLINE void add_pair(const Reader& group, const int16_t* q, long p, Sums32<ROWS>& to) {
  shorts weights[SIDES];
  for (int side = 0; side < SIDES; ++side) {
    weights[side] = group.pair(p, side);
    pin(weights[side]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
    const InputPair input = splat_pair(q + r * GROUP + 2 * p);
    for (int side = 0; side < SIDES; ++side) {
      to.n[r][side] = add_pair_products(weights[side], input, to.n[r][side]);
    }
  }
}

template <int ROWS, class Weights>
TOQUE_INLINE void add_pairs(const typename Weights::Reader& group, const int16_t* q,
                            Sums32<ROWS>& to) {
  if constexpr (ROWS <= FEW_ROWS) {
    TOQUE_UNROLL_PAIRS
    for (long p = 0; p < PAIRS; ++p) add_pair<ROWS>(group, q, p, to);
  } else {
#pragma GCC unroll 2
    for (long p = 0; p < PAIRS; ++p) add_pair<ROWS>(group, q, p, to);
  }
}

// sums[ROWS, PANEL] += `groups` groups, from the first of x and of the weights on.
template <int ROWS, class Weights>
inline void add_groups(const Weights& weights, Activations x, long groups, float* sums) {
  for (long g = 0; g < groups; ++g, x = x.from(1, 0)) {
    const typename Weights::Reader group = weights.group(g);
    weights.prefetch_after(g);
    Sums32<ROWS> to;
    for (int r = 0; r < ROWS; ++r) {
      const ints below = splat_integer(Weights::ZERO ? -Weights::ZERO * x.sum[r] : 0);
      for (int side = 0; side < SIDES; ++side) to.n[r][side] = below;
    }
#if defined(TOQUE_HAS_DOT)
    add_quads<ROWS>(group, x.q, to.n);
#else
    add_pairs<ROWS, Weights>(group, x.q, to);
#endif
    for (int side = 0; side < SIDES; ++side) {
      const floats scale = group.scale(side), offset = group.offset(side);
      for (int r = 0; r < ROWS; ++r) {
        float* sum = sums + r * PANEL + LANES * side;
        floats total = load(sum);
        total = fma(scale * splat(x.scale[r]), to_floats(to.n[r][side]), total);
        if (Weights::OFFSETS) total = fma(offset, splat(x.scaled_sum[r]), total);
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
inline void add_rows(Weights weights, Activations x, long rows, long groups, float* sums) {
  constexpr long MOST = Weights::ROWS;
  while (rows > 0) {
    const long last = rows > MOST ? (rows + 1) / 2 : rows;
    const long tile = rows >= 2 * MOST ? MOST : last;
    add_groups_of<MOST>(weights, x, tile, groups, sums);
    weights.prefetches = false;
    x = x.from(0, tile);
    sums += tile * PANEL;
    rows -= tile;
  }
}

// sums[rows, PANEL] += x @ panel, of `all` groups.
template <Kind KIND>
inline void add_integer_product(const Activations& x, long all, long rows, const uint8_t* panel,
                                float* sums) {
  Unpacked part;
  constexpr long BYTES = record_bytes(KIND) / groups_per_record(KIND);
  for (long g = 0; g < all; g += PART_GROUPS) {
    const long groups = all - g < PART_GROUPS ? all - g : PART_GROUPS;
    if (BY_QUADS || rows <= few_rows(KIND)) {
      add_rows(InPlace<KIND>{panel, g}, x.from(g, 0), rows, groups, sums);
    } else if constexpr (!BY_QUADS) {
      unpack<KIND>(panel, g, groups, part);
      const InCache<has_offset(KIND)> weights{part, panel + g * BYTES, BYTES};
      add_rows(weights, x.from(g, 0), rows, groups, sums);
    }
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
