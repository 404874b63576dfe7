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

// What sample() reads, checked: one sampler, position and mask (or None) for each row of logits.
std::vector<Wanted> checked_rows(const Rows& logits, const nb::list& samplers,
                                 const nb::list& positions, const nb::list& masks);
std::vector<Token> checked_targets(const Rows& logits, const nb::list& targets);

void bind_sample(nb::module_& module);

}  // namespace toque
