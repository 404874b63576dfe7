"""Time a call many times; on a shared machine the CPU clock is the steadier one."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_CALLS = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds per call. `median_s` is the figure to quote, `best_s` what the code can do."""

    median_s: float
    best_s: float
    calls: int


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """`clock` "wall", or "cpu": CPU time of the process divided by its `threads`, which other
    processes on the machine do not add to. Threads that spin while they wait count as working, so
    with "cpu" and several threads a badly divided op still shows."""

    clock: str
    threads: int
    seconds: float  # how long each op is repeated

    def time(self, calls: Sequence[Callable[[], object]]) -> Timed:
        """Call them in turn (each on its own copy of the weights, so that none is in a cache)."""
        for call in calls[:2]:
            call()
        taken_s: list[float] = []
        end_s = time.perf_counter() + self.seconds
        for call in itertools.cycle(calls):
            t0 = self.now_s()
            call()
            taken_s.append(self.now_s() - t0)
            if len(taken_s) >= MIN_CALLS and time.perf_counter() > end_s:
                break
        return Timed(statistics.median(taken_s), min(taken_s), len(taken_s))

    def now_s(self) -> float:
        if self.clock == "cpu":
            return time.process_time() / self.threads
        return time.perf_counter()
