"""Drive an engine with arrivals in virtual time and keep the books of what came back.

Owns: the events still to happen, the open requests. Knows: messages. Does not know: the scheduler.

The engine that runs here is `EngineCore` with its scheduler, cache and cost model, unchanged: what
is learned here about an order or a size holds for the engine that serves, as far as the device's
times do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from toque.ipc import PORTION
from toque.sim.device import Clock
from toque.slo import attained
from toque.types import (
    Finished,
    FinishReason,
    FromEngine,
    Refused,
    Request,
    StepReport,
    ToEngine,
    Tokens,
)

Timed = tuple[float, ToEngine]  # when it is sent, seconds


@dataclass(slots=True)
class Served:
    """One request and what became of it. Times are seconds of the virtual clock."""

    request: Request
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    finished: Finished | None = None
    refused: Refused | None = None

    @property
    def first_after_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.request.arrived_s

    @property
    def attained(self) -> bool:
        """Whether it ended by itself, as its class says; a request without a class, if it ended."""
        done = self.finished
        if done is None or done.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        slo, arrived_s = self.request.slo, self.request.arrived_s
        whole_s = None if self.last_s is None else self.last_s - arrived_s
        return slo is None or attained(slo, self.first_after_s, self.gaps_s, whole_s)


class VirtualPort:
    """The engine's end of a channel whose other end is a list of things to happen."""

    def __init__(
        self,
        clock: Clock,
        arrivals: Iterator[Timed],
        on_end: Callable[[Served], None] = lambda served: None,
    ) -> None:
        """`arrivals` in order of time. `on_end` may call `send_at` for what follows."""
        self.open: dict[str, Served] = {}
        self.report = StepReport()
        self.ended = 0
        self._clock = clock
        self._arrivals = arrivals
        self._on_end = on_end
        self._later: list[tuple[float, int, ToEngine]] = []
        self._serial = 0
        self._next = next(arrivals, None)

    @property
    def over(self) -> bool:
        """Nothing is to come any more."""
        return self._next is None and not self._later

    def send_at(self, at_s: float, message: ToEngine) -> None:
        self._serial += 1
        heappush(self._later, (at_s, self._serial, message))

    def receive(self, wait_s: float) -> list[ToEngine]:
        """What is due. An engine that would wait finds the clock at the next thing to happen."""
        if wait_s > 0 and not self.over:
            self._clock.now_s = max(self._clock.now_s, self._next_s())
        messages: list[ToEngine] = []
        while len(messages) < PORTION and not self.over and self._next_s() <= self._clock.now_s:
            messages.append(self._pop())
        return messages

    def _next_s(self) -> float:
        times = [self._later[0][0]] if self._later else []
        return min([*times, self._next[0]] if self._next is not None else times)

    def _pop(self) -> ToEngine:
        if self._next is None or (self._later and self._later[0][0] <= self._next[0]):
            return self._opened(heappop(self._later)[2])
        message = self._next[1]
        self._next = next(self._arrivals, None)
        return self._opened(message)

    def _opened(self, message: ToEngine) -> ToEngine:
        if isinstance(message, Request):
            assert message.id not in self.open, "two requests have one id"
            self.open[message.id] = Served(message)
        return message

    def send(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):
            self.report = message
            for event in message.events:
                self._book(self.open[event.id], event)

    def _book(self, served: Served, event: object) -> None:
        now_s = self._clock.now_s
        if isinstance(event, Tokens):
            if served.last_s is None:
                served.first_s = now_s
            else:
                served.gaps_s.append(now_s - served.last_s)
            served.last_s = now_s
            served.tokens += len(event.ids)
        elif isinstance(event, Finished):
            self._end(served, finished=event)
        elif isinstance(event, Refused):
            self._end(served, refused=event)

    def _end(
        self, served: Served, finished: Finished | None = None, refused: Refused | None = None
    ) -> None:
        served.finished, served.refused = finished, refused
        del self.open[served.request.id]
        self.ended += 1
        self._on_end(served)

    def close(self) -> None: ...
