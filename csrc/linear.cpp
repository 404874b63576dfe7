// Matrix products with packed weights: x [rows, in] @ weight [out, in].T.
//
// The unit of work is one panel of sixteen outputs for all rows: the inner dimension is never split
// between threads, and each panel is read from memory once for each ROW_BLOCK rows.

#include "integer.h"
#include "tile.h"

namespace toque {
namespace TOQUE_ISA {

// Inputs per pass over a panel of floats: a part of 16 KB stays in the L1 cache while the rows go
// past. Sums over DEPTH inputs are added up one after the other, in every case, which also rounds
// less than one chain over all inputs.
constexpr long DEPTH = 256;
// Rows whose sums are kept at once, and that are passed while the panel is in the L2 cache.
constexpr long ROW_BLOCK = 64;

struct Sums {
  alignas(64) float at[ROW_BLOCK][PANEL];
};

// An input in the forms that its products need.
struct Inputs {
  const float* x;
  long rows;
  long in;
  Activations quantized;  // only where a weight is integers
};

static Inputs prepare(Pool& pool, const Input& input, const Product* products, int count) {
  Inputs all{input.x, input.rows, input.in, {}};
  for (int i = 0; i < count; ++i) {
    if (is_float(products[i].weight.kind)) continue;
    all.quantized = quantize(pool, input);
    break;
  }
  return all;
}

// `count` numbers of a panel of floats to float32.
static const float* widened(Kind kind, const uint8_t* from, long count, float* room) {
  if (kind == Kind::F32) return (const float*)from;
  for (long i = 0; i < count; i += LANES) {
    store(room + i, kind == Kind::F16 ? load((const half*)from + i) : load_bfloats(from + 2 * i));
  }
  return room;
}

static void add_float_product(const Inputs& in, long row, long rows, Kind kind,
                              const uint8_t* panel, Sums& sums) {
  alignas(64) float room[DEPTH * PANEL];
  const long size = block_size(kind).bytes;
  for (long k = 0; k < in.in; k += DEPTH) {
    const long depth = in.in - k < DEPTH ? in.in - k : DEPTH;
    const float* part = widened(kind, panel + k * PANEL * size, depth * PANEL, room);
    add_product({in.x + row * in.in + k, in.in, part, PANEL, depth, sums.at[0], PANEL}, rows);
  }
}

// sums = rows `row`.. @ panel.
static void multiply(const Inputs& in, long row, long rows, const Packed& w, long panel,
                     Sums& sums) {
  memset(&sums, 0, rows * sizeof sums.at[0]);
  const uint8_t* weights = w.data + panel * panel_bytes(w.kind, w.in);
  if (is_float(w.kind)) return add_float_product(in, row, rows, w.kind, weights, sums);
  const Activations x = in.quantized.from(0, row);
  with_kind(w.kind, [&](auto constant) {
    add_integer_product<decltype(constant)::kind>(x, in.in / GROUP, rows, weights,
                                                  sums.at[0]);
  });
}

static void store_row(float* to, const float* sums, long count) {
  if (count == PANEL) {
    memcpy(to, sums, PANEL * sizeof(float));  // a constant size becomes two instructions
  } else {
    memcpy(to, sums, count * sizeof(float));
  }
}

// Outputs of the panel that the weight has.
static long width(const Packed& w, long panel) {
  return w.out - panel * PANEL < PANEL ? w.out - panel * PANEL : PANEL;
}

static void add_bias(const Product& p, long panel, long rows, Sums& sums) {
  if (!p.bias) return;
  const long count = width(p.weight, panel);
  for (long r = 0; r < rows; ++r) {
    for (long i = 0; i < count; ++i) sums.at[r][i] += p.bias[panel * PANEL + i];
  }
}

// Adds the residual to the sums of rows `row`.. and puts the panel in its place.
static void finish(const Product& p, long panel, long row, long rows, Sums& sums) {
  const long first = panel * PANEL, count = width(p.weight, panel);
  for (long r = 0; r < rows; ++r) {
    const long place = (row + r) * p.weight.out + first;
    if (p.residual) {
      for (long i = 0; i < count; ++i) sums.at[r][i] += p.residual[place + i];
    }
    store_row(p.result + place, sums.at[r], count);
  }
}

static void one_panel(const Inputs& in, const Product& p, long panel) {
  Sums sums;
  for (long row = 0; row < in.rows; row += ROW_BLOCK) {
    const long rows = in.rows - row < ROW_BLOCK ? in.rows - row : ROW_BLOCK;
    multiply(in, row, rows, p.weight, panel, sums);
    add_bias(p, panel, rows, sums);
    finish(p, panel, row, rows, sums);
  }
}

// All products of one input run in one parallel loop: their panels are numbered on.
void linear(Pool& pool, const Input& input, const Product* products, int count) {
  const Inputs in = prepare(pool, input, products, count);
  long panels = 0;
  for (int i = 0; i < count; ++i) panels += panels_for(products[i].weight.out);
  const double cost = (double)input.rows * panels * PANEL * input.in;
  parallel_ranges(pool, panels, cost, [=](long begin, long end, int) {
    const Product* p = products;
    long before = 0;  // panels of the products before p
    for (long panel = begin; panel < end; ++panel) {
      while (panel - before >= panels_for(p->weight.out)) before += panels_for(p++->weight.out);
      one_panel(in, *p, panel - before);
    }
  });
}

static void silu_times(float* gate, const float* up) {
  for (long i = 0; i < PANEL; i += LANES) {
    const floats g = load(gate + i);
    store(gate + i, g / (splat(1) + exp(-g)) * load(up + i));
  }
}

void gate_up_silu(Pool& pool, const Input& input, const Product& gate, const Product& up) {
  const Product both[] = {gate, up};
  const Inputs in = prepare(pool, input, both, 2);
  const double cost = 2.0 * input.rows * gate.weight.out * input.in;
  parallel_ranges(pool, panels_for(gate.weight.out), cost, [=](long begin, long end, int) {
    Sums gates, ups;
    for (long panel = begin; panel < end; ++panel) {
      for (long row = 0; row < in.rows; row += ROW_BLOCK) {
        const long rows = in.rows - row < ROW_BLOCK ? in.rows - row : ROW_BLOCK;
        multiply(in, row, rows, gate.weight, panel, gates);
        multiply(in, row, rows, up.weight, panel, ups);
        add_bias(gate, panel, rows, gates);
        add_bias(up, panel, rows, ups);
        for (long r = 0; r < rows; ++r) silu_times(gates.at[r], ups.at[r]);
        finish(gate, panel, row, rows, gates);
      }
    }
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
