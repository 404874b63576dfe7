// From a file's rows to the panels that layout.h draws. Nothing is requantized: integers and scales
// only change places.

#include "blocks.h"
#include "kernels.h"

namespace toque {
namespace TOQUE_ISA {

// PANEL rows of integers, one group of each.
struct GroupRows {
  alignas(32) int8_t q[PANEL][GROUP];
};

static void put_bytes(const GroupRows& rows, uint8_t* payload) {
  for (long r = 0; r < PANEL; ++r) {
    for (long p = 0; p < PAIRS; ++p) memcpy(payload + p * 2 * PANEL + 2 * r, rows.q[r] + 2 * p, 2);
  }
}

// The lowest four bits of each, four pairs in a word: see layout.h.
static void put_nibbles(const GroupRows& rows, uint8_t* payload) {
  for (long r = 0; r < PANEL; ++r) {
    for (long k = 0; k < GROUP; k += 8) {
      const int8_t* q = rows.q[r] + k;
      uint16_t words[2];
      for (int odd = 0; odd < 2; ++odd) {
        words[odd] = (uint16_t)((q[odd] & 15) | (q[odd + 2] & 15) << 4 | (q[odd + 4] & 15) << 8 |
                                (q[odd + 6] & 15) << 12);
      }
      memcpy(payload + k / 8 * 64 + 4 * r, words, sizeof words);
    }
  }
}

// What stands above the nibbles, BITS of each, after one another in the words of planes.
template <int BITS>
static void put_planes(const GroupRows& rows, uint8_t* planes) {
  constexpr long PER_PLANE = 2 * 16 / BITS;  // inputs
  for (long r = 0; r < PANEL; ++r) {
    for (long k = 0; k < GROUP; k += PER_PLANE) {
      uint16_t words[2] = {};
      for (long i = 0; i < PER_PLANE; ++i) {
        words[i % 2] |= (uint16_t)(rows.q[r][k + i] >> 4 << BITS * (i / 2));
      }
      memcpy(planes + k / PER_PLANE * PLANE_BYTES + 4 * r, words, sizeof words);
    }
  }
}

template <Kind KIND>
static void put_payload(const GroupRows& rows, uint8_t* payload) {
  if constexpr (!has_nibbles(KIND)) return put_bytes(rows, payload);
  put_nibbles(rows, payload);
  if constexpr (high_bits(KIND) > 0) put_planes<high_bits(KIND)>(rows, payload + NIBBLES_BYTES);
}

template <Kind KIND>
static void put_halves(const uint8_t* const (&blocks)[PANEL], uint8_t* record) {
  for (long r = 0; r < PANEL; ++r) {
    memcpy(record + 2 * r, blocks[r] + place_of_d(KIND), 2);
    if (has_offset(KIND)) memcpy(record + 2 * PANEL + 2 * r, blocks[r] + PLACE_OF_M, 2);
  }
}

// One block of each of PANEL rows.
template <Kind KIND>
static void put_record(const uint8_t* const (&blocks)[PANEL], uint8_t* record) {
  constexpr long VALUES = block_size(KIND).values;
  put_halves<KIND>(blocks, record);
  alignas(32) int8_t q[PANEL][VALUES];
  for (long r = 0; r < PANEL; ++r) integers<KIND>(blocks[r], q[r]);
  for (long j = 0; j < VALUES / GROUP; ++j) {
    uint8_t* group = record + halves_bytes(KIND) + j * group_bytes(KIND);
    GroupRows rows;
    for (long r = 0; r < PANEL; ++r) memcpy(rows.q[r], q[r] + j * GROUP, GROUP);
    if constexpr (scales_bytes(KIND) > 0) {
      for (long r = 0; r < PANEL; ++r) {
        const SmallScales s = small_scales<KIND>(blocks[r], j);
        group[r] = s.first;
        group[PANEL + r] = s.second;
      }
    }
    put_payload<KIND>(rows, group + scales_bytes(KIND));
  }
}

// Rows beyond the last one repeat a block of zeros: zero scales, whatever the integers.
constexpr long LARGEST_BLOCK = 256;

template <Kind KIND>
static void put_panel(const StoredRows& from, long first, uint8_t* panel) {
  constexpr BlockSize SIZE = block_size(KIND);
  static const uint8_t zeros[LARGEST_BLOCK] = {};
  for (long i = 0; i < from.columns / SIZE.values; ++i) {
    const uint8_t* blocks[PANEL];
    for (long r = 0; r < PANEL; ++r) {
      blocks[r] = first + r < from.rows ? from.row(first + r) + i * SIZE.bytes : zeros;
    }
    put_record<KIND>(blocks, panel + i * record_bytes(KIND));
  }
}

// Numbers of SIZE bytes: [PANEL, columns] -> [columns, PANEL].
template <long SIZE>
static void put_floats(const StoredRows& from, long first, uint8_t* panel) {
  if (first + PANEL > from.rows) memset(panel, 0, from.columns * PANEL * SIZE);
  constexpr long STRETCH = 64;  // of a row, so that the panel's part stays in the cache
  for (long begin = 0; begin < from.columns; begin += STRETCH) {
    const long end = begin + STRETCH < from.columns ? begin + STRETCH : from.columns;
    for (long r = 0; r < PANEL && first + r < from.rows; ++r) {
      const uint8_t* row = from.row(first + r);
      for (long k = begin; k < end; ++k) {
        memcpy(panel + (k * PANEL + r) * SIZE, row + k * SIZE, SIZE);
      }
    }
  }
}

void pack(Pool& pool, const StoredRows& from, uint8_t* packed) {
  const double cost = (double)from.rows * from.columns;
  parallel_ranges(pool, panels_for(from.rows), cost, [=](long begin, long end, int) {
    for (long p = begin; p < end; ++p) {
      uint8_t* panel = packed + p * panel_bytes(from.kind, from.columns);
      const long first = p * PANEL;
      if (from.kind == Kind::F32) {
        put_floats<4>(from, first, panel);
      } else if (is_float(from.kind)) {
        put_floats<2>(from, first, panel);
      } else {
        with_kind(from.kind, [&](auto constant) {
          put_panel<decltype(constant)::kind>(from, first, panel);
        });
      }
    }
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
