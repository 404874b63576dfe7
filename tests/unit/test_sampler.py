"""Sampling against transformers' logits processors, numpy's Philox and plain enumeration."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from toque.kernels.ref.rng import philox, uniform
from toque.kernels.ref.sampler import RowSampler, draw, logprob_of, top_ids
from toque.types import RowSetup, SamplingParams

VOCAB = 50


def sampler(params: SamplingParams, history: tuple[int, ...] = (), prompt: int = 0) -> RowSampler:
    return RowSampler(
        RowSetup(
            row=0,
            sampling=params,
            choice=0,
            num_prompt=prompt,
            pages=(),
            end_token_ids=(7,),
            history=history,
        )
    )


def logits_of(seed: int, size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3, size=size).astype(np.float32)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 2**40))
def test_philox_is_the_published_one(seed: int, choice: int, counter: int) -> None:
    """numpy's Philox4x64-10 steps its counter before the first block."""
    generator = np.random.Philox(
        key=np.array([seed, choice], dtype=np.uint64),
        counter=np.array([counter - 1, 0, 0, 0], dtype=np.uint64),
    )
    assert philox((seed, choice), counter) == int(generator.random_raw())


@settings(deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(0.1, 2.0),
    st.integers(0, VOCAB + 5),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.5),
)
def test_the_support_and_the_probabilities_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """The distribution that `draw` inverts, read off at many u, equals the warpers' softmax."""
    logits = logits_of(seed)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
    scores = TemperatureLogitsWarper(temperature)(
        None, torch.tensor(logits, dtype=torch.float64)[None]
    )
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    expected = torch.softmax(scores[0], -1).numpy()
    cumulative = np.cumsum(expected)
    for u in (np.arange(200) + 0.5) / 200:
        token = draw(logits, params, float(u))
        assert expected[token] > 0, "a token outside the support"
        low = cumulative[token] - expected[token]
        assert low - 1e-9 <= u <= cumulative[token] + 1e-9


@given(st.integers(0, 100), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
def test_repetition_penalty_is_that_of_transformers(seed: int, history: list[int]) -> None:
    logits = logits_of(seed)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.7, seed=0)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([history]), torch.tensor(logits)[None])[0].numpy()
    adjusted = sampler(params, tuple(history), len(history))._adjust(logits, len(history))
    np.testing.assert_allclose(adjusted, expected, rtol=1e-6)


def test_presence_and_frequency_follow_the_output_only() -> None:
    """OpenAI's formula: minus count * frequency, minus presence where count > 0."""
    logits = np.zeros(VOCAB, dtype=np.float32)
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, seed=0)
    adjusted = sampler(params, (1, 2, 3, 3, 3, 4), prompt=2)._adjust(logits, 6)
    assert adjusted[3] == pytest.approx(-0.5 - 3 * 0.25)
    assert adjusted[4] == pytest.approx(-0.5 - 0.25)
    assert adjusted[1] == adjusted[2] == 0, "prompt tokens are not penalized"


def test_penalties_remember_what_was_sampled_here() -> None:
    """The row's own tokens count from the next step on, as if they had come as history."""
    logits = logits_of(3)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, seed=0)
    row, tokens = sampler(params, (1,), prompt=1), [1]
    for _ in range(12):
        tokens.append(row.sample(logits, len(tokens)).token)
    fresh = sampler(params, tuple(tokens), prompt=1)
    np.testing.assert_array_equal(fresh._adjust(logits, 99), row._adjust(logits, 99))
    assert len(set(tokens[1:])) > 3, "the penalty has made it change its mind"


def test_end_tokens_are_banned_until_min_tokens() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[7] = 9  # the end token is by far the best
    row = sampler(SamplingParams(temperature=0.0, min_tokens=3, seed=0), prompt=2)
    assert [row.sample(logits, position).token == 7 for position in (2, 3, 4, 5)] == [
        False,
        False,
        False,
        True,
    ]


def test_ties_go_to_the_lower_id() -> None:
    logits = np.array([1, 3, 3, 0, 3], dtype=np.float32)
    assert sampler(SamplingParams(temperature=0.0, seed=0)).sample(logits, 0).token == 1
    assert top_ids(logits, 2).tolist() == [1, 2]
    assert top_ids(logits, 4).tolist() == [1, 2, 4, 0]


def test_logit_bias_of_100_and_minus_100_decides() -> None:
    logits = logits_of(1)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0.0, logit_bias={best: -100.0, 11: 100.0}, seed=0)
    assert sampler(params).sample(logits, 0).token == 11


def test_logprobs_are_torchs_log_softmax_of_the_raw_logits() -> None:
    logits = logits_of(5)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).numpy()
    result = logprob_of(logits, 4, 5)
    assert result.chosen == pytest.approx(expected[4], abs=1e-9)
    assert [token for token, _ in result.top] == np.argsort(-expected, kind="stable")[:5].tolist()
    assert [p for _, p in result.top] == pytest.approx(sorted(expected, reverse=True)[:5])


def test_nan_and_infinity_are_the_rows_own_failure() -> None:
    for poison in (np.nan, np.inf):
        logits = logits_of(1)
        logits[3] = poison
        assert sampler(SamplingParams(seed=0)).sample(logits, 0).error is not None


def test_the_same_seed_and_position_give_the_same_number_and_others_do_not() -> None:
    numbers = {
        uniform(seed, choice, p) for seed in range(4) for choice in range(4) for p in range(64)
    }
    assert len(numbers) == 4 * 4 * 64
    assert all(0 <= u < 1 for u in numbers)
    assert abs(np.mean(list(numbers)) - 0.5) < 0.03


# ------------------------------------------------------------------------------------- bans


@given(st.integers(0, 1000), st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
def test_only_allowed_tokens_are_chosen_and_the_best_of_them(seed: int, allowed: set[int]) -> None:
    logits = logits_of(seed)
    greedy = sampler(SamplingParams(temperature=0.0, seed=0, allowed_token_ids=tuple(allowed)))
    token = greedy.sample(logits, 1).token
    assert token == max(sorted(allowed), key=lambda i: logits[i])
    params = SamplingParams(temperature=2.0, seed=seed, allowed_token_ids=tuple(allowed))
    drawn = sampler(params)
    assert all(drawn.sample(logits, place).token in allowed for place in range(20))


@given(st.integers(0, 1000), st.sets(st.integers(0, VOCAB - 1), min_size=1), st.integers(0, 3))
def test_a_mask_allows_what_its_bits_say(seed: int, allowed: set[int], words_more: int) -> None:
    """The bits are set one by one here, by the contract: bit i % 32 of word i // 32."""
    mask = np.zeros(max(allowed) // 32 + 1 + words_more, dtype=np.uint32)  # any length will do
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << token % 32)
    logits = logits_of(seed)
    greedy = sampler(SamplingParams(temperature=0.0, seed=0))
    assert greedy.sample(logits, 1, mask).token == max(sorted(allowed), key=lambda i: logits[i])
    drawn = sampler(SamplingParams(temperature=3.0, seed=seed))
    assert all(drawn.sample(logits, place, mask).token in allowed for place in range(20))
    raw = greedy.sample(logits, 1).token
    assert raw == int(logits.argmax()), "without a mask all are allowed"


def test_a_mask_without_bits_fails_its_row() -> None:
    row = sampler(SamplingParams(temperature=0.0, seed=0))
    assert "forbids" in (row.sample(logits_of(1), 0, np.zeros(2, dtype=np.uint32)).error or "")


@settings(max_examples=60)
@given(
    st.integers(0, 1000),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_the_output_never_contains_a_bad_word(seed: int, words: list[list[int]]) -> None:
    """Over four tokens, of which the prompt's do not count; checked on the finished text."""
    spelled = tuple(tuple(word) for word in words)
    params = SamplingParams(temperature=1.0, seed=seed, bad_words=spelled)
    row = sampler(params, history=(0, 1, 2), prompt=3)
    logits = np.full(VOCAB, -100, dtype=np.float32)
    logits[:4] = 0
    out: list[int] = []
    for place in range(40):
        sampled = row.sample(logits, 3 + place)
        assert sampled.error is None
        out.append(sampled.token)
    text = ",".join(map(str, out)) + ","
    for word in spelled:
        assert "," + ",".join(map(str, word)) + "," not in "," + text


def test_a_bad_word_knows_the_output_before_a_preemption() -> None:
    params = SamplingParams(temperature=0.0, seed=0, bad_words=((5, 6),))
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[6] = 9
    assert sampler(params, history=(1, 5), prompt=1).sample(logits, 2).token != 6
    assert sampler(params, history=(1, 5), prompt=2).sample(logits, 2).token == 6  # the prompt's


def test_a_request_that_forbids_everything_fails_alone() -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, seed=0, allowed_token_ids=(7,), min_tokens=1
        )
        assert "forbids" in (sampler(params).sample(logits_of(1), 0).error or "")


@given(st.integers(0, 1000), st.integers(0, VOCAB - 1))
def test_rank_counts_the_better_ones(seed: int, token: int) -> None:
    logits = np.round(logits_of(seed))  # with ties
    assert logprob_of(logits, token, 0).rank == 1 + sum(x > logits[token] for x in logits)
