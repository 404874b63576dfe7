// Rows of a packed table as float32: exactly what the file holds. Every number of a row lies between
// those of fifteen other rows.

#include "groups.h"
#include "kernels.h"

namespace toque {
namespace TOQUE_ISA {

static float number(Kind kind, const uint8_t* at) {
  if (kind == Kind::F16) return half_at(at);
  uint32_t bits = 0;
  if (kind == Kind::F32) {
    memcpy(&bits, at, 4);
    return bits_to_float(bits);
  }
  memcpy(&bits, at, 2);
  return bits_to_float(bits << 16);
}

static void embed_row(const Packed& table, long row, float* to) {
  const uint8_t* panel = table.data + row / PANEL * panel_bytes(table.kind, table.in);
  const long column = row % PANEL;
  if (is_float(table.kind)) {
    const long size = block_size(table.kind).bytes;
    for (long k = 0; k < table.in; ++k) {
      to[k] = number(table.kind, panel + (k * PANEL + column) * size);
    }
    return;
  }
  with_kind(table.kind, [=](auto constant) {
    for (long g = 0; g < table.in / GROUP; ++g) {
      Group<decltype(constant)::kind>(panel, g).values(column, to + g * GROUP);
    }
  });
}

void embed(Pool& pool, const Packed& table, const int32_t* ids, long tokens, float* result) {
  const double cost = 16.0 * tokens * table.in;  // each number is on a cache line of its own
  parallel_ranges(pool, tokens, cost, [=](long begin, long end, int) {
    for (long t = begin; t < end; ++t) embed_row(table, ids[t], result + t * table.in);
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
