// Causal attention over paged keys and values, softmax part by part (arXiv:2205.14135).
//
// A unit of work is a block of neighbouring tokens of one chunk and one KV head with the query
// heads that share it: "rows" below are its (token, head) pairs, token after token. Its keys are
// taken in parts of PART, counted from position 0 whatever the size of a page:
//
//     positions    0 ..... 255 | 256 ..... 511 | 512 ..... 767 |
//     token at 300    all         first 45        -               keys it may see in each part
//
// For each part and row: all scores, their maximum, weights, their sum, and the weighted values;
// parts are then joined in order. What a row computes depends on its own position alone: parts and
// the steps within them begin at fixed positions, and a row stops at its own. So its bits do not
// depend on how the sequence was cut into chunks, on what else is in the batch, nor on whether the
// parts of one unit are computed by one thread or by several.

#include "tile.h"
#include "widen_pages.h"

namespace toque {

// Multiples of two PANELs; PART is one of STEP.
constexpr long PART = 256;  // keys that a softmax is taken over at once
constexpr long STEP = 32;   // values that are widened together: they should fit L1

// Rows of weights lie this many floats apart. Not PART itself: at distances of a power of two they
// would share a few lines of the cache.
constexpr long WEIGHTS_STRIDE = PART + PANEL;

// With fewer units than this for each thread, the parts of a unit are shared out too.
constexpr long UNITS_PER_THREAD = 4;

namespace TOQUE_ISA {

// What a unit knows of its keys: of one part, or of all that were joined so far.
struct Partial {
  float* out;      // [rows, dim_padded], weighted values, not divided by total
  float* maximum;  // [rows], of the scores
  float* total;    // [rows], of the weights
};

// Scratch of one thread; rows padded so that every vector access stays inside.
struct Block {
  long rows;
  long group;       // query heads per KV head
  long dim;
  long dim_padded;  // to whole panels
  long kv_head;
  float* q;         // [rows, dim], scaled
  float* weights;   // [rows, WEIGHTS_STRIDE], scores first
  float* keys;      // [2, dim, PANEL]: two panels
  float* values;    // [STEP, dim_padded]
  float* turned;    // [dim], see widen_pages.h
  long* visible;    // [rows], keys of the current part that the row may see
  Partial part;
  Partial joined;
};

static long padded(long count) { return (count + PANEL - 1) / PANEL * PANEL; }

static long block_rows(const Attention& a) {
  const long group = a.heads / a.pages.kv_heads;
  return padded(group * tokens_per_block(group));
}

static long partial_floats(const Attention& a) {
  return block_rows(a) * (padded(a.pages.dim) + 2);
}

static long thread_floats(const Attention& a) {
  const long rows = block_rows(a), dim = padded(a.pages.dim);
  return rows * (dim + WEIGHTS_STRIDE + 2) + dim * (2 * PANEL + STEP + 1) + 2 * partial_floats(a);
}

static long units(const Attention& a) { return a.num_blocks * a.pages.kv_heads; }

// Of the unit with the longest context.
static long most_parts(const Attention& a) {
  long most = 0;
  for (long i = 0; i < a.num_blocks; ++i) {
    const long context = a.blocks[i].first_position + a.blocks[i].tokens;
    most = context > most ? context : most;
  }
  return (most + PART - 1) / PART;
}

static bool shares_parts(const Attention& a, int threads) {
  return threads > 1 && units(a) < UNITS_PER_THREAD * threads && most_parts(a) > 1;
}

static long steps_floats(const Attention& a) { return padded(a.pages.dim) * PANEL; }

long scratch_floats(const Attention& a, int threads) {
  const long shared = shares_parts(a, threads) ? units(a) * most_parts(a) * partial_floats(a) : 0;
  return steps_floats(a) + threads * thread_floats(a) + shared;
}

static Partial partial_at(const Attention& a, float* memory) {
  const long rows = block_rows(a);
  float* maximum = memory + rows * padded(a.pages.dim);
  return {memory, maximum, maximum + rows};
}

static Block lay_out(const Attention& a, const TokenBlock& tokens, long kv_head, float* scratch) {
  Block b;
  const long most_rows = block_rows(a);
  b.group = a.heads / a.pages.kv_heads;
  b.rows = tokens.tokens * b.group;
  b.dim = a.pages.dim;
  b.dim_padded = padded(b.dim);
  b.kv_head = kv_head;
  b.q = scratch;
  b.weights = b.q + most_rows * b.dim_padded;
  b.keys = b.weights + most_rows * WEIGHTS_STRIDE;
  b.values = b.keys + 2 * b.dim_padded * PANEL;
  b.turned = b.values + b.dim_padded * STEP;
  b.visible = (long*)(b.turned + b.dim_padded);  // two floats' room each
  float* partials = b.turned + b.dim_padded + 2 * most_rows;
  b.part = partial_at(a, partials);
  b.joined = partial_at(a, partials + partial_floats(a));
  return b;
}

static void start(const Attention& a, const TokenBlock& tokens, Block& b) {
  for (long t = 0; t < tokens.tokens; ++t) {
    const float* q = a.q + ((tokens.first_token + t) * a.heads + b.kv_head * b.group) * b.dim;
    float* to = b.q + t * b.group * b.dim;
    for (long i = 0; i < b.group * b.dim; ++i) to[i] = q[i] * a.scale;
  }
  memset(b.keys, 0, 2 * b.dim_padded * PANEL * sizeof(float));
  memset(b.values, 0, STEP * b.dim_padded * sizeof(float));  // the padding is never written again
}

static void start_joining(Block& b) {
  memset(b.joined.out, 0, b.rows * b.dim_padded * sizeof(float));
  for (long r = 0; r < b.rows; ++r) b.joined.maximum[r] = -INFINITY, b.joined.total[r] = 0;
}

// b.weights[row] = q[row] . key for the `count` keys from position `first` on. Columns do not mix,
// so rows that see no key of a panel may be left out.
template <KvType TYPE>
static void score(const Attention& a, const TokenBlock& tokens, const float* steps, long first,
                  long count, Block& b) {
  PageWalk walk(a.pages, tokens.page_table, b.kv_head, first);
  const long gap = b.dim * PANEL;
  for (long k = 0; k < count; k += 2 * PANEL) {
    const long blind_tokens = first + k - tokens.first_position;
    const long row = blind_tokens > 0 ? blind_tokens * b.group : 0;
    for (long j = 0; j < 2 * PANEL && k + j < count; j += PANEL) {
      float* panel = b.keys + j * b.dim;
      const long left = count - k - j;
      walk.prefetch_keys<TYPE>(left - PANEL);
      walk.take_keys<TYPE>(left < PANEL ? left : PANEL, panel);
      if (a.bias.bias) add_bias(a, steps, first + k + j, b.kv_head, b.turned, panel);
    }
    add_product_of_pair<true>({b.q + row * b.dim, b.dim, b.keys, PANEL, b.dim,
                               b.weights + row * WEIGHTS_STRIDE + k, WEIGHTS_STRIDE},
                              gap, b.rows - row);
  }
}

// From scores to weights relative to the part's maximum.
static void soften(Block& b, long row) {
  float* weights = b.weights + row * WEIGHTS_STRIDE;
  const long visible = b.visible[row];
  for (long k = visible; k % LANES != 0; ++k) weights[k] = -INFINITY;
  floats best = splat(-INFINITY);
  for (long k = 0; k < visible; k += LANES) best = max(best, load(weights + k));
  const float maximum = max_lane(best);
  floats total = splat(0);
  for (long k = 0; k < visible; k += LANES) {
    const floats e = exp(load(weights + k) - splat(maximum));
    store(weights + k, e);
    total = total + e;
  }
  b.part.maximum[row] = maximum;
  b.part.total[row] = sum(total);
}

// Values that a row may see of the step that begins at key k of the part.
static long depth_at(const Block& b, long row, long k) {
  const long depth = b.visible[row] - k;
  return depth < 0 ? 0 : (depth < STEP ? depth : STEP);
}

static void add_weighted(Block& b, long begin, long end, long k, long depth) {
  TileArgs tile{b.weights + begin * WEIGHTS_STRIDE + k, WEIGHTS_STRIDE, b.values, b.dim_padded,
                depth, b.part.out + begin * b.dim_padded, b.dim_padded};
  long d = 0;
  for (; d + 2 * PANEL <= b.dim_padded; d += 2 * PANEL) {
    add_product_of_pair(tile, PANEL, end - begin);
    tile.panel += 2 * PANEL;
    tile.sums += 2 * PANEL;
  }
  if (d < b.dim_padded) add_product(tile, end - begin);
}

// out[row] += weights[row] @ values of that step. A value that a row may not see is not multiplied by
// zero but left out, since zero times infinity is not zero.
static void add_values(Block& b, long k) {
  for (long begin = 0, end; begin < b.rows; begin = end) {
    const long depth = depth_at(b, begin, k);
    for (end = begin + 1; end < b.rows && depth_at(b, end, k) == depth;) ++end;
    if (depth > 0) add_weighted(b, begin, end, k, depth);
  }
}

// One part, from position `first` on, into b.part.
template <KvType TYPE>
static void attend_part(const Attention& a, const TokenBlock& tokens, const float* steps,
                        long first, Block& b) {
  const long context = tokens.first_position + tokens.tokens;  // keys of the last token
  const long count = context - first < PART ? context - first : PART;
  for (long r = 0; r < b.rows; ++r) {
    const long seen = tokens.first_position + r / b.group + 1 - first;
    b.visible[r] = seen < 0 ? 0 : (seen < PART ? seen : PART);
  }
  score<TYPE>(a, tokens, steps, first, count, b);
  for (long r = 0; r < b.rows; ++r) soften(b, r);
  memset(b.part.out, 0, b.rows * b.dim_padded * sizeof(float));
  PageWalk walk(a.pages, tokens.page_table, b.kv_head, first);
  for (long k = 0; k < count; k += STEP) {
    walk.prefetch_values<TYPE>(count - k - STEP, STEP);
    walk.take_values<TYPE>(count - k < STEP ? count - k : STEP, b.values, b.dim_padded);
    add_values(b, k);
  }
}

// Adds a part to what comes before it. A row that sees none of its keys, because another token of
// the block does, must stay as it is alone: adding nothing would turn a negative zero.
static void join(const Partial& part, Block& b) {
  for (long r = 0; r < b.rows; ++r) {
    const float old = b.joined.maximum[r], here = part.maximum[r];
    if (here == -INFINITY && part.total[r] == 0) continue;
    const float maximum = here > old ? here : old;
    const floats before = old == -INFINITY ? splat(0) : exp(splat(old - maximum));
    const floats now = exp(splat(here - maximum));
    float* out = b.joined.out + r * b.dim_padded;
    const float* added = part.out + r * b.dim_padded;
    for (long d = 0; d < b.dim_padded; d += LANES) {
      store(out + d, fma(load(added + d), now, load(out + d) * before));
    }
    b.joined.maximum[r] = maximum;
    b.joined.total[r] = fma(splat(part.total[r]), now, splat(b.joined.total[r]) * before)[0];
  }
}

static void finish(const Attention& a, const TokenBlock& tokens, const Block& b) {
  for (long r = 0; r < b.rows; ++r) {
    const long token = tokens.first_token + r / b.group;
    const long head = b.kv_head * b.group + r % b.group;
    const float* from = b.joined.out + r * b.dim_padded;
    float* to = a.result + (token * a.heads + head) * b.dim;
    for (long d = 0; d < b.dim; ++d) to[d] = from[d] / b.joined.total[r];
  }
}

// Units whole, one thread each.
template <KvType TYPE>
static void attend_units(Pool& pool, const Attention& a, const float* steps, float* scratch) {
  parallel(pool, units(a), [&a, steps, scratch](long unit, int worker) {
    const TokenBlock& tokens = a.blocks[unit / a.pages.kv_heads];
    Block b = lay_out(a, tokens, unit % a.pages.kv_heads, scratch + worker * thread_floats(a));
    start(a, tokens, b);
    start_joining(b);
    for (long first = 0; first < tokens.first_position + tokens.tokens; first += PART) {
      attend_part<TYPE>(a, tokens, steps, first, b);
      join(b.part, b);
    }
    finish(a, tokens, b);
  });
}

// The same, but the parts of a unit are computed in any order by any thread, and joined afterwards.
template <KvType TYPE>
static void attend_parts(Pool& pool, const Attention& a, const float* steps, float* scratch) {
  const long parts = most_parts(a);
  float* shared = scratch + pool_threads(pool) * thread_floats(a);
  parallel(pool, units(a) * parts, [&a, steps, scratch, shared, parts](long task, int worker) {
    const long unit = task / parts, first = task % parts * PART;
    const TokenBlock& tokens = a.blocks[unit / a.pages.kv_heads];
    if (first >= tokens.first_position + tokens.tokens) return;
    Block b = lay_out(a, tokens, unit % a.pages.kv_heads, scratch + worker * thread_floats(a));
    start(a, tokens, b);
    b.part = partial_at(a, shared + task * partial_floats(a));
    attend_part<TYPE>(a, tokens, steps, first, b);
  });
  parallel(pool, units(a), [&a, scratch, shared, parts](long unit, int worker) {
    const TokenBlock& tokens = a.blocks[unit / a.pages.kv_heads];
    Block b = lay_out(a, tokens, unit % a.pages.kv_heads, scratch + worker * thread_floats(a));
    start_joining(b);
    for (long part = 0; part * PART < tokens.first_position + tokens.tokens; ++part) {
      join(partial_at(a, shared + (unit * parts + part) * partial_floats(a)), b);
    }
    finish(a, tokens, b);
  });
}

template <KvType TYPE>
static void attend(Pool& pool, const Attention& a, const float* steps, float* scratch) {
  if (shares_parts(a, pool_threads(pool))) {
    attend_parts<TYPE>(pool, a, steps, scratch);
  } else {
    attend_units<TYPE>(pool, a, steps, scratch);
  }
}

void attention(Pool& pool, const Attention& a, float* scratch) {
  float* steps = scratch;
  scratch += steps_floats(a);
  if (a.bias.bias) fill_steps(a, steps);
  switch (a.pages.type) {
    case KvType::F32: return attend<KvType::F32>(pool, a, steps, scratch);
    case KvType::F16: return attend<KvType::F16>(pool, a, steps, scratch);
    case KvType::BF16: return attend<KvType::BF16>(pool, a, steps, scratch);
    case KvType::I8: return attend<KvType::I8>(pool, a, steps, scratch);
    case KvType::E4M3: return attend<KvType::E4M3>(pool, a, steps, scratch);
  }
}

}  // namespace TOQUE_ISA
}  // namespace toque
