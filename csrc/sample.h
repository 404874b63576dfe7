// From rows of logits to tokens. The readable twin is src/toque/kernels/ref/sampler.py, and every
// comparison here is made on the same numbers in the same order as there.
//
// Nothing sorts a vocabulary. The largest logit of each block of 256 is known first; a block whose
// largest is below a bound is not looked at again, and where a boundary in the order of logits is
// wanted (top_k, top_p), selection finds it in linear time.
#pragma once

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kernels.h"

namespace toque {

using Token = int32_t;

// types.SamplingParams and RowSetup, as far as sampling reads them.
struct SamplingRules {
  double temperature;  // 0 = greedy
  int64_t top_k;       // 0 = off
  double top_p;
  double min_p;
  uint64_t seed;
  uint64_t choice;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  std::vector<std::pair<Token, float>> logit_bias;
  std::vector<Token> allowed;  // empty = all
  std::vector<Token> never;
  std::vector<std::vector<Token>> spelled;  // of two tokens or more
  std::vector<Token> end_ids;
  int64_t num_prompt;
  int64_t min_tokens;
  std::optional<int64_t> logprobs;

  bool penalizes() const {
    return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  }
};

// Allowed tokens: bit i % 32 of word i / 32. What lies beyond the last word is forbidden.
struct Mask {
  const uint32_t* words = nullptr;  // null = there is none
  long count = 0;
  bool allows(long token) const {
    return token / 32 < count && (words[token / 32] >> (token % 32) & 1);
  }
};

// The sampling state of one row.
//
// Owns: what penalties and bad words must remember. Knows: its rules. Does not know: other rows.
class RowSampler {
 public:
  RowSampler(SamplingRules rules, const std::vector<Token>& history);

  const SamplingRules& rules() const { return rules_; }
  bool changes(int64_t position, const Mask& mask) const;
  // Penalties, bias and bans, in place. Throws std::out_of_range for a token beyond the vocabulary.
  void adjust(int64_t position, const Mask& mask, float* logits, long vocab) const;
  void remember(Token token);

 private:
  bool too_early(int64_t position) const;
  void penalize(float* logits, long vocab) const;
  void ban_bad_words(float* logits, long vocab) const;
  void only_allowed(float* logits, long vocab) const;

  SamplingRules rules_;
  std::unordered_set<Token> seen_;  // prompt and output
  std::unordered_map<Token, int64_t> counts_;  // output
  std::vector<Token> output_;  // for bad words only
};

struct Logprobs {
  double chosen;
  long rank;
  std::vector<std::pair<Token, double>> top;  // best first, ties to the lower id
};

enum class Outcome { TOKEN, NOT_NUMBERS, NOTHING_LEFT, FAILED };

struct Wanted {
  RowSampler* sampler;  // of each row another one
  const float* logits;  // [vocab]
  int64_t position;     // at which the token will stand
  Mask mask;
};

struct Chosen {
  Outcome outcome = Outcome::FAILED;
  Token token = -1;
  std::optional<Logprobs> logprobs;
};

// One token for each row, each a function of its own `Wanted` alone. The sampler remembers it.
void sample(const Kernels& kernels, Pool& pool, const std::vector<Wanted>& rows, long vocab,
            std::vector<Chosen>& chosen);

// Logprobs of given tokens; nothing where a row's logits are not numbers.
void score(const Kernels& kernels, Pool& pool, const float* logits, long vocab,
           const std::vector<Token>& targets, long num_top,
           std::vector<std::optional<Logprobs>>& scores);

// A double in [0, 1) with 53 random bits: Philox4x64-10, see src/toque/kernels/ref/rng.py.
double uniform(uint64_t seed, uint64_t choice, uint64_t position);

}  // namespace toque
