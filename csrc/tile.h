// The inner loop of every product: a few rows times a panel of sixteen columns.
//
//                 panel  [depth, 16]              The sums stay in registers, and each gets one
//               k | . . . . . . . . |             multiply-add per step k, in the order
//    rows         | . . . . . . . . |             k = 0, 1, 2, ... A sum therefore never depends on
//    [rows, k]    | . . . . . . . . |             which other rows share the tile: a tile of one
//    | . . . . |  | s s s s s s s s |             row and a tile of six give the same bits.
//    | . . . . |  | s s s s s s s s |
#pragma once

#include "kernels.h"
#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

// As many rows as keep all sums, the panel's vectors and one input in registers.
#if defined(TOQUE_HAS_AVX512)
constexpr int TILE_ROWS = 12;  // 12 + 1 of 32 registers, or twice that for two panels
#elif defined(TOQUE_HAS_AVX2)
constexpr int TILE_ROWS = 6;  // 12 + 2 + 1 of 16 registers
#elif defined(TOQUE_HAS_NEON)
constexpr int TILE_ROWS = 6;  // 24 + 4 + 1 of 32 registers
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
  floats acc[ROWS][SIDES];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < SIDES; ++v) acc[r][v] = splat(0);
  }
  const float* x = t.x;
  const float* panel = t.panel;
  for (long k = 0; k < t.depth; ++k, ++x, panel += t.panel_stride) {
    floats column[SIDES];
    for (int v = 0; v < SIDES; ++v) {
      column[v] = load(panel + v * LANES);
      pin(column[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
      const floats input = splat(x[r * t.x_stride]);
      for (int v = 0; v < SIDES; ++v) acc[r][v] = fma(input, column[v], acc[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < SIDES; ++v) {
      float* sums = t.sums + r * t.sums_stride + v * LANES;
      store(sums, FRESH ? acc[r][v] : load(sums) + acc[r][v]);
    }
  }
}

template <int ROWS, bool FRESH>
inline void add_tile_of(const TileArgs& t, long rows) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) return add_tile<ROWS, FRESH>(t);
    add_tile_of<ROWS - 1, FRESH>(t, rows);
  }
}

// A tile of few rows waits for each multiply-add before the next of the same sum, so that two panels
// side by side are as fast as one. As many rows as keep the sums of both in registers.
#if defined(TOQUE_HAS_AVX512)
constexpr int WIDE_ROWS = 12;  // 24 + 1 + 1 of 32 registers
#elif defined(TOQUE_HAS_AVX2)
constexpr int WIDE_ROWS = 3;  // 12 + 3 + 1 of 16 registers
#elif defined(TOQUE_HAS_NEON)
constexpr int WIDE_ROWS = 3;  // 24 + 3 + 1 of 32 registers
#else
constexpr int WIDE_ROWS = 0;
#endif

// The panel at `panel` and the one `gap` floats after it, into neighbouring columns.
template <int ROWS, bool FRESH>
inline void add_wide_tile(const TileArgs& t, long gap) {
  constexpr int VECTORS = 2 * SIDES;
  floats acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) acc[r][v] = splat(0);
  }
  const float* x = t.x;
  const float* panel = t.panel;
  for (long k = 0; k < t.depth; ++k, ++x, panel += t.panel_stride) {
    // The fewer of both, columns or inputs, wait in registers for the others.
    if constexpr (ROWS < VECTORS) {
      floats input[ROWS];
      for (int r = 0; r < ROWS; ++r) {
        input[r] = splat(x[r * t.x_stride]);
        pin(input[r]);
      }
      for (int v = 0; v < VECTORS; ++v) {
        floats column = load(panel + v % SIDES * LANES + v / SIDES * gap);
        pin(column);
        for (int r = 0; r < ROWS; ++r) acc[r][v] = fma(input[r], column, acc[r][v]);
      }
    } else {
      floats column[VECTORS];
      for (int v = 0; v < VECTORS; ++v) {
        column[v] = load(panel + v % SIDES * LANES + v / SIDES * gap);
        pin(column[v]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        floats input = splat(x[r * t.x_stride]);
        pin(input);
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(input, column[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      float* sums = t.sums + r * t.sums_stride + v * LANES;
      store(sums, FRESH ? acc[r][v] : load(sums) + acc[r][v]);
    }
  }
}

template <int ROWS, bool FRESH>
inline void add_pair_of(TileArgs t, long gap, long rows) {
  if (rows == ROWS) {
    if constexpr (ROWS > 0 && ROWS <= WIDE_ROWS) return add_wide_tile<ROWS, FRESH>(t, gap);
    if constexpr (ROWS > WIDE_ROWS) {
      add_tile<ROWS, FRESH>(t);
      t.panel += gap;
      t.sums += PANEL;
      return add_tile<ROWS, FRESH>(t);
    }
  }
  if constexpr (ROWS > 0) add_pair_of<ROWS - 1, FRESH>(t, gap, rows);
}

// Rows of the next tile. The last two tiles share their rows evenly: a tile of one row waits for
// each multiply-add before the next, three rows or more keep the units busy.
inline long next_tile(long rows) {
  if (rows >= 2 * TILE_ROWS) return TILE_ROWS;
  return rows > TILE_ROWS ? (rows + 1) / 2 : rows;
}

// As add_product() for two panels that lie `gap` floats apart; the same bits.
template <bool FRESH = false>
inline void add_product_of_pair(TileArgs t, long gap, long rows) {
  while (rows > 0) {
    const long tile = next_tile(rows);
    add_pair_of<TILE_ROWS, FRESH>(t, gap, tile);
    t.x += tile * t.x_stride;
    t.sums += tile * t.sums_stride;
    rows -= tile;
  }
}

// sums += x @ panel, for any number of rows.
template <bool FRESH = false>
inline void add_product(TileArgs t, long rows) {
  while (rows > 0) {
    const long tile = next_tile(rows);
    add_tile_of<TILE_ROWS, FRESH>(t, tile);
    t.x += tile * t.x_stride;
    t.sums += tile * t.sums_stride;
    rows -= tile;
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
