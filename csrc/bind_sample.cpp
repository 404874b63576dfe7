#include "bind_sample.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

namespace toque {

using namespace nb::literals;

static nb::object to_python(const std::optional<Logprobs>& logprobs) {
  if (!logprobs) return nb::none();
  nb::list top;
  for (const auto& [token, logprob] : logprobs->top) top.append(nb::make_tuple(token, logprob));
  return nb::make_tuple(logprobs->chosen, logprobs->rank, nb::tuple(top));
}

nb::list to_python(const std::vector<Chosen>& chosen) {
  nb::list rows;
  for (const Chosen& row : chosen) {
    rows.append(nb::make_tuple(static_cast<int>(row.outcome), row.token, to_python(row.logprobs)));
  }
  return rows;
}

nb::list to_python(const std::vector<std::optional<Logprobs>>& scores) {
  nb::list rows;
  for (const std::optional<Logprobs>& row : scores) rows.append(to_python(row));
  return rows;
}

static Mask checked_mask(nb::handle mask) {
  if (mask.is_none()) return {};
  MaskWords words;
  if (!nb::try_cast<MaskWords>(mask, words, false)) throw nb::type_error("a mask is uint32 [words]");
  return {words.data(), size_of(words, 0)};
}

std::vector<Wanted> checked_rows(const Logits& logits, const nb::list& samplers,
                                 const std::vector<int64_t>& positions,
                                 const std::optional<nb::list>& masks) {
  const size_t count = logits.rows;
  require(samplers.size() == count && positions.size() == count &&
              (!masks || masks->size() == count),
          "one sampler, position and mask for each row of logits");
  require(count == 0 || logits.vocab > 0, "a row of logits must not be empty");
  std::vector<Wanted> rows;
  std::vector<RowSampler*> distinct;
  for (size_t i = 0; i < count; ++i) {
    RowSampler& sampler = nb::cast<RowSampler&>(samplers[i]);
    rows.push_back({&sampler, logits.data + i * logits.vocab, positions[i],
                    masks ? checked_mask((*masks)[i]) : Mask{}});
    distinct.push_back(&sampler);
  }
  std::sort(distinct.begin(), distinct.end());
  require(std::adjacent_find(distinct.begin(), distinct.end()) == distinct.end(),
          "a sampler belongs to one row");
  return rows;
}

std::vector<Token> checked_targets(const Rows& logits, const nb::list& targets) {
  require(targets.size() == logits.shape(0), "one target for each row of logits");
  std::vector<Token> tokens;
  for (nb::handle target : targets) {
    tokens.push_back(nb::cast<Token>(target));
    require_index(tokens.back(), size_of(logits, 1), "target");
  }
  return tokens;
}

static void make_sampler(RowSampler* self, double temperature, int64_t top_k, double top_p,
                         double min_p, uint64_t seed, uint64_t choice, float repetition_penalty,
                         float presence_penalty, float frequency_penalty,
                         std::vector<std::pair<Token, float>> logit_bias,
                         std::vector<Token> allowed, std::vector<Token> never,
                         std::vector<std::vector<Token>> spelled, std::vector<Token> end_ids,
                         int64_t num_prompt, int64_t min_tokens, std::optional<int64_t> logprobs,
                         std::vector<Token> history) {
  for (const std::vector<Token>& word : spelled) require(word.size() > 1, "a word of one token");
  require(num_prompt >= 0, "num_prompt must not be negative");
  new (self) RowSampler({temperature, top_k, top_p, min_p, seed, choice, repetition_penalty,
                         presence_penalty, frequency_penalty, std::move(logit_bias),
                         std::move(allowed), std::move(never), std::move(spelled),
                         std::move(end_ids), num_prompt, min_tokens, logprobs},
                        history);
}

void bind_sample(nb::module_& module) {
  nb::class_<RowSampler>(module, "RowSampler")
      .def("__init__", &make_sampler, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a,
           "min_p"_a, "seed"_a, "choice"_a, "repetition_penalty"_a, "presence_penalty"_a,
           "frequency_penalty"_a, "logit_bias"_a, "allowed"_a, "never"_a, "spelled"_a, "end_ids"_a,
           "num_prompt"_a, "min_tokens"_a, "logprobs"_a.none(), "history"_a);
  module.def("uniform", &uniform, "seed"_a, "choice"_a, "position"_a);
}

}  // namespace toque
