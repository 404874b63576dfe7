// Weights of a file to float32: for vectors, and for reading what a matrix holds. Computes the bits
// of src/toque/kernels/ref/dequantize.py: every product here is exact, whatever the order of its
// factors, and what remains is one rounding.

#include "blocks.h"
#include "kernels.h"

namespace toque {
namespace TOQUE_ISA {

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

static void float_row(Kind kind, const uint8_t* from, long count, float* to) {
  if (kind == Kind::F32) memcpy(to, from, count * sizeof(float));
  if (kind == Kind::F16) f16_row(from, count, to);
  if (kind == Kind::BF16) bf16_row(from, count, to);
}

// value = step * q + offset, for some values in a row.
struct Line {
  float step;
  float offset;
};

template <Kind KIND>
static void put_values(const int8_t* q, long count, Line line, float* to) {
  for (long i = 0; i < count; ++i) {
    const float value = line.step * (float)(q[i] - zero_point(KIND));
    to[i] = has_offset(KIND) ? value + line.offset : value;
  }
}

template <Kind KIND>
static void block_values(const uint8_t* block, float* to) {
  constexpr long VALUES = block_size(KIND).values;
  int8_t q[VALUES];
  integers<KIND>(block, q);
  const float d = half_at(block + place_of_d(KIND));
  const float m = has_offset(KIND) ? half_at(block + PLACE_OF_M) : 0;
  if constexpr (VALUES == GROUP) {
    put_values<KIND>(q, GROUP, {d, m}, to);
  } else {
    for (long j = 0; j < VALUES / GROUP; ++j, to += GROUP) {
      const SmallScales s = small_scales<KIND>(block, j);
      if constexpr (KIND == Kind::Q6_K) {
        put_values<KIND>(q + j * GROUP, 16, {d * (float)(int8_t)s.first, 0}, to);
        put_values<KIND>(q + j * GROUP + 16, 16, {d * (float)(int8_t)s.second, 0}, to + 16);
      } else {
        put_values<KIND>(q + j * GROUP, GROUP, {d * (float)s.first, -(m * (float)s.second)}, to);
      }
    }
  }
}

static void dequantize_row(Kind kind, const uint8_t* row, long columns, float* to) {
  if (is_float(kind)) return float_row(kind, row, columns, to);
  with_kind(kind, [=](auto constant) {
    constexpr Kind KIND = decltype(constant)::kind;
    constexpr BlockSize SIZE = block_size(KIND);
    for (long i = 0; i < columns / SIZE.values; ++i) {
      block_values<KIND>(row + i * SIZE.bytes, to + i * SIZE.values);
    }
  });
}

void dequantize(Pool& pool, const StoredRows& from, float* to) {
  const double cost = (double)from.rows * from.columns;
  parallel_ranges(pool, from.rows, cost, [&](long begin, long end, int) {
    for (long row = begin; row < end; ++row) {
      dequantize_row(from.kind, from.row(row), from.columns, to + row * from.columns);
    }
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
