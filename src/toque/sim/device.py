"""A clock that is set, and a device that takes as long as it is told and computes nothing.

Owns: the time; per row, the seed. Knows: plans. Does not know: models, the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable

from toque.scheduler.cost import Work, work_of
from toque.types import Chunk, Logprob, Sampled, StepPlan, StepResult

FIRST_TOKEN = 8  # lower ids are for end tokens


class Clock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Device:
    """An engine.Executor. A row's tokens depend on its seed and their positions only, so they are
    the same however the request is cut, and no end token is among them."""

    def __init__(self, clock: Clock, step_ms: Callable[[Work], float], vocab_size: int) -> None:
        self._clock = clock
        self._step_ms = step_ms
        self._vocab_size = vocab_size
        self._seeds: dict[int, int] = {}
        self.busy_s = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        step_s = self._step_ms(work_of(plan.chunks)) / 1e3
        self._clock.now_s += step_s
        self.busy_s += step_s
        for setup in plan.setups:
            self._seeds[setup.row] = setup.sampling.seed or 0
        sampled = tuple(self._sample(chunk) for chunk in plan.chunks if chunk.sample)
        scored = tuple(_scored(chunk) for chunk in plan.chunks if chunk.targets)
        return StepResult(step=plan.step, sampled=sampled + scored)

    def _sample(self, chunk: Chunk) -> Sampled:
        token = token_at(self._seeds[chunk.row], chunk.start + chunk.num_tokens, self._vocab_size)
        return Sampled(row=chunk.row, token=token)


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """What the device samples there: a workload may ask for it to continue a conversation."""
    return FIRST_TOKEN + (seed * 2654435761 + position * 40503) % (vocab_size - FIRST_TOKEN)


def _scored(chunk: Chunk) -> Sampled:
    return Sampled(row=chunk.row, scores=tuple(Logprob(chosen=-1.0) for _ in chunk.targets))
