// The inner loop of every product: a few rows times a panel of sixteen columns.
//
//                 panel  [depth, 16]              Each of the rows * 2 sums stays in a register and
//               k | . . . . . . . . |             gets one multiply-add per step k, in the order
//    rows         | . . . . . . . . |             k = 0, 1, 2, ... A sum therefore never depends on
//    [rows, k]    | . . . . . . . . |             which other rows share the tile: a tile of one
//    | . . . . |  | s s s s s s s s |             row and a tile of six give the same bits.
//    | . . . . |  | s s s s s s s s |
#pragma once

#include "kernels.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

// As many rows as keep all sums, the panel's two vectors and one input in registers.
#if defined(TOQUE_HAS_AVX2)
constexpr int TILE_ROWS = 6;  // 12 + 2 + 1 of 16 registers
#elif defined(__aarch64__)
constexpr int TILE_ROWS = 4;  // a vector takes two registers: 16 + 4 + 1 of 32
#else
constexpr int TILE_ROWS = 2;  // 8 + 4 + 1 of 16
#endif

// What a product reads and adds to. Strides are in floats from one row to the next.
struct TileArgs {
  const float* x;  // [rows, depth]
  long x_stride;
  const float* panel;  // [depth, PANEL]
  long panel_stride;
  long depth;
  float* sums;  // [rows, PANEL], added to or, if FRESH, set
  long sums_stride;
};

template <int ROWS, bool FRESH>
inline void add_tile(const TileArgs& t) {
  f32x8 acc[ROWS][2];
  for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = splat(0);
  const float* x = t.x;
  const float* panel = t.panel;
  for (long k = 0; k < t.depth; ++k, ++x, panel += t.panel_stride) {
    f32x8 left = load(panel), right = load(panel + LANES);
    pin(left);
    pin(right);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const f32x8 input = splat(x[r * t.x_stride]);
      acc[r][0] = fma(input, left, acc[r][0]);
      acc[r][1] = fma(input, right, acc[r][1]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float* sums = t.sums + r * t.sums_stride;
    store(sums, FRESH ? acc[r][0] : load(sums) + acc[r][0]);
    store(sums + LANES, FRESH ? acc[r][1] : load(sums + LANES) + acc[r][1]);
  }
}

template <int ROWS, bool FRESH>
inline void add_tile_of(const TileArgs& t, long rows) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return add_tile<ROWS, FRESH>(t);
    add_tile_of<ROWS - 1, FRESH>(t, rows);
  }
}

// sums += x @ panel, for any number of rows. The last two tiles share their rows evenly: a tile of
// one row waits for each multiply-add before the next, three rows or more keep the units busy.
template <bool FRESH = false>
inline void add_product(TileArgs t, long rows) {
  while (rows > 0) {
    const long last = rows > TILE_ROWS ? (rows + 1) / 2 : rows;
    const long tile = rows >= 2 * TILE_ROWS ? TILE_ROWS : last;
    add_tile_of<TILE_ROWS, FRESH>(t, tile);
    t.x += tile * t.x_stride;
    t.sums += tile * t.sums_stride;
    rows -= tile;
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
