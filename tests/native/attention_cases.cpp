// Keys and values into pages, and attention over them: any page size, odd heads, edges of parts.

#include "batches.h"
#include "cases.h"

namespace toque {

namespace {

constexpr double TOLERANCE = 2e-6;

std::vector<Chunk> drawn_chunks(Draw& draw) {
  std::vector<Chunk> chunks;
  for (long i = draw.of(1, 4); i > 0; --i) {
    const long context = draw.one_of<long>({1, 2, 15, 16, 17, 255, 256, 257, draw.of(1, 700)});
    const long tokens = draw.one_of<long>({1, 1, draw.of(1, 5), draw.of(1, 130)});
    chunks.push_back({context, std::min(context, tokens)});
  }
  return chunks;
}

struct Problem {
  long kv_heads, heads, dim, block_size;
  KvType type;
  Sequences sequences;
  Rope rope;
  Block<float> query_norm, key_norm, bias;
  Block<uint8_t> pages;

  Pages at(Block<uint8_t>& bytes) const {
    return {bytes.data(), type, kv_heads, block_size, dim};
  }

  // Every token of all contexts; returns the rotated queries. The same keys each time.
  Block<float> write(const Kernels& kernels, Pool& pool, Draw draw, Block<uint8_t>& bytes) const {
    long tokens = 0;
    for (const Chunk& c : sequences.chunks) tokens += c.context;
    Block<int32_t> positions(tokens);
    Block<int64_t> write_at(tokens);
    long t = 0;
    for (size_t c = 0; c < sequences.chunks.size(); ++c) {
      for (long p = 0; p < sequences.chunks[c].context; ++p, ++t) {
        positions[t] = static_cast<int32_t>(p);
        write_at[t] = sequences.place(c, p);
      }
    }
    Block<float> query = draw.normals(tokens * heads * dim);
    Block<float> key = draw.normals(tokens * kv_heads * dim);
    const Block<float> value = draw.normals(tokens * kv_heads * dim);
    RopeWrite w{};
    w.query = query.data();
    w.key = key.data();
    w.value = value.data();
    w.query_norm = query_norm.size() ? query_norm.data() : nullptr;
    w.key_norm = key_norm.size() ? key_norm.data() : nullptr;
    w.norm_eps = 1e-6f;
    w.cos = rope.cos.data();
    w.sin = rope.sin.data();
    w.positions = positions.data();
    w.write_at = write_at.data();
    w.tokens = tokens;
    w.heads = heads;
    w.pages = at(bytes);
    kernels.rope_write(pool, w);
    return query;
  }

  Block<float> attend(const Kernels& kernels, Pool& pool, const Block<float>& q,
                      long most_tokens) {
    const std::vector<TokenBlock> drawn = sequences.blocks(most_tokens);
    Block<TokenBlock> blocks(drawn.size());
    std::copy(drawn.begin(), drawn.end(), blocks.data());
    Block<float> result(q.size());
    Attention a{};
    a.q = q.data();
    a.result = result.data();
    a.blocks = blocks.data();
    a.num_blocks = blocks.size();
    a.heads = heads;
    a.scale = 1 / std::sqrt(static_cast<float>(dim));
    a.pages = at(pages);
    if (bias.size()) {
      a.bias = {bias.data(), rope.cos.data(), rope.sin.data(), rope.cos.size() / (dim / 2)};
    }
    Block<float> scratch(kernels.attention_scratch(a, pool.threads()));
    kernels.attention(pool, a, scratch.data());
    return result;
  }
};

Problem drawn(Draw& draw, KvType type) {
  const long kv_heads = draw.of(1, 3), group = draw.one_of<long>({1, 2, 3, 5, 7, 70});
  const long dim = 2 * draw.one_of<long>({1, 4, 16, 32, 40, draw.of(1, 70)});
  const long block_size = draw.one_of<long>({1, 3, 8, 16, 16, 24, 32, 64});
  Sequences sequences(draw, block_size, drawn_chunks(draw));
  long longest = 0, width = kv_heads * dim;
  for (const Chunk& c : sequences.chunks) longest = std::max(longest, c.context);
  Problem p{kv_heads,
            kv_heads * group,
            dim,
            block_size,
            type,
            std::move(sequences),
            Rope(longest, dim),
            draw.normals(draw.coin() ? dim : 0),
            draw.normals(draw.coin() ? dim : 0),
            draw.normals(draw.coin() ? width : 0),
            Block<uint8_t>(0)};
  p.pages = Block<uint8_t>(p.sequences.num_pages * p.at(p.pages).page_bytes());
  return p;
}

void check_writing(const Kernels& kernels, Pools& pools, const Draw& draw, Problem& p) {
  Block<uint8_t> here(p.pages.size()), threads(p.pages.size());
  const Block<float> queries = p.write(kernels, pools.one, draw, here);
  const Block<float> the_same = p.write(kernels, pools.three, draw, threads);
  const Block<float> expected = p.write(portable::kernels, pools.one, draw, p.pages);
  REQUIRE(same_bits(queries, the_same) && same_bits(here, threads), "%s: writing on threads",
          kernels.name);
  REQUIRE(difference(queries, expected) <= TOLERANCE, "%s: queries", kernels.name);
  // Without a norm, whose sum is rounded otherwise, nothing on this way is fused.
  REQUIRE(p.key_norm.size() || same_bits(here, p.pages), "%s: pages of type %d", kernels.name,
          (int)p.type);
}

}  // namespace

void check_attention(const Kernels& kernels, Pools& pools, Draw& draw, KvType type) {
  Problem p = drawn(draw, type);
  check_writing(kernels, pools, draw, p);
  const Block<float> q = draw.normals(p.sequences.tokens() * p.heads * p.dim);
  const long most = tokens_per_block(p.heads / p.kv_heads);
  const Block<float> all = p.attend(kernels, pools.one, q, most);
  REQUIRE(same_bits(all, p.attend(kernels, pools.three, q, most)), "%s: attention on threads",
          kernels.name);
  REQUIRE(same_bits(all, p.attend(kernels, pools.three, q, 1)), "%s: attention token by token",
          kernels.name);
  const double off = difference(all, p.attend(portable::kernels, pools.one, q, most));
  REQUIRE(off <= TOLERANCE, "%s: attention, type %d, %g", kernels.name, (int)type, off);
  for (long i = 0; i < all.size(); ++i) {
    REQUIRE(std::isfinite(all[i]), "%s: read a place that holds nothing", kernels.name);
  }
}

}  // namespace toque
