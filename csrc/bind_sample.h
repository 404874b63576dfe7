// Sampling as Python calls it.
#pragma once

#include <functional>

#include "check.h"
#include "sample.h"

namespace toque {

using MaskWords = Array<const uint32_t, 1>;

// (outcome, token, logprobs or None) for each row; logprobs are (chosen, rank, ((token, logprob), ..)).
nb::list to_python(const std::vector<Chosen>& chosen);
// Logprobs or None for each row.
nb::list to_python(const std::vector<std::optional<Logprobs>>& scores);

// What sample() reads, checked: one sampler and position for each row of logits [rows, vocab], and
// one mask (or None), or no list of masks.
struct Logits {
  const float* data;
  long rows;
  long vocab;
};
std::vector<Wanted> checked_rows(const Logits& logits, const nb::list& samplers,
                                 const std::vector<int64_t>& positions,
                                 const std::optional<nb::list>& masks);
std::vector<Token> checked_targets(const Rows& logits, const nb::list& targets);

void bind_sample(nb::module_& module);

}  // namespace toque
