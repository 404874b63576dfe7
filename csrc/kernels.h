// The kernels as the binding sees them: one table of functions per instruction set.
//
// Nothing here checks its arguments; bind.cpp has done so. Arrays are row-major and contiguous.
// Contract of every function: each output row is computed by the same operations in the same order
// whatever the number of rows, of threads and of chunks.
#pragma once

#include <stdint.h>

#include "parallel.h"

namespace toque {

// Columns of a packed weight panel, and of every register tile.
constexpr long PANEL = 16;

constexpr long panels_for(long out) { return (out + PANEL - 1) / PANEL; }

// In the order of the names in bind.cpp.
enum class Kind { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct BlockSize {
  long values;
  long bytes;
};

constexpr BlockSize block_size(Kind kind) {
  constexpr BlockSize sizes[] = {{1, 4},   {1, 2},   {1, 2},     {32, 18},   {32, 20}, {32, 22},
                                 {32, 24}, {32, 34}, {256, 144}, {256, 176}, {256, 210}};
  return sizes[static_cast<int>(kind)];
}

// Rows of packed weights as they lie in a file.
struct PackedRows {
  Kind kind;
  const uint8_t* data;  // [rows, columns / values * bytes]
  long rows;
  long columns;  // a multiple of the kind's block
};

// A weight matrix [out, in] as the products want it: panels of PANEL outputs, input after input, so
// that one input times a whole panel is two vector instructions. Missing outputs are zeros.
struct Panels {
  const float* data;  // [panels_for(out), in, PANEL]
  long out;
  long in;
};

// result = residual + x @ weight.T + bias; bias and residual may be null.
struct Product {
  Panels weight;
  const float* bias;      // [out]
  const float* residual;  // [rows, out]
  float* result;          // [rows, out]
};

struct Pages {
  void* keys;    // [pages, kv_heads, block_size, dim], float or half
  void* values;  // the same
  bool is_half;
  long kv_heads;
  long block_size;
  long dim;
};

struct RopeWrite {
  float* query;        // [tokens, heads, dim], rotated in place
  float* key;          // [tokens, kv_heads, dim], scratch afterwards
  const float* value;  // [tokens, kv_heads, dim]
  const float* query_norm;  // [dim] or null
  const float* key_norm;    // [dim] or null
  float norm_eps;
  const float* cos;  // [positions, dim / 2]
  const float* sin;
  const int32_t* positions;  // [tokens]
  const int64_t* write_at;   // [tokens]
  long tokens;
  long heads;
  Pages pages;
};

// Neighbouring tokens of one chunk: one unit of work of attention for each KV head.
struct TokenBlock {
  const int32_t* page_table;  // the chunk's row
  long first_token;           // row of q and of the result
  long tokens;
  long first_position;
};

struct Attention {
  const float* q;  // [tokens, heads, dim]
  float* result;   // [tokens, heads, dim]
  const TokenBlock* blocks;
  long num_blocks;
  long heads;
  float scale;
  Pages pages;
};

struct Kernels {
  const char* name;
  void (*dequantize)(Pool&, const PackedRows&, float* result);
  void (*pack)(Pool&, const PackedRows&, float* panels, float* scratch);  // see pack_scratch()
  void (*embed)(Pool&, const Panels&, const int32_t* ids, long tokens, float* result);
  void (*rms_norm)(Pool&, const float* x, const float* weight, float eps, long rows, long columns,
                   float* result);
  void (*linear)(Pool&, const float* x, long rows, const Product* products, int count);
  void (*gate_up_silu)(Pool&, const float* x, long rows, Panels gate, Panels up, float* result);
  void (*rope_write)(Pool&, const RopeWrite&);
  void (*attention)(Pool&, const Attention&, float* scratch);
  long (*attention_scratch)(const Attention&);  // floats per thread of the pool
};

// Scratch in floats per thread of the pool; a multiple of 16, so that aligned parts stay aligned.
constexpr long pack_scratch(long columns) { return PANEL * ((columns + 15) / 16 * 16); }

// Query rows (tokens x heads of one KV head) that attention takes through the keys together.
constexpr long QUERY_ROWS = 64;
constexpr long tokens_per_block(long group) { return group > QUERY_ROWS ? 1 : QUERY_ROWS / group; }

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}

}  // namespace toque
