// A recorded program of one layer over several batches, and the sampler on random logits.

#include <optional>

#include "batches.h"
#include "cases.h"
#include "program.h"
#include "sample.h"

namespace toque {

namespace {

constexpr long VOCAB = 77, DIM = 32, HEADS = 8, KV_HEADS = 2, HIDDEN = 256, INNER = 256;

// Matrices on a multiple of every kind's block, the norms, the pages.
struct Model {
  std::vector<Weight> weights;  // embed, q, k, v, o, gate, up, down
  Block<float> norm, bias;
  Rope rope;
  Block<uint8_t> pages;
  Pages paging;
  Program program;

  Model(Pool& pool, Draw& draw, Kind kind, KvType type, const Sequences& sequences, long longest)
      : norm(draw.normals(HIDDEN)), bias(draw.normals(KV_HEADS * DIM)), rope(longest, DIM) {
    constexpr long KV = KV_HEADS * DIM;
    constexpr long SHAPES[][2] = {{VOCAB, HIDDEN}, {HEADS * DIM, HIDDEN}, {KV, HIDDEN},
                                  {KV, HIDDEN},    {HIDDEN, HEADS * DIM}, {INNER, HIDDEN},
                                  {INNER, HIDDEN}, {HIDDEN, INNER}};
    for (const auto& [out, in] : SHAPES) {
      weights.push_back(
          pack(portable::kernels, pool, draw.stored(kind, out, in), kind, out, in));
    }
    paging = {nullptr, type, KV_HEADS, sequences.block_size, DIM};
    pages = Block<uint8_t>(sequences.num_pages * paging.page_bytes());
    paging.bytes = pages.data();
    record(longest, sequences.num_pages);
  }

  void record(long longest, long num_pages) {
    const auto projection = [&](int i) { return Projection{weights[i].packed, nullptr}; };
    RopeWrite write{};
    write.norm_eps = 1e-6f;
    write.cos = rope.cos.data();
    write.sin = rope.sin.data();
    write.heads = HEADS;
    write.pages = paging;
    Attention attention{};
    attention.heads = HEADS;
    attention.scale = 0.2f;
    attention.pages = paging;
    attention.bias = {bias.data(), rope.cos.data(), rope.sin.data(), longest};
    const auto table = program.embed(weights[0].packed);
    auto x = program.rms_norm(table, norm.data(), 1e-6f);
    auto y = program.rms_norm(x, norm.data(), 1e-6f);
    const Projection qkv[] = {projection(1), projection(2), projection(3)};
    y = program.qkv_rope_write(y, qkv, write, longest, num_pages);
    y = program.attention(y, attention, num_pages);
    x = program.linear(y, projection(4), x);
    x = program.output_rows(x);
    y = program.rms_norm(x, norm.data(), 1e-6f);
    y = program.gate_up_silu(y, projection(5), projection(6));
    x = program.linear(y, projection(7), x);
    program.finish(program.linear(program.rms_norm(x, norm.data(), 1e-6f), projection(0),
                                  Program::NONE));
  }

  // Chunk by chunk of each sequence's `chunks`, the last token's logits.
  Block<float> run(const Kernels& kernels, Pool& pool, const Sequences& sequences) {
    const long tokens = sequences.tokens(), outputs = static_cast<long>(sequences.chunks.size());
    Block<int32_t> ids(tokens), positions(tokens), rows(outputs);
    Block<int64_t> write_at(tokens);
    long t = 0;
    for (long c = 0; c < outputs; ++c) {
      const Chunk& chunk = sequences.chunks[c];
      for (long p = chunk.context - chunk.tokens; p < chunk.context; ++p, ++t) {
        ids[t] = static_cast<int32_t>((p * 7 + c) % VOCAB);
        positions[t] = static_cast<int32_t>(p);
        write_at[t] = sequences.place(c, p);
      }
      rows[c] = static_cast<int32_t>(t - 1);
    }
    const Step step{ids.data(),  positions.data(), write_at.data(),
                    rows.data(), tokens,           outputs,
                    {sequences.blocks(tokens_per_block(HEADS / KV_HEADS))}};
    Block<float> logits(outputs * VOCAB);
    program.run(kernels, pool, step, logits.data());
    return logits;
  }
};

}  // namespace

void check_program(const Kernels& kernels, Pools& pools, Draw& draw, Kind kind, KvType type) {
  const long block_size = draw.one_of<long>({3, 16, 32});
  const std::vector<Chunk> prompts = {{draw.of(1, 40), 0}, {draw.of(1, 300), 0}, {17, 0}};
  std::vector<Chunk> whole;
  long longest = 0;
  for (const Chunk& c : prompts) {
    whole.push_back({c.context, c.context});
    longest = std::max(longest, c.context);
  }
  Sequences sequences(draw, block_size, whole);
  Model model(pools.one, draw, kind, type, sequences, longest);
  const Block<float> at_once = model.run(kernels, pools.one, sequences);
  REQUIRE(same_bits(at_once, model.run(kernels, pools.three, sequences)), "%s: program on threads",
          kernels.name);
  // The same prompts in two steps; a sequence of one token has all of it in the second.
  Sequences& steps = sequences;
  std::vector<Chunk> rest = whole;
  for (size_t i = 0; i < whole.size(); ++i) {
    steps.chunks[i] = {(whole[i].context + 1) / 2, (whole[i].context + 1) / 2};
    rest[i].tokens = whole[i].context - steps.chunks[i].context;
    if (rest[i].tokens == 0) rest[i].tokens = 1;
  }
  model.run(kernels, pools.three, steps);
  steps.chunks = rest;
  REQUIRE(same_bits(at_once, model.run(kernels, pools.one, steps)), "%s: program in two steps",
          kernels.name);
}

// --------------------------------------------------------------------------------------- sampler

namespace {

SamplingRules drawn_rules(Draw& draw, long vocab) {
  const auto token = [&] { return static_cast<Token>(draw.of(0, vocab - 1)); };
  SamplingRules rules{};
  rules.temperature = draw.one_of<double>({0, 0.5, 1, 3});
  rules.top_k = draw.one_of<long>({0, 1, 2, 40, vocab, vocab + 9});
  rules.top_p = draw.one_of<double>({1, 0.9, 0.3, 1e-9});
  rules.min_p = draw.one_of<double>({0, 0.05, 1});
  rules.seed = draw.of(0, 1L << 62);
  rules.repetition_penalty = draw.coin() ? 1.0f : 1.3f;
  rules.presence_penalty = draw.coin() ? 0.0f : 0.7f;
  rules.frequency_penalty = draw.coin() ? 0.0f : -0.4f;
  if (draw.coin()) rules.logit_bias = {{token(), 5.0f}, {token(), -100.0f}};
  if (draw.coin()) rules.never = {token()};
  if (draw.coin()) rules.spelled = {{token(), token()}, {token(), token(), token()}};
  if (draw.of(0, 3) == 0) rules.allowed = {token(), token()};
  if (draw.coin()) rules.end_ids = {token()};
  rules.num_prompt = draw.of(0, 5);
  rules.min_tokens = draw.of(0, 9);
  if (draw.coin()) rules.logprobs = draw.one_of<int64_t>({0, 1, 5, vocab, vocab + 1});
  return rules;
}

}  // namespace

void check_sampler(const Kernels& kernels, Pools& pools, Draw& draw) {
  const long vocab = draw.one_of<long>({1, 3, 255, 256, 257, 1003});
  const long count = draw.of(1, 17);
  Block<float> logits = draw.normals(count * vocab, 4);
  Block<uint32_t> words((vocab + 31) / 32 - (vocab > 32 && draw.coin()));
  std::vector<RowSampler> here, there;
  const std::vector<Token> history = {0, 0, static_cast<Token>(vocab - 1)};
  for (long row = 0; row < count; ++row) {
    here.emplace_back(drawn_rules(draw, vocab), history);
    there.push_back(here.back());
  }
  if (vocab > 1 && count > 2) logits[vocab] = NAN;  // the second row's
  const auto wanted = [&](std::vector<RowSampler>& samplers) {
    std::vector<Wanted> rows;
    for (long row = 0; row < count; ++row) {
      rows.push_back({&samplers[row], logits.data() + row * vocab, 3 + row, {}});
      if (row % 3 == 0) rows.back().mask = {words.data(), words.size()};
    }
    return rows;
  };
  for (int step = 0; step < 3; ++step) {
    std::vector<Chosen> a, b;
    sample(kernels, pools.three, wanted(here), vocab, a);
    sample(portable::kernels, pools.one, wanted(there), vocab, b);
    for (long row = 0; row < count; ++row) {
      REQUIRE(a[row].outcome != Outcome::FAILED, "%s: row %ld", kernels.name, row);
      REQUIRE(a[row].outcome == b[row].outcome && a[row].token == b[row].token,
              "%s: row %ld of %ld, %d and %d", kernels.name, row, vocab, a[row].token,
              b[row].token);
    }
    REQUIRE(!(vocab > 1 && count > 2) || a[1].outcome == Outcome::NOT_NUMBERS, "NaN is not seen");
  }
  std::vector<std::optional<Logprobs>> scores;
  score(kernels, pools.three, logits.data(), vocab,
        std::vector<Token>(count, static_cast<Token>(vocab - 1)), draw.of(0, vocab + 2), scores);
  // A token beyond the vocabulary is that row's failure, and nothing is written.
  SamplingRules wrong{};
  wrong.logit_bias = {{static_cast<Token>(vocab), 1.0f}};
  wrong.top_p = 1;
  wrong.repetition_penalty = 1;
  RowSampler failing(wrong, {});
  std::vector<Chosen> chosen;
  sample(kernels, pools.one, {{&failing, logits.data(), 0, {}}}, vocab, chosen);
  REQUIRE(chosen[0].outcome == Outcome::FAILED, "%s: a token beyond the vocabulary", kernels.name);
}

}  // namespace toque
