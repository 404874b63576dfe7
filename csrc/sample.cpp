#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace toque {

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();

float& at(float* logits, long vocab, Token token) {
  if (token < 0 || token >= vocab) throw std::out_of_range("a token is not in the vocabulary");
  return logits[token];
}

}  // namespace

// ------------------------------------------------------------------------------- a row's state

RowSampler::RowSampler(SamplingRules rules, const std::vector<Token>& history)
    : rules_(std::move(rules)), seen_(history.begin(), history.end()) {
  const size_t prompt = std::min<size_t>(rules_.num_prompt, history.size());
  output_.assign(history.begin() + prompt, history.end());
  for (Token token : output_) ++counts_[token];
}

bool RowSampler::too_early(int64_t position) const {
  return !rules_.end_ids.empty() && position - rules_.num_prompt < rules_.min_tokens;
}

bool RowSampler::changes(int64_t position, const Mask& mask) const {
  return rules_.penalizes() || !rules_.logit_bias.empty() || too_early(position) || mask.words ||
         !rules_.allowed.empty() || !rules_.never.empty() || !rules_.spelled.empty();
}

void RowSampler::remember(Token token) {
  if (rules_.penalizes()) {
    seen_.insert(token);
    ++counts_[token];
  }
  if (!rules_.spelled.empty()) output_.push_back(token);
}

void RowSampler::adjust(int64_t position, const Mask& mask, float* logits, long vocab) const {
  if (rules_.penalizes()) penalize(logits, vocab);
  for (const auto& [token, bias] : rules_.logit_bias) at(logits, vocab, token) += bias;
  if (too_early(position)) {
    for (Token token : rules_.end_ids) at(logits, vocab, token) = NEVER;
  }
  ban_bad_words(logits, vocab);
  if (mask.words) {
    for (long i = 0; i < vocab; ++i) {
      if (!mask.allows(i)) logits[i] = NEVER;
    }
  }
  if (!rules_.allowed.empty()) only_allowed(logits, vocab);
}

// Repetition: arXiv:1909.05858, section 4.1; the others: OpenAI's API reference.
void RowSampler::penalize(float* logits, long vocab) const {
  if (const float factor = rules_.repetition_penalty; factor != 1) {
    for (Token token : seen_) {
      float& logit = at(logits, vocab, token);
      logit = logit > 0 ? logit / factor : logit * factor;
    }
  }
  for (const auto& [token, count] : counts_) {
    const float often = rules_.frequency_penalty * static_cast<float>(count);
    at(logits, vocab, token) -= often + rules_.presence_penalty;
  }
}

void RowSampler::ban_bad_words(float* logits, long vocab) const {
  for (Token token : rules_.never) at(logits, vocab, token) = NEVER;
  for (const std::vector<Token>& word : rules_.spelled) {
    const size_t before = word.size() - 1;
    const bool spelled = output_.size() >= before &&
                         std::equal(word.begin(), word.end() - 1, output_.end() - before);
    if (spelled) at(logits, vocab, word.back()) = NEVER;
  }
}

void RowSampler::only_allowed(float* logits, long vocab) const {
  std::vector<float> kept;
  for (Token token : rules_.allowed) kept.push_back(at(logits, vocab, token));
  std::fill(logits, logits + vocab, NEVER);
  for (size_t i = 0; i < kept.size(); ++i) logits[rules_.allowed[i]] = kept[i];
}

// -------------------------------------------------------------------------- one row of logits

namespace {

struct Candidate {
  Token token;
  float logit;
  double weight;
};

bool is_better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Logits and what was found out about them; memory of the thread, so that it is not new each time.
class Row {
 public:
  Row(const Kernels& kernels, const float* logits, long vocab, std::vector<float>& maxima)
      : kernels_(kernels), logits_(logits), vocab_(vocab), maxima_(maxima) {
    maxima_.resize((vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK);
    numbers_ = kernels.block_maxima(logits, vocab, maxima_.data());
    top_ = *std::max_element(maxima_.begin(), maxima_.end());
    numbers_ = numbers_ && top_ < std::numeric_limits<float>::infinity();
  }

  bool numbers() const { return numbers_; }  // none is NaN or infinity, some may be minus infinity
  float top() const { return top_; }
  long vocab() const { return vocab_; }
  const float* logits() const { return logits_; }

  Token best() const {
    const long block = std::find(maxima_.begin(), maxima_.end(), top_) - maxima_.begin();
    const float* begin = logits_ + block * SAMPLE_BLOCK;
    return static_cast<Token>(std::find(begin, logits_ + vocab_, top_) - logits_);
  }

  // In order of id, without weights.
  std::vector<Candidate> at_least(double bound) const {
    std::vector<Candidate> found;
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (!(maxima_[block] >= bound)) continue;
      for (long i = begin_of(block); i < end_of(block); ++i) {
        if (logits_[i] >= bound) found.push_back({static_cast<Token>(i), logits_[i], 0});
      }
    }
    return found;
  }

  // The k best in order of id; all of them when k exceeds the row. A k-th best block has k logits
  // that are no smaller than its best one: those of the k - 1 better blocks and its own.
  std::vector<Candidate> best_ones(long k) const {
    double bound = NEVER;
    if (k <= static_cast<long>(maxima_.size())) {
      std::vector<float> order(maxima_);
      std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<>());
      bound = order[k - 1];
    }
    std::vector<Candidate> found = at_least(bound);
    if (k < static_cast<long>(found.size())) {
      std::vector<Candidate> order(found);
      std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), is_better);
      const Candidate last = order[k - 1];
      std::erase_if(found, [&](const Candidate& c) { return is_better(last, c); });
    }
    return found;
  }

  // The sum of all weights, block by block in `sums`.
  double weigh(double inverse_temperature, std::vector<double>& sums) const {
    sums.resize(maxima_.size());
    double total = 0;
    for (size_t block = 0; block < sums.size(); ++block) {
      sums[block] = weigh_block(block, inverse_temperature, nullptr);
      total += sums[block];
    }
    return total;
  }

  double weigh_block(size_t block, double inverse_temperature, double* weights) const {
    const long begin = begin_of(block);
    return kernels_.weigh(logits_ + begin, end_of(block) - begin, top_, inverse_temperature,
                          weights);
  }

  void weigh_ones(std::vector<Candidate>& candidates, double inverse_temperature) const {
    std::vector<float> logits(candidates.size());
    std::vector<double> weights(candidates.size());
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = candidates[i].logit;
    kernels_.weigh(logits.data(), static_cast<long>(logits.size()), top_, inverse_temperature,
                   weights.data());
    for (size_t i = 0; i < logits.size(); ++i) candidates[i].weight = weights[i];
  }

  long begin_of(size_t block) const { return static_cast<long>(block) * SAMPLE_BLOCK; }
  long end_of(size_t block) const { return std::min(begin_of(block) + SAMPLE_BLOCK, vocab_); }

 private:
  const Kernels& kernels_;
  const float* logits_;
  long vocab_;
  std::vector<float>& maxima_;
  float top_;
  bool numbers_;
};

struct Scratch {
  std::vector<float> adjusted, maxima, adjusted_maxima;
  std::vector<double> sums;
};

Scratch& scratch() {
  thread_local Scratch memory;
  return memory;
}

// Bounded so that a tiny temperature leaves only the best, and no difference overflows.
double inverse_of(double temperature) { return std::min(1 / temperature, 1e200); }

double sum_of(const std::vector<Candidate>& candidates) {
  double total = 0;
  for (const Candidate& c : candidates) total += c.weight;
  return total;
}

// The smallest set of the best that reaches `wanted` (arXiv:1904.09751), at least one. Halves what
// is in question until little is left: linear, and no full sort.
void keep_nucleus(std::vector<Candidate>& candidates, double wanted) {
  if (candidates.empty()) return;
  std::vector<Candidate> order(candidates);
  const auto begin = order.begin();
  long low = 0, high = static_cast<long>(order.size());
  double before = 0;  // the weight of order[0 .. low), all of which belong to the set
  while (high - low > 16) {
    const long middle = low + (high - low) / 2;
    std::nth_element(begin + low, begin + middle, begin + high, is_better);
    double more = 0;
    for (long i = low; i < middle; ++i) more += order[i].weight;
    if (before + more < wanted) {
      before += more;
      low = middle;
    } else {
      high = middle;
    }
  }
  std::sort(begin + low, begin + high, is_better);
  long kept = low;
  for (; kept < high && before < wanted; ++kept) before += order[kept].weight;
  const Candidate last = order[std::max(kept - 1, 0L)];
  std::erase_if(candidates, [&](const Candidate& c) { return is_better(last, c); });
}

// The first at which the running sum exceeds `target`, else the last that has any weight: the
// target may have been rounded up to the total.
Token at_sum(const std::vector<Candidate>& candidates, double target) {
  if (candidates.empty()) throw std::logic_error("the parameters leave nothing");
  double sum = 0;
  Token last = candidates.front().token;
  for (const Candidate& c : candidates) {
    sum += c.weight;
    if (sum > target) return c.token;
    if (c.weight > 0) last = c.token;
  }
  return last;
}

Token draw_from_all(const Row& row, double inverse, double u, std::vector<double>& sums) {
  const double target = u * row.weigh(inverse, sums);
  double before = 0;
  size_t block = 0, last = 0;
  for (; block < sums.size(); ++block) {
    if (before + sums[block] > target) break;
    before += sums[block];
    if (sums[block] > 0) last = block;
  }
  if (block == sums.size()) block = last;
  double weights[SAMPLE_BLOCK];
  row.weigh_block(block, inverse, weights);
  std::vector<Candidate> inside;
  for (long i = row.begin_of(block); i < row.end_of(block); ++i) {
    inside.push_back({static_cast<Token>(i), 0, weights[i - row.begin_of(block)]});
  }
  return at_sum(inside, target - before);
}

// Those that top_k, top_p and min_p leave, in order of id, with their weights.
std::vector<Candidate> candidates_of(const Row& row, const SamplingRules& rules, double inverse,
                                     std::vector<double>& sums) {
  const bool few = rules.top_k > 0 && rules.top_k < row.vocab();
  std::vector<Candidate> kept;
  double total = 0;
  if (few) {
    kept = row.best_ones(rules.top_k);
    row.weigh_ones(kept, inverse);
    total = sum_of(kept);
  } else {
    total = row.weigh(inverse, sums);
    // All tokens below this weight together hold less than 1 - top_p, so the nucleus is complete
    // before it comes to them. Half of it, and a little less than min_p: room for rounding.
    const double tail = rules.top_p < 1 ? 0.5 * (1 - rules.top_p) * total / row.vocab() : 0;
    const double least = std::max(tail, 0.999 * rules.min_p);
    // From the best downwards: mostly a few hold the nucleus, and only those are sorted out.
    for (double level = rules.top_p < 1 ? 0.05 : 0;; level *= 0.05) {
      const bool last = !(level > least);  // NaN ends it too
      const double bound = last ? least : level;
      kept = row.at_least(bound > 0 ? row.top() + std::log(bound) / inverse - 1e-6 : NEVER);
      row.weigh_ones(kept, inverse);
      if (last || sum_of(kept) > (1 + 1e-9) * rules.top_p * total) break;
    }
  }
  if (rules.top_p < 1) keep_nucleus(kept, rules.top_p * total);
  std::erase_if(kept, [&](const Candidate& c) { return c.weight < rules.min_p; });
  return kept;
}

Token draw(const Row& row, const SamplingRules& rules, double u, std::vector<double>& sums) {
  const double inverse = inverse_of(rules.temperature);
  const bool all = !(rules.top_k > 0 && rules.top_k < row.vocab()) && rules.top_p >= 1 &&
                   rules.min_p <= 0;
  if (all) return draw_from_all(row, inverse, u, sums);
  const std::vector<Candidate> kept = candidates_of(row, rules, inverse, sums);
  return at_sum(kept, u * sum_of(kept));
}

Logprobs logprobs_of(const Row& row, Token token, long num_top, std::vector<double>& sums) {
  const double log_total = std::log(row.weigh(1, sums));
  const float chosen = row.logits()[token];
  const auto logprob = [&](float logit) {
    return (static_cast<double>(logit) - static_cast<double>(row.top())) - log_total;
  };
  long better = 0;
  for (long i = 0; i < row.vocab(); ++i) better += row.logits()[i] > chosen;
  Logprobs result{logprob(chosen), 1 + better, {}};
  if (num_top <= 0) return result;
  std::vector<Candidate> best = row.best_ones(num_top);
  std::sort(best.begin(), best.end(), is_better);
  for (const Candidate& c : best) result.top.emplace_back(c.token, logprob(c.logit));
  return result;
}

Chosen choose(const Kernels& kernels, const Wanted& wanted, long vocab) {
  Scratch& memory = scratch();
  RowSampler& sampler = *wanted.sampler;
  const SamplingRules& rules = sampler.rules();
  const Row raw(kernels, wanted.logits, vocab, memory.maxima);
  if (!raw.numbers() || raw.top() == NEVER) return {Outcome::NOT_NUMBERS, -1, {}};
  std::optional<Row> changed;
  if (sampler.changes(wanted.position, wanted.mask)) {
    memory.adjusted.assign(wanted.logits, wanted.logits + vocab);
    sampler.adjust(wanted.position, wanted.mask, memory.adjusted.data(), vocab);
    changed.emplace(kernels, memory.adjusted.data(), vocab, memory.adjusted_maxima);
    if (!changed->numbers()) return {Outcome::NOT_NUMBERS, -1, {}};
    if (changed->top() == NEVER) return {Outcome::NOTHING_LEFT, -1, {}};
  }
  const Row& row = changed ? *changed : raw;
  const double u = uniform(rules.seed, rules.choice, wanted.position);
  const Token token = rules.temperature == 0 ? row.best() : draw(row, rules, u, memory.sums);
  Chosen chosen{Outcome::TOKEN, token, {}};
  if (rules.logprobs) chosen.logprobs = logprobs_of(raw, token, *rules.logprobs, memory.sums);
  sampler.remember(token);
  return chosen;
}

}  // namespace

// ------------------------------------------------------------------------------------ all rows

void sample(const Kernels& kernels, Pool& pool, const std::vector<Wanted>& rows, long vocab,
            std::vector<Chosen>& chosen) {
  chosen.assign(rows.size(), {});
  parallel(pool, static_cast<long>(rows.size()), [&](long row, int) {
    try {
      chosen[row] = choose(kernels, rows[row], vocab);
    } catch (const std::exception&) {  // this row's own: it stays FAILED
    }
  });
}

void score(const Kernels& kernels, Pool& pool, const float* logits, long vocab,
           const std::vector<Token>& targets, long num_top,
           std::vector<std::optional<Logprobs>>& scores) {
  scores.assign(targets.size(), {});
  parallel(pool, static_cast<long>(targets.size()), [&](long i, int) {
    try {
      const Row row(kernels, logits + i * vocab, vocab, scratch().maxima);
      if (!row.numbers() || row.top() == NEVER) return;
      scores[i] = logprobs_of(row, targets[i], num_top, scratch().sums);
    } catch (const std::exception&) {  // out of memory: this row has none
    }
  });
}

double uniform(uint64_t seed, uint64_t choice, uint64_t position) {
  using Wide = unsigned __int128;
  uint64_t c[4] = {position, 0, 0, 0}, k[2] = {seed, choice};
  for (int round = 0; round < 10; ++round) {
    const Wide p0 = static_cast<Wide>(0xD2E7470EE14C6C93) * c[0];
    const Wide p1 = static_cast<Wide>(0xCA5A826395121157) * c[2];
    const uint64_t high0 = static_cast<uint64_t>(p0 >> 64), high1 = static_cast<uint64_t>(p1 >> 64);
    const uint64_t next[4] = {high1 ^ c[1] ^ k[0], static_cast<uint64_t>(p1), high0 ^ c[3] ^ k[1],
                              static_cast<uint64_t>(p0)};
    std::memcpy(c, next, sizeof c);
    k[0] += 0x9E3779B97F4A7C15;
    k[1] += 0xBB67AE8584CAA73B;
  }
  return static_cast<double>(c[0] >> 11) * 0x1p-53;
}

}  // namespace toque
