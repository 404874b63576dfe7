"""The last minutes, a second each: what the page's charts begin with when it is opened.

Owns: one record per second, bounded. Knows: step reports, gaps, first tokens.
Does not know: who looks, how it is drawn.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from toque.types import Load, StepReport

KEPT_S = 300
KEPT_STEPS = 240
PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class Second:
    """What happened in one second; times in milliseconds."""

    steps: int = 0
    busy_ms: float = 0.0  # of the engine
    prompt_tokens: int = 0  # computed, recomputation included
    output_tokens: int = 0
    load: Load = field(default_factory=Load)
    gaps_ms: dict[float, int] = field(default_factory=dict)
    first_ms: list[float] = field(default_factory=list)
    met: int = 0
    missed: int = 0

    def told(self, unix_s: int) -> dict[str, object]:
        return {
            "t": unix_s,
            "steps": self.steps,
            "busy": round(min(1.0, self.busy_ms / 1e3), 3),
            "prompt": self.prompt_tokens,
            "output": self.output_tokens,
            "running": self.load.running,
            "waiting": self.load.waiting,
            "held": self.load.held_pages,
            "cached": self.load.cached_pages,
            "met": self.met,
            "missed": self.missed,
            "itl": percentiles(self.gaps_ms),
            "ttft": percentiles(Counter(self.first_ms)),
        }


class Recent:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._to_unix_s = time.time() - clock()
        self._seconds: deque[tuple[int, Second]] = deque(maxlen=KEPT_S)
        self.steps: deque[tuple[int, float, int, int, int]] = deque(maxlen=KEPT_STEPS)
        self._load = Load()
        self._number = 0  # of the last step with a time

    def _now(self) -> Second:
        """The present second; those since the last one, in which nothing came, are made too."""
        unix_s = int(self._clock() + self._to_unix_s)
        last = self._seconds[-1][0] if self._seconds else unix_s - 1
        for missing in range(max(last, unix_s - KEPT_S) + 1, unix_s + 1):
            self._seconds.append((missing, Second(load=self._load)))
        return self._seconds[-1][1]

    def step(self, report: StepReport, gaps_s: Mapping[float, int]) -> None:
        """`gaps_s`: how many tokens of this step followed their predecessor after each gap."""
        self._load = report.load
        second = self._now()
        second.load = report.load
        for gap_s, tokens in gaps_s.items():
            gap_ms = round(1e3 * gap_s, 2)
            second.gaps_ms[gap_ms] = second.gaps_ms.get(gap_ms, 0) + tokens
        if report.times is None:
            return
        decodes = min(report.batch_tokens, sum(gaps_s.values()))
        run_ms = report.times.run_ms
        second.steps += 1
        second.busy_ms += run_ms + report.times.plan_ms + report.times.commit_ms
        second.prompt_tokens += report.batch_tokens - decodes
        second.output_tokens += decodes
        self._number += 1
        step = (self._number, round(run_ms, 2), report.batch_tokens - decodes, decodes)
        self.steps.append((*step, report.batch_sequences))

    def first_token(self, waited_s: float) -> None:
        second = self._now()
        second.output_tokens += 1
        second.first_ms.append(round(1e3 * waited_s, 2))

    def promise(self, met: bool) -> None:
        second = self._now()
        second.met += met
        second.missed += not met

    def since(self, unix_s: int) -> list[dict[str, object]]:
        """The complete seconds after `unix_s`, oldest first."""
        self._now()
        done = [(t, second) for t, second in self._seconds if t > unix_s]
        return [second.told(t) for t, second in done[:-1]]


def percentiles(values: Mapping[float, int]) -> list[float] | None:
    """The PERCENTILES of values with weights; None of nothing."""
    total = sum(values.values())
    if not total:
        return None
    ordered = sorted(values.items())
    found = []
    for share in PERCENTILES:
        rank, seen = share * total, 0
        for value, weight in ordered:
            seen += weight
            if seen >= rank:
                found.append(value)
                break
    return found
