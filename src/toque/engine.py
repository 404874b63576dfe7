"""The engine's loop: receive, plan, run, commit, emit. Depth 1: one step at a time.

Owns: the loop, the clock, step times. Knows: that a plan is made, run and booked.
Does not know: how any of the three is done, and no feature by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from toque.ipc import EnginePort
from toque.scheduler.cost import StepCost
from toque.scheduler.scheduler import Scheduler
from toque.types import (
    Abort,
    Event,
    Explain,
    FinishReason,
    Heartbeat,
    Look,
    Request,
    Shutdown,
    StepPlan,
    StepReport,
    StepResult,
    StepTimes,
    ToEngine,
)

IDLE_WAIT_S = 0.5  # how long an idle engine sleeps before it looks whether its parent is alive
LONG_STEP_MS = 250.0  # a step predicted to take longer announces itself, so that health is patient


class Executor(Protocol):
    """Whatever computes a plan: a worker on this machine, a simulator, a fake in tests."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan. A row that fails says so in the result; raises only if all is lost."""


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        port: EnginePort,
        cost: StepCost,
        clock: Callable[[], float] = time.monotonic,
        at_rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_rest` is called when there is nothing left to do, and at the end."""
        self.scheduler = scheduler
        self._executor = executor
        self._port = port
        self._cost = cost
        self._clock = clock
        self._at_rest = at_rest
        self._stopping = False
        self._told_pages = 0

    def run(self, keep_going: Callable[[], bool] = lambda: True) -> None:
        """Step until Shutdown arrives or `keep_going`, asked twice a second or more, says no."""
        checked, moved = True, False
        while keep_going() and not self._stopping:
            moved = self.step(0.0 if moved else IDLE_WAIT_S)
            if moved:
                checked = False
            elif not checked:
                # At rest the books are proved. Pages that do not add up could become a wrong
                # answer, and an engine that is known to be wrong must not go on.
                self.scheduler.check()
                checked = True
                self._at_rest()
        self._at_rest()
        events = self.scheduler.abort_all(FinishReason.ABORT, self._clock())
        self._emit(events)

    def step(self, wait_s: float = 0.0) -> bool:
        """One turn of the loop; waits up to `wait_s` for a message first. False: nothing to do."""
        messages = self._port.receive(wait_s)
        events = self._apply(messages)
        t0 = self._clock()
        events += self.scheduler.turn_away(t0)
        plan = self.scheduler.plan(t0)
        if plan is None:
            self._emit(events)
            return bool(events)  # who only asked what is here has changed nothing
        predicted_ms = self._cost.plan_ms(plan)
        if predicted_ms > LONG_STEP_MS:
            self._port.send(Heartbeat(predicted_ms=predicted_ms))
        t1 = self._clock()
        result = self._executor.run(plan)
        t2 = self._clock()
        events += self.scheduler.commit(plan, result, t2)
        self._cost.observe(plan, (t2 - t1) * 1e3)
        t3 = self._clock()
        times = StepTimes(
            plan_ms=(t1 - t0) * 1e3, run_ms=(t2 - t1) * 1e3, commit_ms=(t3 - t2) * 1e3
        )
        self._emit(events, plan, times, predicted_ms)
        return True

    def _apply(self, messages: list[ToEngine]) -> list[Event]:
        events: list[Event | None] = []
        for message in messages:
            if isinstance(message, Request):
                events.append(self.scheduler.add(message, self._clock()))
            elif isinstance(message, Abort):
                reason, kept_tokens = message.reason, message.kept_tokens
                ended = self.scheduler.abort(message.id, reason, self._clock(), kept_tokens)
                events.append(ended)
            elif isinstance(message, Explain):
                self._port.send(self.scheduler.timeline(message.id))
            elif isinstance(message, Look):
                self._port.send(self.scheduler.look(self._clock()))
            elif isinstance(message, Shutdown):
                self._stopping = True
        return [event for event in events if event is not None]

    def _emit(
        self,
        events: list[Event],
        plan: StepPlan | None = None,
        times: StepTimes | None = None,
        predicted_ms: float = 0.0,
    ) -> None:
        load = self.scheduler.load(self._clock())
        if plan is None and not events and load.held_pages == self._told_pages:
            return
        self._told_pages = load.held_pages  # they change without a step, too: guests of the cache
        self._port.send(
            StepReport(
                events=tuple(events),
                load=load,
                counters=self.scheduler.counters(),
                times=times,
                batch_tokens=plan.num_tokens if plan else 0,
                batch_sequences=len(plan.chunks) if plan else 0,
                predicted_ms=predicted_ms,
                page_lives=self.scheduler.page_lives(),
            )
        )
