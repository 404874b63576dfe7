// Packed weights to float32. The layouts are drawn in src/toque/kernels/ref/dequantize.py, which
// computes the same bits: every product here is exact, whatever the order of its factors.

#include "dequantize.h"

#include "simd.h"

namespace toque {
namespace TOQUE_ISA {

// Blocks lie at odd addresses, so that numbers of several bytes are copied out.
static float half_at(const uint8_t* from) {
  half x;
  memcpy(&x, from, sizeof x);
  return half_to_float(x);
}

static void f32_row(const uint8_t* from, long count, float* to) {
  memcpy(to, from, count * sizeof(float));
}

static void f16_row(const uint8_t* from, long count, float* to) {
  long i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load((const half*)(from + 2 * i)));
  for (; i < count; ++i) to[i] = half_at(from + 2 * i);
}

static void bf16_row(const uint8_t* from, long count, float* to) {
  for (long i = 0; i < count; ++i) {
    uint16_t upper;
    memcpy(&upper, from + 2 * i, sizeof upper);
    to[i] = bits_to_float((uint32_t)upper << 16);
  }
}

// d | q                    d * (q - 8)
static void q4_0(const uint8_t* block, float* to) {
  const float d = half_at(block);
  const uint8_t* q = block + 2;
  for (int i = 0; i < 16; ++i) {
    to[i] = d * (float)((q[i] & 15) - 8);
    to[i + 16] = d * (float)((q[i] >> 4) - 8);
  }
}

// d | m | q                d * q + m
static void q4_1(const uint8_t* block, float* to) {
  const float d = half_at(block), m = half_at(block + 2);
  const uint8_t* q = block + 4;
  for (int i = 0; i < 16; ++i) {
    to[i] = d * (float)(q[i] & 15) + m;
    to[i + 16] = d * (float)(q[i] >> 4) + m;
  }
}

// Value i of 32, 0..31, from nibbles and the word of fifth bits.
static int q5_low(const uint8_t* q, uint32_t fifth, int i) {
  return (q[i] & 15) | (int)(fifth >> i & 1) << 4;
}

static int q5_high(const uint8_t* q, uint32_t fifth, int i) {
  return q[i] >> 4 | (int)(fifth >> (i + 16) & 1) << 4;
}

// d | fifth bits | q       d * (q - 16)
static void q5_0(const uint8_t* block, float* to) {
  const float d = half_at(block);
  uint32_t fifth;
  memcpy(&fifth, block + 2, sizeof fifth);
  const uint8_t* q = block + 6;
  for (int i = 0; i < 16; ++i) {
    to[i] = d * (float)(q5_low(q, fifth, i) - 16);
    to[i + 16] = d * (float)(q5_high(q, fifth, i) - 16);
  }
}

// d | m | fifth bits | q   d * q + m
static void q5_1(const uint8_t* block, float* to) {
  const float d = half_at(block), m = half_at(block + 2);
  uint32_t fifth;
  memcpy(&fifth, block + 4, sizeof fifth);
  const uint8_t* q = block + 8;
  for (int i = 0; i < 16; ++i) {
    to[i] = d * (float)q5_low(q, fifth, i) + m;
    to[i + 16] = d * (float)q5_high(q, fifth, i) + m;
  }
}

// d | q                    d * q
static void q8_0(const uint8_t* block, float* to) {
  const float d = half_at(block);
  const int8_t* q = (const int8_t*)(block + 2);
  for (int i = 0; i < 32; ++i) to[i] = d * (float)q[i];
}

// Scale and minimum (6 bits each) of sub-block j of a Q4_K or Q5_K block.
struct ScaleMin {
  float scale;
  float minimum;
};

static ScaleMin scale_min(const uint8_t* s, int j) {
  if (j < 4) return {(float)(s[j] & 63), (float)(s[j + 4] & 63)};
  const int scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
  const int minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
  return {(float)scale, (float)minimum};
}

// d | dmin | 12 x scales | q
static void q4_k(const uint8_t* block, float* to) {
  const float d = half_at(block), dmin = half_at(block + 2);
  for (int j = 0; j < 8; ++j) {
    const ScaleMin s = scale_min(block + 4, j);
    const float step = d * s.scale, offset = dmin * s.minimum;
    const uint8_t* q = block + 16 + 32 * (j / 2);
    const int shift = 4 * (j % 2);
    for (int i = 0; i < 32; ++i) to[32 * j + i] = step * (float)(q[i] >> shift & 15) - offset;
  }
}

// d | dmin | 12 x scales | 32 x bits | q
static void q5_k(const uint8_t* block, float* to) {
  const float d = half_at(block), dmin = half_at(block + 2);
  const uint8_t* high = block + 16;
  for (int j = 0; j < 8; ++j) {
    const ScaleMin s = scale_min(block + 4, j);
    const float step = d * s.scale, offset = dmin * s.minimum;
    const uint8_t* q = block + 48 + 32 * (j / 2);
    const int shift = 4 * (j % 2);
    for (int i = 0; i < 32; ++i) {
      const int value = (q[i] >> shift & 15) | (high[i] >> j & 1) << 4;
      to[32 * j + i] = step * (float)value - offset;
    }
  }
}

// 128 x q | 64 x bit pairs | 16 x scales | d
static void q6_k(const uint8_t* block, float* to) {
  const int8_t* scales = (const int8_t*)(block + 192);
  const float d = half_at(block + 208);
  for (int run = 0; run < 8; ++run) {  // of 32 values; four runs are a half of the block
    const int in_half = run % 4;
    const uint8_t* q = block + 64 * (run / 4) + 32 * (in_half % 2);
    const uint8_t* high = block + 128 + 32 * (run / 4);
    const int shift = 4 * (in_half / 2);
    for (int i = 0; i < 32; ++i) {
      const int value = (q[i] >> shift & 15) | (high[i] >> (2 * in_half) & 3) << 4;
      const float step = d * (float)scales[2 * run + i / 16];
      to[32 * run + i] = step * (float)(value - 32);
    }
  }
}

template <class Unpack>
static void blocks(Kind kind, const uint8_t* row, long columns, float* to, Unpack unpack) {
  const BlockSize size = block_size(kind);
  for (long i = 0; i < columns; i += size.values, row += size.bytes) unpack(row, to + i);
}

void dequantize_row(Kind kind, const uint8_t* row, long columns, float* to) {
  switch (kind) {
    case Kind::F32: return f32_row(row, columns, to);
    case Kind::F16: return f16_row(row, columns, to);
    case Kind::BF16: return bf16_row(row, columns, to);
    case Kind::Q4_0: return blocks(kind, row, columns, to, q4_0);
    case Kind::Q4_1: return blocks(kind, row, columns, to, q4_1);
    case Kind::Q5_0: return blocks(kind, row, columns, to, q5_0);
    case Kind::Q5_1: return blocks(kind, row, columns, to, q5_1);
    case Kind::Q8_0: return blocks(kind, row, columns, to, q8_0);
    case Kind::Q4_K: return blocks(kind, row, columns, to, q4_k);
    case Kind::Q5_K: return blocks(kind, row, columns, to, q5_k);
    case Kind::Q6_K: return blocks(kind, row, columns, to, q6_k);
  }
}

static const uint8_t* row_at(const PackedRows& from, long row) {
  const BlockSize size = block_size(from.kind);
  return from.data + row * (from.columns / size.values) * size.bytes;
}

void dequantize(Pool& pool, const PackedRows& from, float* to) {
  const double cost = (double)from.rows * from.columns;
  parallel_ranges(pool, from.rows, cost, [&](long begin, long end, int) {
    for (long row = begin; row < end; ++row) {
      dequantize_row(from.kind, row_at(from, row), from.columns, to + row * from.columns);
    }
  });
}

// PANEL rows of `columns` floats become one panel [columns, PANEL].
static void interleave(const float* rows, long columns, float* panel) {
  long k = 0;
  for (; k + LANES <= columns; k += LANES) {
    for (long r = 0; r < PANEL; r += LANES) {
      f32x8 m[8];
      for (int i = 0; i < 8; ++i) m[i] = load(rows + (r + i) * columns + k);
      transpose(m);
      for (int i = 0; i < 8; ++i) store(panel + (k + i) * PANEL + r, m[i]);
    }
  }
  for (; k < columns; ++k) {
    for (long r = 0; r < PANEL; ++r) panel[k * PANEL + r] = rows[r * columns + k];
  }
}

void pack(Pool& pool, const PackedRows& from, float* panels, float* scratch) {
  const long columns = from.columns;
  const double cost = (double)from.rows * columns;
  parallel_ranges(pool, panels_for(from.rows), cost, [=](long begin, long end, int worker) {
    float* rows = scratch + worker * pack_scratch(columns);  // [PANEL, columns]
    for (long panel = begin; panel < end; ++panel) {
      for (long r = 0; r < PANEL; ++r) {
        const long row = panel * PANEL + r;
        if (row < from.rows) {
          dequantize_row(from.kind, row_at(from, row), columns, rows + r * columns);
        } else {
          memset(rows + r * columns, 0, columns * sizeof(float));
        }
      }
      interleave(rows, columns, panels + panel * columns * PANEL);
    }
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
