"""The cost model against devices whose times are known."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.scheduler.cost import FADE, TERMS, StepCost, Work, decode_work, work_of
from toque.types import Chunk, StepPlan

TRUE = (6.0, 1.4, 1e-4, 1e-3, 1.9)  # ms: constant, token, pair, token of context, output


def true_ms(work: Work, scale: float = 1.0) -> float:
    one, tokens, pairs, context, outputs = TRUE
    terms = tokens * work.tokens + pairs * work.pairs + context * work.context
    return scale * (one + terms + outputs * work.outputs)


def plan_of(rng: random.Random, prompt: bool) -> StepPlan:
    chunks = [
        Chunk(row=row, start=rng.randrange(1, 2000), num_tokens=1, sample=True)
        for row in range(rng.randrange(1, 16))
    ]
    if prompt:
        size, start = rng.randrange(2, 400), rng.randrange(0, 2000)
        chunks.append(Chunk(row=99, start=start, num_tokens=size, sample=rng.random() < 0.5))
    return StepPlan(step=1, chunks=tuple(chunks))


def error(cost: StepCost, rng: random.Random, prompt: bool, scale: float = 1.0) -> float:
    works = [work_of(plan_of(rng, prompt).chunks) for _ in range(100)]
    errors = [abs(cost.predicted_ms(w) / true_ms(w, scale) - 1) for w in works]
    return sorted(errors)[90]


def learn(cost: StepCost, rng: random.Random, steps: int, **how: float) -> None:
    noise, spikes = how.get("noise", 0.05), how.get("spikes", 0.0)
    for _ in range(steps):
        plan = plan_of(rng, rng.random() < how.get("prompts", 0.5))
        ms = true_ms(work_of(plan.chunks), how.get("scale", 1.0)) * rng.gauss(1.0, noise)
        cost.observe(plan, ms * (8.0 if rng.random() < spikes else 1.0))


def test_it_learns_a_device_from_noisy_steps() -> None:
    rng, cost = random.Random(1), StepCost(100.0)
    assert error(cost, rng, prompt=True) > 1.0, "the start was meant to be far off"
    learn(cost, rng, 300)
    assert error(cost, rng, prompt=True) < 0.05
    assert error(cost, rng, prompt=False) < 0.05


def test_a_step_that_something_else_held_up_does_not_count_much() -> None:
    """One in ten steps takes eight times as long."""
    rng, cost = random.Random(2), StepCost(500.0)
    learn(cost, rng, 600, spikes=0.1)
    assert error(cost, rng, prompt=True) < 0.15


def test_an_hour_of_decoding_does_not_make_it_forget_prompts() -> None:
    rng, cost = random.Random(3), StepCost(500.0)
    learn(cost, rng, 200)
    learn(cost, rng, 5000, prompts=0.0)
    assert error(cost, rng, prompt=True) < 0.10


def test_it_follows_a_machine_that_gets_slower() -> None:
    rng, cost = random.Random(4), StepCost(500.0)
    learn(cost, rng, 300)
    learn(cost, rng, 600, scale=2.0)
    assert error(cost, rng, prompt=True, scale=2.0) < 0.10


@given(st.integers(0, 2000), st.floats(1, 2000), st.integers(0, 60))
def test_the_longest_chunk_is_the_longest(start: int, limit_ms: float, streams: int) -> None:
    """One token more would be predicted to take longer than the limit."""
    rng, cost = random.Random(5), StepCost(500.0)
    learn(cost, rng, 80)
    work = decode_work([100] * streams)
    most = cost.most_tokens(work, start, limit_ms)

    def with_chunk(size: int) -> float:
        whole = decode_work([100] * streams)
        whole.add(start, size, 1)
        return cost.predicted_ms(whole)

    assert most == 0 or with_chunk(most) <= limit_ms * (1 + 1e-6)
    assert with_chunk(most + 1) > limit_ms * (1 - 1e-6)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.booleans()), max_size=60))
def test_whatever_it_is_told_no_term_is_below_zero(told: list[tuple[float, bool]]) -> None:
    rng, cost = random.Random(6), StepCost(500.0)
    for ms, prompt in told:
        cost.observe(plan_of(rng, prompt), ms)
        assert all(0 <= term < 1e9 for term in cost._ms)
        assert 0 <= cost.error <= 1


def test_work_that_is_taken_back_leaves_nothing() -> None:
    work = Work()
    work.add(10, 5, 1)
    work.add(10, 5, 1, sign=-1)
    assert (work.tokens, work.pairs, work.context, work.outputs) == (0, 0, 0, 0)
    assert pytest.approx(StepCost(1000.0).prompt_ms(0, 100)) == 100.0


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.1, 1), st.floats(0.5, 500)), max_size=40),
    st.integers(1, 9),
)
def test_steps_that_are_folded_in_together_count_as_one_by_one(
    steps: list[tuple[bool, float, float]], portion: int
) -> None:
    cost = StepCost(300.0)
    gram, moment = np.zeros((2, TERMS, TERMS)), np.zeros((2, TERMS))
    for number, (prompt, weight, ms) in enumerate(steps):
        sizes = (number + 1, 7 * number, 3, 2)
        cost._unread[prompt].append((weight, ms, *sizes))
        if number % portion == 0:
            cost._fold()
        x = np.array((1, *sizes)) / ms
        gram[int(prompt)] = FADE * gram[int(prompt)] + weight * np.outer(x, x)
        moment[int(prompt)] = FADE * moment[int(prompt)] + weight * x
    cost._fold()
    np.testing.assert_allclose(cost._gram, gram, rtol=1e-9)
    np.testing.assert_allclose(cost._moment, moment, rtol=1e-9)
