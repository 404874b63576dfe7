"""Records an engine from its three openings: the port, the executor and the clock.

Owns: the turn that is being written. Knows: the order in which the loop uses its collaborators.
Does not know: the scheduler, the engine's code. The engine does not know that it is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from toque.ipc import EnginePort
from toque.record.disguise import Disguise
from toque.record.tape import Outcome, Shape, Tape, Turn, shape_of
from toque.types import (
    Finished,
    FromEngine,
    Refused,
    Request,
    Sampled,
    Shutdown,
    StepPlan,
    StepReport,
    StepResult,
    ToEngine,
    Tokens,
)


class Runs(Protocol):
    def run(self, plan: StepPlan) -> StepResult: ...


class Recorder:
    """One turn after the other: `begin` ends the last one. Turns in which nothing happened are left
    out, whole, so the clock's readings stay in step."""

    def __init__(self, tape: Tape, disguise: Disguise | None) -> None:
        """Without `disguise` the real tokens are recorded."""
        self._tape = tape
        self._disguise = disguise
        self._messages: tuple[ToEngine, ...] = ()
        self._clock: list[float] = []
        self._plan: Shape | None = None
        self._outcomes: list[Outcome] = []

    def begin(self, messages: list[ToEngine]) -> None:
        self.end()
        if self._tape.ended:
            return
        # How an engine ends is no turn: nothing is planned after it.
        kept = [message for message in messages if not isinstance(message, Shutdown)]
        self._messages = tuple(self._recorded(message) for message in kept)

    def end(self) -> None:
        if self._messages or self._plan is not None:
            self._tape.write(
                Turn(
                    messages=self._messages,
                    clock=tuple(self._clock),
                    plan=self._plan,
                    outcomes=tuple(self._outcomes),
                )
            )
        self._messages, self._plan = (), None
        self._clock.clear()
        self._outcomes.clear()

    def read(self, now_s: float) -> None:
        self._clock.append(now_s)

    def ran(self, plan: StepPlan, result: StepResult) -> None:
        self._plan = shape_of(plan)
        self._outcomes = [_outcome(sampled) for sampled in result.sampled]

    def reported(self, report: StepReport) -> None:
        """A step's events. Tokens come in the order of its chunks: so it is known whose they
        are."""
        if self._disguise is None:
            return
        by_row = {outcome.row: place for place, outcome in enumerate(self._outcomes)}
        chunks = self._plan.chunks if self._plan is not None else ()
        rows = (
            chunk[0] for chunk in chunks if chunk[4] and not self._outcomes[by_row[chunk[0]]].failed
        )
        for event in report.events:
            if isinstance(event, Tokens):
                place = by_row[next(rows)]
                hidden = self._disguise.output(event.id, event.ids[0])
                self._outcomes[place] = structs.replace(self._outcomes[place], token=hidden)
            elif isinstance(event, Finished | Refused):
                self._disguise.forget(event.id)

    def _recorded(self, message: ToEngine) -> ToEngine:
        if self._disguise is None or not isinstance(message, Request):
            return message
        return self._disguise.request(message)


def _outcome(sampled: Sampled) -> Outcome:
    return Outcome(sampled.row, sampled.token, sampled.complete, sampled.error is not None)


class RecordedPort:
    """An EnginePort around another."""

    def __init__(self, port: EnginePort, recorder: Recorder, tape: Tape) -> None:
        self._port = port
        self._recorder = recorder
        self._tape = tape

    def receive(self, wait_s: float) -> list[ToEngine]:
        messages = self._port.receive(wait_s)
        self._recorder.begin(messages)
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):  # the last thing that a turn does
            self._recorder.reported(message)
            self._recorder.end()
        self._port.send(message)

    def close(self) -> None:
        self._recorder.end()
        self._tape.close()
        self._port.close()


class RecordedExecutor:
    """An engine.Executor around another."""

    def __init__(self, executor: Runs, recorder: Recorder) -> None:
        self._executor = executor
        self._recorder = recorder

    def run(self, plan: StepPlan) -> StepResult:
        result = self._executor.run(plan)
        self._recorder.ran(plan, result)
        return result


def recorded_clock(
    recorder: Recorder, clock: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    def read() -> float:
        now_s = clock()
        recorder.read(now_s)
        return now_s

    return read
