// Matrix products with packed weights: x [rows, in] @ weight [out, in].T.
//
// The unit of work is one panel of sixteen outputs for all rows: the inner dimension is never split
// between threads, and each panel is read from memory once however many rows there are.

#include "tile.h"

namespace toque {
namespace TOQUE_ISA {

// Inputs per pass over a panel: a part of 16 KB stays in the L1 cache while the rows go past. Sums
// over DEPTH inputs are added up one after the other, in every case, which also rounds less than
// one chain over all inputs.
constexpr long DEPTH = 256;
// Rows whose sums are kept at once, and that are passed while the panel is in the L2 cache.
constexpr long ROW_BLOCK = 64;

struct Sums {
  alignas(32) float at[ROW_BLOCK][PANEL];
};

static void multiply(const float* x, long rows, const Panels& w, long panel, Sums& sums) {
  memset(&sums, 0, rows * sizeof sums.at[0]);
  const float* weights = w.data + panel * w.in * PANEL;
  for (long k = 0; k < w.in; k += DEPTH) {
    const long depth = w.in - k < DEPTH ? w.in - k : DEPTH;
    add_product({x + k, w.in, weights + k * PANEL, PANEL, depth, sums.at[0], PANEL}, rows);
  }
}

static void store_row(float* to, const float* sums, long count) {
  if (count == PANEL) {
    memcpy(to, sums, PANEL * sizeof(float));  // a constant size becomes two instructions
  } else {
    memcpy(to, sums, count * sizeof(float));
  }
}

// Adds bias and residual to the sums of rows `row`.. and puts the panel in its place.
static void finish(const Product& p, long panel, long row, long rows, Sums& sums) {
  const long first = panel * PANEL;
  const long count = p.weight.out - first < PANEL ? p.weight.out - first : PANEL;
  for (long r = 0; r < rows; ++r) {
    const long place = (row + r) * p.weight.out + first;
    if (p.bias) {
      for (long i = 0; i < count; ++i) sums.at[r][i] += p.bias[first + i];
    }
    if (p.residual) {
      for (long i = 0; i < count; ++i) sums.at[r][i] += p.residual[place + i];
    }
    store_row(p.result + place, sums.at[r], count);
  }
}

static void one_panel(const float* x, long rows, const Product& p, long panel) {
  Sums sums;
  for (long row = 0; row < rows; row += ROW_BLOCK) {
    const long block = rows - row < ROW_BLOCK ? rows - row : ROW_BLOCK;
    multiply(x + row * p.weight.in, block, p.weight, panel, sums);
    finish(p, panel, row, block, sums);
  }
}

// All products of one input run in one parallel loop: their panels are numbered on.
void linear(Pool& pool, const float* x, long rows, const Product* products, int count) {
  long panels = 0;
  for (int i = 0; i < count; ++i) panels += panels_for(products[i].weight.out);
  const double cost = (double)rows * panels * PANEL * products[0].weight.in;
  parallel_ranges(pool, panels, cost, [=](long begin, long end, int) {
    const Product* p = products;
    long before = 0;  // panels of the products before p
    for (long panel = begin; panel < end; ++panel) {
      while (panel - before >= panels_for(p->weight.out)) before += panels_for(p++->weight.out);
      one_panel(x, rows, *p, panel - before);
    }
  });
}

static void silu_times(float* gate, const float* up) {
  for (long i = 0; i < PANEL; i += LANES) {
    const f32x8 g = load(gate + i);
    store(gate + i, g / (splat(1) + exp(-g)) * load(up + i));
  }
}

void gate_up_silu(Pool& pool, const float* x, long rows, Panels gate, Panels up, float* result) {
  const double cost = 2.0 * rows * gate.out * gate.in;
  parallel_ranges(pool, panels_for(gate.out), cost, [=](long begin, long end, int) {
    Sums gates, ups;
    const Product to_result{gate, nullptr, nullptr, result};
    for (long panel = begin; panel < end; ++panel) {
      for (long row = 0; row < rows; row += ROW_BLOCK) {
        const long block = rows - row < ROW_BLOCK ? rows - row : ROW_BLOCK;
        multiply(x + row * gate.in, block, gate, panel, gates);
        multiply(x + row * gate.in, block, up, panel, ups);
        for (long r = 0; r < block; ++r) silu_times(gates.at[r], ups.at[r]);
        finish(to_result, panel, row, block, gates);
      }
    }
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
