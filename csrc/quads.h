// The integer sums of a tile where four products of bytes are one instruction (SDOT).
//
// An input q of 14 bits is 128 * high + low (activations.h), and so is its sum with weights w of
// 8 bits or less, exactly:
//
//     sum of q * w = 128 * (sum of high * w) + (sum of low * w)
//
//     high   -64..63      |sum of 32|  <= 32 * 64 * 128  = 2^18,  times 128 2^25
//     low    0..127       |sum of 32|  <  32 * 128 * 128 = 2^19
//
// Q6_K: w - 32 takes 6 bits, so that the sum of 16 is at most 16 * 8191 * 32 < 2^22; with the
// small scale of these 16, 8 bits, and for both halves, it stays below 2^30.
//
// A quad holds four inputs of each output, in the order in which nibbles stand in a group's words,
// two of a word in one mask: of eight inputs quad 0 has 0 4 1 5, quad 1 has 2 6 3 7.
#pragma once

#include "activations.h"
#include "groups.h"

namespace toque {
namespace TOQUE_ISA {

constexpr int QUADS = GROUP / 4;
constexpr int QUADS_PER_VECTOR = LANES;  // of inputs: an instruction names the quad it wants

// A tile's inputs of one group: 4 registers a row.
template <int ROWS>
struct Halves {
  static constexpr int VECTORS = QUADS / QUADS_PER_VECTOR;
  quads high[ROWS][VECTORS], low[ROWS][VECTORS];

  TOQUE_MEMBER explicit Halves(const int16_t* q) {
    for (int r = 0; r < ROWS; ++r) {
      memcpy(high[r], q + r * GROUP, sizeof high[r]);
      memcpy(low[r], q + r * GROUP + GROUP / 2, sizeof low[r]);
    }
  }
};

// Sums over a run of quads for one side: 2 registers a row.
template <int ROWS>
struct HalfSums {
  ints high[ROWS] = {}, low[ROWS] = {};

  TOQUE_MEMBER ints whole(int r) const { return (high[r] << 7) + low[r]; }
};

template <int QUAD, int ROWS, class Reader>
TOQUE_INLINE void add_quad(const Reader& group, const Halves<ROWS>& x, int side,
                           HalfSums<ROWS>& to) {
  constexpr int VECTOR = QUAD / QUADS_PER_VECTOR, PLACE = QUAD % QUADS_PER_VECTOR;
  const quads weights = group.template quad<QUAD>(side);
  for (int r = 0; r < ROWS; ++r) {
    to.high[r] = add_quad_products<PLACE>(weights, x.high[r][VECTOR], to.high[r]);
    to.low[r] = add_quad_products<PLACE>(weights, x.low[r][VECTOR], to.low[r]);
  }
}

// Half of a group: two vectors' quads have constant places in the instructions.
template <int HALF, int ROWS, class Reader>
TOQUE_INLINE void add_half(const Reader& group, const Halves<ROWS>& x, int side,
                           HalfSums<ROWS>& to) {
  static_assert(QUADS == 8);
  add_quad<4 * HALF>(group, x, side, to);
  add_quad<4 * HALF + 1>(group, x, side, to);
  add_quad<4 * HALF + 2>(group, x, side, to);
  add_quad<4 * HALF + 3>(group, x, side, to);
}

// n[ROWS, SIDES] += the group's sums of q * w.
template <int ROWS, class Reader>
TOQUE_INLINE void add_quads(const Reader& group, const int16_t* q, ints (&n)[ROWS][SIDES]) {
  const Halves<ROWS> x(q);
#pragma GCC unroll 4
  for (int side = 0; side < SIDES; ++side) {
    HalfSums<ROWS> first, second;
    add_half<0>(group, x, side, first);
    if constexpr (Reader::SCALED_HALVES) {
      add_half<1>(group, x, side, second);
      const ints scale = group.small_scale(0, side), other = group.small_scale(1, side);
      for (int r = 0; r < ROWS; ++r) {
        n[r][side] += first.whole(r) * scale + second.whole(r) * other;
      }
    } else {
      add_half<1>(group, x, side, first);
      for (int r = 0; r < ROWS; ++r) n[r][side] += first.whole(r);
    }
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
