// Causal attention over paged keys and values, with an online softmax (arXiv:2205.14135).
//
// A unit of work is a block of neighbouring tokens of one chunk and one KV head with the query
// heads that share it: "rows" below are its (token, head) pairs, token after token. It passes over
// the sequence's keys from position 0 in blocks of KEYS, whatever the size of a page:
//
//     positions   0 ........ 31 | 32 ....... 63 | 64 ....... 95 |
//     token at 40   all          first 9         -                 keys it may see in each block
//
// For each block and row: scores, the new maximum, weights, their sum, and the weighted values.
// What a row computes depends on its own position alone: blocks begin at fixed positions, a row
// stops at its own position, and the order within a block is fixed. So its bits do not depend on
// how the sequence was cut into chunks, nor on what else is in the batch.

#include "tile.h"

namespace toque {

// Multiple of PANEL. Larger blocks rescale less often; a block's keys and values should fit L1.
constexpr long KEYS = 32;

namespace TOQUE_ISA {

// Where the keys and values of one block lie in the pages, in elements.
struct Places {
  long count;  // keys that any row may see
  long at[KEYS];
};

// Scratch of one unit of work; rows padded so that every vector access stays inside.
struct Block {
  long rows;
  long group;       // query heads per KV head
  long dim;
  long dim_padded;  // to whole panels
  float* q;         // [rows, dim], scaled
  float* out;       // [rows, dim_padded], weighted values, not yet divided by total
  float* weights;   // [rows, KEYS], scores first
  float* keys;      // [KEYS / PANEL, dim, PANEL]: as panels
  float* values;    // [KEYS, dim_padded]
  float* maximum;   // [rows], of the scores so far
  float* total;     // [rows], of the weights so far
  float* zeros;     // [dim], stands for a key beyond the block's last token
  long* visible;    // [rows], keys of the current block that the row may see
};

static long padded(long count) { return (count + PANEL - 1) / PANEL * PANEL; }

static long block_rows(const Attention& a) {
  const long group = a.heads / a.pages.kv_heads;
  return padded(group * tokens_per_block(group));
}

long scratch_floats(const Attention& a) {
  const long rows = block_rows(a), dim = padded(a.pages.dim);
  return rows * (2 * dim + KEYS + 4) + KEYS * 2 * dim + dim;
}

static Block lay_out(const Attention& a, const TokenBlock& tokens, float* scratch) {
  Block b;
  const long most_rows = block_rows(a);
  b.group = a.heads / a.pages.kv_heads;
  b.rows = tokens.tokens * b.group;
  b.dim = a.pages.dim;
  b.dim_padded = padded(b.dim);
  b.q = scratch;
  b.out = b.q + most_rows * b.dim_padded;
  b.weights = b.out + most_rows * b.dim_padded;
  b.keys = b.weights + most_rows * KEYS;
  b.values = b.keys + KEYS * b.dim_padded;
  b.zeros = b.values + KEYS * b.dim_padded;
  b.maximum = b.zeros + b.dim_padded;
  b.total = b.maximum + most_rows;
  b.visible = (long*)(b.total + most_rows);  // two floats' room each
  return b;
}

static void start(const Attention& a, const TokenBlock& tokens, long kv_head, Block& b) {
  for (long t = 0; t < tokens.tokens; ++t) {
    const float* q = a.q + ((tokens.first_token + t) * a.heads + kv_head * b.group) * b.dim;
    float* to = b.q + t * b.group * b.dim;
    for (long i = 0; i < b.group * b.dim; ++i) to[i] = q[i] * a.scale;
  }
  memset(b.out, 0, b.rows * b.dim_padded * sizeof(float));
  memset(b.values, 0, KEYS * b.dim_padded * sizeof(float));  // the padding is never written again
  memset(b.zeros, 0, b.dim_padded * sizeof(float));
  for (long r = 0; r < b.rows; ++r) b.maximum[r] = -INFINITY, b.total[r] = 0;
}

// Where keys and values of the block from position `first` on lie in the pages, in elements. One
// division for all of them: it takes as long as forty multiply-adds.
static void locate(const Pages& pages, const TokenBlock& tokens, long kv_head, long first,
                   Places& to) {
  const long context = tokens.first_position + tokens.tokens;  // keys of the last token
  to.count = context - first < KEYS ? context - first : KEYS;
  if (to.count <= 0) return;  // the table has no place there
  const int32_t* page = tokens.page_table + first / pages.block_size;
  long offset = first % pages.block_size;
  for (long k = 0; k < to.count; ++k) {
    to.at[k] = ((*page * pages.kv_heads + kv_head) * pages.block_size + offset) * pages.dim;
    if (++offset == pages.block_size) offset = 0, ++page;
  }
}

// Pages are scattered, and too short for the processor to notice a stream.
static void prefetch(const Pages& pages, const Places& next) {
  constexpr long CACHE_LINE = 64;
  const long size = pages.is_half ? sizeof(half) : sizeof(float);
  for (long k = 0; k < next.count; ++k) {
    for (long byte = 0; byte < pages.dim * size; byte += CACHE_LINE) {
      __builtin_prefetch((const char*)pages.keys + next.at[k] * size + byte);
      __builtin_prefetch((const char*)pages.values + next.at[k] * size + byte);
    }
  }
}

// Eight keys [8, dim] into eight neighbouring columns of a panel [dim, PANEL].
template <class Number>
static void interleave(const Number* const (&keys)[8], long dim, float* panel) {
  long d = 0;
  for (; d + LANES <= dim; d += LANES) {
    f32x8 m[8];
    for (int i = 0; i < 8; ++i) m[i] = load(keys[i] + d);
    transpose(m);
    for (int i = 0; i < 8; ++i) store(panel + (d + i) * PANEL, m[i]);
  }
  for (; d < dim; ++d) {
    for (int i = 0; i < 8; ++i) panel[d * PANEL + i] = to_float(keys[i][d]);
  }
}

template <class Number>
static void read_keys(const Number* pages, const Places& places, Block& b) {
  for (long k = 0; k < KEYS; k += LANES) {
    const Number* keys[8];
    for (long i = 0; i < 8; ++i) {
      keys[i] = k + i < places.count ? pages + places.at[k + i] : (const Number*)b.zeros;
    }
    interleave(keys, b.dim, b.keys + k / PANEL * PANEL * b.dim + k % PANEL);
  }
}

template <class Number>
static void read_values(const Number* pages, const Places& places, Block& b) {
  for (long k = 0; k < places.count; ++k) {
    const Number* from = pages + places.at[k];
    float* to = b.values + k * b.dim_padded;
    long d = 0;
    for (; d + LANES <= b.dim; d += LANES) store(to + d, load(from + d));
    for (; d < b.dim; ++d) to[d] = to_float(from[d]);
  }
}

// weights[row] = q[row] . key, for all rows and all KEYS columns; columns do not mix.
static void score(Block& b) {
  memset(b.weights, 0, b.rows * KEYS * sizeof(float));
  for (long k = 0; k < KEYS; k += PANEL) {
    add_product({b.q, b.dim, b.keys + k * b.dim, PANEL, b.dim, b.weights + k, KEYS}, b.rows);
  }
}

static void scale(float* row, long count, float factor) {
  for (long i = 0; i < count; i += LANES) store(row + i, load(row + i) * splat(factor));
}

// From scores to weights relative to the new maximum; what the row has so far is scaled to it.
static void soften(Block& b, long row) {
  float* weights = b.weights + row * KEYS;
  for (long k = b.visible[row]; k < KEYS; ++k) weights[k] = -INFINITY;
  f32x8 best = load(weights);
  for (long k = LANES; k < KEYS; k += LANES) best = max(best, load(weights + k));
  const float old = b.maximum[row], block = max_lane(best);
  const float maximum = block > old ? block : old;
  f32x8 total = splat(0);
  for (long k = 0; k < KEYS; k += LANES) {
    const f32x8 e = exp(load(weights + k) - splat(maximum));
    store(weights + k, e);
    total = total + e;
  }
  const float factor = old == -INFINITY ? 0 : exp(splat(old - maximum))[0];
  b.maximum[row] = maximum;
  b.total[row] = b.total[row] * factor + sum(total);
  if (factor != 1) scale(b.out + row * b.dim_padded, b.dim_padded, factor);
}

// out[row] += weights[row] @ values, over the keys that the row may see: a value it may not see is
// not multiplied by zero but left out, since zero times infinity is not zero.
static void add_values(Block& b) {
  for (long begin = 0, end; begin < b.rows; begin = end) {
    const long visible = b.visible[begin];
    for (end = begin + 1; end < b.rows && b.visible[end] == visible;) ++end;
    for (long d = 0; visible > 0 && d < b.dim_padded; d += PANEL) {
      add_product({b.weights + begin * KEYS, KEYS, b.values + d, b.dim_padded, visible,
                   b.out + begin * b.dim_padded + d, b.dim_padded},
                  end - begin);
    }
  }
}

static void finish(const Attention& a, const TokenBlock& tokens, long kv_head, const Block& b) {
  for (long r = 0; r < b.rows; ++r) {
    const long token = tokens.first_token + r / b.group;
    const long head = kv_head * b.group + r % b.group;
    float* to = a.result + (token * a.heads + head) * b.dim;
    for (long d = 0; d < b.dim; ++d) to[d] = b.out[r * b.dim_padded + d] / b.total[r];
  }
}

static void look_ahead(const Attention& a, const TokenBlock& tokens, long kv_head, long first,
                       Places& next) {
  locate(a.pages, tokens, kv_head, first, next);
  prefetch(a.pages, next);
}

template <class Number>
static void attend_block(const Attention& a, const Places& places, Block& b) {
  read_keys((const Number*)a.pages.keys, places, b);
  read_values((const Number*)a.pages.values, places, b);
  score(b);
  for (long r = 0; r < b.rows; ++r) {
    if (b.visible[r] > 0) soften(b, r);
  }
  add_values(b);
}

template <class Number>
static void attend(const Attention& a, const TokenBlock& tokens, long kv_head, float* scratch) {
  Block b = lay_out(a, tokens, scratch);
  start(a, tokens, kv_head, b);
  Places places, next;
  look_ahead(a, tokens, kv_head, 0, next);
  for (long first = 0; next.count > 0; first += KEYS) {
    places = next;
    look_ahead(a, tokens, kv_head, first + KEYS, next);
    for (long r = 0; r < b.rows; ++r) {
      const long seen = tokens.first_position + r / b.group + 1 - first;
      b.visible[r] = seen < 0 ? 0 : (seen < KEYS ? seen : KEYS);
    }
    attend_block<Number>(a, places, b);
  }
  finish(a, tokens, kv_head, b);
}

void attention(Pool& pool, const Attention& a, float* scratch) {
  const long kv_heads = a.pages.kv_heads, stride = scratch_floats(a);
  parallel(pool, a.num_blocks * kv_heads, [&a, scratch, kv_heads, stride](long unit, int worker) {
    const TokenBlock& tokens = a.blocks[unit / kv_heads];
    float* mine = scratch + worker * stride;
    if (a.pages.is_half) {
      attend<half>(a, tokens, unit % kv_heads, mine);
    } else {
      attend<float>(a, tokens, unit % kv_heads, mine);
    }
  });
}

}  // namespace TOQUE_ISA
}  // namespace toque
