"""Gives an engine its recorded turns again and compares what it plans.

Owns: the place in the recording. Knows: turns. Does not know: the scheduler, how plans are made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from toque.errors import ToqueError
from toque.record.tape import Outcome, Turn, shape_of
from toque.types import FromEngine, Logprob, Sampled, StepPlan, StepResult, ToEngine


class Difference(ToqueError):
    """The engine did something else than it did then. The message says what, and where."""


class Runs(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...


class Replay:
    """All three openings of an engine: its port, its executor and (`clock`) its clock.

    With a `device` the steps are computed as well and its tokens compared; the engine goes on with
    the recorded ones either way, so that one difference is one and not the first of thousands.
    """

    def __init__(self, turns: Iterator[Turn], device: Runs | None = None) -> None:
        self.turns = self.steps = self.tokens = 0
        self.differing_tokens = 0
        self._turns = turns
        self._device = device
        self._turn = Turn()
        self._readings: deque[float] = deque()
        self._next = next(turns, None)

    @property
    def over(self) -> bool:
        return self._next is None

    def receive(self, wait_s: float) -> list[ToEngine]:
        assert self._next is not None
        self._turn = self._next
        self._next = next(self._turns, None)
        self._readings = deque(self._turn.clock)
        self.turns += 1
        return list(self._turn.messages)

    def clock(self) -> float:
        if not self._readings:
            raise Difference(f"{self._where()}: the clock is read more often than it was then")
        return self._readings.popleft()

    def run(self, plan: StepPlan) -> StepResult:
        shape, then = shape_of(plan), self._turn.plan
        if then is None:
            raise Difference(f"{self._where()}: there is a plan where there was none: {shape}")
        for name in ("step", "setups", "chunks"):
            now_part, then_part = getattr(shape, name), getattr(then, name)
            if now_part != then_part:
                raise Difference(
                    f"{self._where()}: the plan's {name} differ\n  then: {then_part}\n"
                    f"  now:  {now_part}"
                )
        self.steps += 1
        if self._device is not None:
            self._compare(self._device.run(plan))
        scored = {chunk.row: len(chunk.targets) for chunk in plan.chunks}
        played = tuple(_sampled(outcome, scored) for outcome in self._turn.outcomes)
        return StepResult(step=plan.step, sampled=played)

    def finish_turn(self) -> None:
        """After each step of the engine. Raises Difference when it did less than then."""
        if self._turn.plan is not None and self._turn.plan.step != self.steps:
            raise Difference(f"{self._where()}: there was a plan and there is none")
        if self._readings:
            raise Difference(f"{self._where()}: the clock is read less often than it was then")

    def _compare(self, result: StepResult) -> None:
        got = {sampled.row: sampled.token for sampled in result.sampled}
        for outcome in self._turn.outcomes:
            self.tokens += outcome.token >= 0
            self.differing_tokens += got.get(outcome.row, -1) != outcome.token

    def send(self, message: FromEngine) -> None: ...

    def close(self) -> None: ...

    def _where(self) -> str:
        return f"turn {self.turns}, step {self.steps + 1}"


def _sampled(outcome: Outcome, scored: dict[int, int]) -> Sampled:
    return Sampled(
        row=outcome.row,
        token=outcome.token,
        complete=outcome.complete,
        scores=tuple(Logprob(chosen=0.0) for _ in range(scored.get(outcome.row, 0))),
        error="it failed then" if outcome.failed else None,
    )
