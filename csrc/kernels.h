// The kernels as the binding sees them: one table of functions per instruction set.
//
// Nothing here checks its arguments; bind.cpp has done so. Arrays are row-major and contiguous.
// Contract of every function: each output row is computed by the same operations in the same order
// whatever the number of rows, of threads and of chunks.
#pragma once

#include <stdint.h>

#include "layout.h"
#include "pages.h"
#include "parallel.h"

namespace toque {

// Rows of weights as they lie in a file.
struct StoredRows {
  Kind kind;
  const uint8_t* data;  // [rows, columns / values * bytes]
  long rows;
  long columns;  // a multiple of the kind's block

  const uint8_t* row(long index) const {
    const BlockSize size = block_size(kind);
    return data + index * (columns / size.values) * size.bytes;
  }
};

// What products multiply, and room for it as integers (see activations.h), which is used and needed
// only for weights that are integers.
struct Input {
  const float* x;  // [rows, in]
  long rows;
  long in;
  void* scratch;  // input_scratch(rows, in) bytes, on a multiple of 64
};

constexpr long input_scratch(long rows, long in) {
  return rows * (in * (long)sizeof(int16_t) + in / GROUP * 3 * (long)sizeof(float));
}

// result = residual + x @ weight.T + bias; bias and residual may be null.
struct Product {
  Packed weight;
  const float* bias;      // [out]
  const float* residual;  // [rows, out]
  float* result;          // [rows, out]
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

// What the pages leave out of each key: a bias, rotated by the key's position.
struct RotatedBias {
  const float* bias;  // [kv_heads, dim], or null where the keys are whole
  const float* cos;   // [positions, dim / 2]
  const float* sin;
  long positions;
};

struct Attention {
  const float* q;  // [tokens, heads, dim]
  float* result;   // [tokens, heads, dim]
  const TokenBlock* blocks;
  long num_blocks;
  long heads;
  float scale;
  Pages pages;
  RotatedBias bias;
};

// Logits that sampling looks at together: of each block it knows the largest.
constexpr long SAMPLE_BLOCK = 256;

struct Kernels {
  const char* name;
  void (*dequantize)(Pool&, const StoredRows&, float* result);
  void (*pack)(Pool&, const StoredRows&, uint8_t* packed);  // packed_bytes()
  void (*embed)(Pool&, const Packed&, const int32_t* ids, long tokens, float* result);
  void (*rms_norm)(Pool&, const float* x, const float* weight, float eps, long rows, long columns,
                   float* result);
  void (*linear)(Pool&, const Input&, const Product* products, int count);
  void (*gate_up_silu)(Pool&, const Input&, const Product& gate, const Product& up);  // to gate's
  void (*rope_write)(Pool&, const RopeWrite&);
  void (*attention)(Pool&, const Attention&, float* scratch);
  long (*attention_scratch)(const Attention&, int threads);  // floats
  // The largest of each block of x; false if any is NaN, and then they are not to be used.
  bool (*block_maxima)(const float* x, long count, float* maxima);
  // The sum of e^((x - top) * inverse_temperature), which are written to `weights` unless null.
  double (*weigh)(const float* x, long count, float top, double inverse_temperature,
                  double* weights);
  double (*multiply_adds)(Pool&, long rounds);  // for bench.ops: does nothing else, returns how many
};

// Query rows (tokens x heads of one KV head) that attention takes through the keys together.
constexpr long QUERY_ROWS = 64;
constexpr long tokens_per_block(long group) { return group > QUERY_ROWS ? 1 : QUERY_ROWS / group; }

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace neon {
extern const Kernels kernels;
}
namespace neon_dot {
extern const Kernels kernels;
}

}  // namespace toque
