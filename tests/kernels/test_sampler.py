"""The compiled sampler against its readable twin: the same tokens, the same logprobs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.errors import NOT_NUMBERS
from toque.kernels.api import NOTHING_LEFT, Floats, Mask, Sampler
from toque.kernels.cpu import CpuOps, _native
from toque.kernels.ref import rng as ref_rng
from toque.kernels.ref.sampler import RefSampler
from toque.types import RowSetup, Sampled, SamplingParams

OPS = CpuOps(2)
Rng = np.random.Generator


def drawn_logits(rng: Rng, vocab: int) -> Floats:
    """[vocab]: smooth, with ties, all equal, steep, or nearly all forbidden; in any of them some
    minus infinities, but never all."""
    kind = rng.integers(5)
    x = rng.normal(scale=(3, 2, 0, 40, 1)[kind], size=vocab).astype(np.float32)
    if kind == 1:
        x = np.round(x)
    share = 0.95 if kind == 4 else rng.choice([0, 0, 0.3])
    x[rng.random(vocab) < share] = -np.inf
    x[rng.integers(vocab)] = 1.0
    return x


def some_tokens(rng: Rng, vocab: int, most: int) -> tuple[int, ...]:
    return tuple(int(t) for t in rng.integers(0, vocab, rng.integers(1, most + 1)))


def drawn_params(rng: Rng, vocab: int) -> SamplingParams:
    """Each feature is off more often than on."""

    def rarely(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.25 else otherwise

    return SamplingParams(
        temperature=float(rng.choice([0, 1e-310, 1e-9, 0.3, 1, 1, 1.7, 1e6])),
        top_k=int(rng.choice([0, 0, 1, 2, 5, 300, 10**6])),
        top_p=float(rng.choice([1, 1, 0.999999, 0.9, 0.5, 1e-9, 0])),
        min_p=float(rng.choice([0, 0, 1e-4, 0.3, 1])),
        seed=int(rng.integers(0, 2**63)),
        repetition_penalty=rarely(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=rarely(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=rarely(float(rng.uniform(-2, 2)), 0.0),
        logit_bias=rarely({t: float(rng.uniform(-9, 9)) for t in some_tokens(rng, vocab, 4)}, {}),
        allowed_token_ids=rarely(some_tokens(rng, vocab, 9), ()),
        bad_words=rarely(
            tuple(some_tokens(rng, min(vocab, 9), 3) for _ in range(rng.integers(1, 5))), ()
        ),
        min_tokens=int(rng.choice([0, 0, 3])),
        logprobs=[None, 0, 1, 7, 5000][rng.integers(5)],
    )


def drawn_mask(rng: Rng, vocab: int) -> Mask | None:
    if rng.random() < 0.7:
        return None
    words = rng.integers(0, 2**32, -(-vocab // 32), dtype=np.uint32)
    words &= rng.integers(0, 2**32, len(words), dtype=np.uint32)
    return words[: max(1, len(words) - int(rng.integers(2)))].copy()


@dataclass
class Step:
    logits: Floats  # [rows, vocab]
    masks: list[Mask | None]
    positions: list[int]


def drawn_run(rng: Rng) -> tuple[list[RowSetup], list[Step]]:
    """Rows that live through a few steps, so that penalties have something to remember."""
    vocab = int(rng.choice([1, 2, 9, 31, 255, 256, 257, 600, 3000]))
    setups = []
    for row in range(int(rng.integers(1, 5))):
        history = some_tokens(rng, min(vocab, 9), 6)
        setups.append(
            RowSetup(
                row=row,
                sampling=drawn_params(rng, vocab),
                choice=int(rng.integers(3)),
                num_prompt=int(rng.integers(1, len(history) + 1)),
                pages=(),
                end_token_ids=some_tokens(rng, vocab, 2) if rng.random() < 0.5 else (),
                history=history,
            )
        )
    steps = [
        Step(
            np.stack([drawn_logits(rng, vocab) for _ in setups]),
            [drawn_mask(rng, vocab) for _ in setups],
            [len(setup.history) + number for setup in setups],
        )
        for number in range(3)
    ]
    return setups, steps


def run(sampler: Sampler, setups: list[RowSetup], steps: list[Step]) -> list[list[Sampled]]:
    rows = [setup.row for setup in setups]
    for setup in setups:
        sampler.set_up(setup)
    return [sampler.sample(step.logits, rows, step.positions, step.masks) for step in steps]


def assert_same(got: Sampled, expected: Sampled) -> None:
    assert (got.row, got.token, got.error) == (expected.row, expected.token, expected.error)
    if expected.logprob is None:
        assert got.logprob is None
        return
    assert got.logprob is not None and got.logprob.rank == expected.logprob.rank
    assert got.logprob.chosen == pytest.approx(expected.logprob.chosen, abs=1e-9)
    assert [t for t, _ in got.logprob.top] == [t for t, _ in expected.logprob.top]
    for (_, one), (_, other) in zip(got.logprob.top, expected.logprob.top, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_tokens_and_logprobs_are_those_of_the_twin(seed: int) -> None:
    setups, steps = drawn_run(np.random.default_rng(seed))
    expected = run(RefSampler(len(setups)), setups, steps)
    for got, wanted in zip(run(OPS.sampler(len(setups)), setups, steps), expected, strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_row_does_not_depend_on_the_others(seed: int) -> None:
    setups, steps = drawn_run(np.random.default_rng(seed))
    together = run(OPS.sampler(len(setups)), setups, steps)
    for place, setup in enumerate(setups):
        own = [
            Step(step.logits[place : place + 1], [step.masks[place]], [step.positions[place]])
            for step in steps
        ]
        alone = run(OPS.sampler(len(setups)), [setup], own)
        assert [step[0] for step in alone] == [step[place] for step in together]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_random_numbers_are_those_of_the_twin(seed: int, choice: int, position: int) -> None:
    assert _native.uniform(seed, choice, position) == ref_rng.uniform(seed, choice, position)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 5, 700]))
def test_scores_are_those_of_the_twin(seed: int, num_top: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([1, 9, 256, 700]))
    logits = np.stack([drawn_logits(rng, vocab) for _ in range(5)])
    logits[3, vocab // 2] = rng.choice([np.nan, np.inf, 0])
    targets = [int(t) for t in rng.integers(0, vocab, 5)]
    got = OPS.sampler(1).score(logits, targets, num_top)
    expected = RefSampler(1).score(logits, targets, num_top)
    for one, other in zip(got, expected, strict=True):
        assert_same(Sampled(row=0, logprob=one), Sampled(row=0, logprob=other))


def setup_of(row: int, params: SamplingParams) -> RowSetup:
    return RowSetup(
        row=row, sampling=params, choice=0, num_prompt=1, pages=(), end_token_ids=(), history=(1,)
    )


def sampler_of(*params: SamplingParams) -> Sampler:
    sampler = OPS.sampler(len(params))
    for row, each in enumerate(params):
        sampler.set_up(setup_of(row, each))
    return sampler


GREEDY = SamplingParams(temperature=0.0, seed=0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_numbers_are_their_rows_own_failure(poison: float) -> None:
    logits = np.zeros((3, 300), dtype=np.float32)
    logits[1, 299 if poison > 0 or math.isnan(poison) else slice(None)] = poison
    got = sampler_of(GREEDY, GREEDY, GREEDY).sample(logits, [0, 1, 2], [1, 1, 1], [None] * 3)
    assert [entry.error for entry in got] == [None, NOT_NUMBERS, None]
    assert [entry.token for entry in got] == [0, -1, 0]


def test_a_mask_without_bits_and_a_token_beyond_the_vocabulary_are_their_rows_own_failure() -> None:
    biased = SamplingParams(temperature=0.0, seed=0, logit_bias={300: 1.0})
    logits = np.zeros((3, 300), dtype=np.float32)
    masks = [np.zeros(10, dtype=np.uint32), None, None]
    got = sampler_of(GREEDY, biased, GREEDY).sample(logits, [0, 1, 2], [1, 1, 1], masks)
    assert [entry.error for entry in got] == [NOTHING_LEFT, "sampling failed", None]


def test_parameters_without_meaning_are_a_failure_not_a_crash() -> None:
    """The engine refuses such requests; the extension must survive them all the same."""
    logits = np.zeros((1, 300), dtype=np.float32)
    for params in (
        SamplingParams(min_p=2.0, seed=0),
        SamplingParams(top_k=-5, top_p=-1.0, seed=0),
        SamplingParams(temperature=math.nan, top_p=math.nan, min_p=math.nan, seed=0),
        SamplingParams(temperature=-1.0, top_p=0.5, seed=0, logprobs=-3),
    ):
        (got,) = sampler_of(params).sample(logits, [0], [1], [None])
        assert got.error is not None or 0 <= got.token < 300


def test_ties_go_to_the_lower_id() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    logits[0, [400, 300, 900]] = 2.0
    top = SamplingParams(temperature=0.0, seed=0, logprobs=4)
    (got,) = sampler_of(top).sample(logits, [0], [1], [None])
    assert got.token == 300
    assert got.logprob is not None
    assert [token for token, _ in got.logprob.top] == [300, 400, 900, 0]


def test_wrong_arguments_are_exceptions() -> None:
    logits = np.zeros((2, 40), dtype=np.float32)
    sampler = sampler_of(GREEDY, GREEDY)
    with pytest.raises(ValueError, match="belongs to one row"):
        sampler.sample(logits, [0, 0], [1, 1], [None, None])
    with pytest.raises(TypeError, match="mask"):
        sampler.sample(logits, [0, 1], [1, 1], [None, np.zeros(2, dtype=np.int64)])
    with pytest.raises(ValueError, match="for each row"):
        sampler.sample(logits, [0], [1], [None])
    with pytest.raises(TypeError):
        sampler.sample(logits.astype(np.float64), [0, 1], [1, 1], [None, None])
    for target in (-1, 40):
        with pytest.raises(IndexError, match="target"):
            sampler.score(logits, [0, target], 0)


def test_every_probability_is_met() -> None:
    """10,000 positions of one row: the frequencies are those of the softmax."""
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]], dtype=np.float32))
    sampler = sampler_of(SamplingParams(temperature=1.0, seed=5))
    tokens = [sampler.sample(logits, [0], [p], [None])[0].token for p in range(10_000)]
    shares = np.bincount(tokens, minlength=5) / len(tokens)
    np.testing.assert_allclose(shares, np.exp(logits[0]), atol=0.02)
