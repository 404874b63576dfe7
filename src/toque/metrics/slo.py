"""Whether promises were kept: one verdict per sequence that had a class.

Owns: nothing but a stream's own pace, and a window of recent verdicts. Knows: Slo, moments.
Does not know: how the scheduler tries to keep promises, names of metrics.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import floor

from toque.slo import MISSES_ALLOWED
from toque.types import Finished, FinishReason, Request, Slo

MET, MISSED, REFUSED, FAILED, LEFT = "met", "missed", "refused", "failed", "left"
VERDICTS = (MET, MISSED, REFUSED, FAILED, LEFT)
TARGETS = ("ttft", "itl", "deadline")
WINDOW_S = 300.0


@dataclass(slots=True)
class Pace:
    """How one sequence's tokens have reached the text side so far: what `slo.attained` would say
    of its list of gaps, without the list."""

    request: Request
    first_s: float | None = None  # after arrival
    last_s: float = 0.0  # when its last token came
    gaps: int = 0
    late_gaps: int = 0  # longer than its class allows

    def came(self, tokens: int, now_s: float) -> float | None:
        """Take in new tokens; the gap that each of them had, None for the first ones. Several at
        once share the time since the last one."""
        gap_s = None
        if self.first_s is None:
            self.first_s = now_s - self.request.arrived_s
        else:
            gap_s = (now_s - self.last_s) / tokens
            self.gaps += tokens
            slo = self.request.slo
            if slo is not None and slo.itl_s is not None and gap_s > slo.itl_s:
                self.late_gaps += tokens
        self.last_s = now_s
        return gap_s


def verdict(pace: Pace, event: Finished) -> tuple[str, tuple[str, ...]]:
    """One of VERDICTS for a sequence that ended, and which targets it missed."""
    if event.reason is FinishReason.ABORT:
        return LEFT, ()
    if event.reason is FinishReason.ERROR:
        return FAILED, ()
    slo = pace.request.slo
    missed = _missed(slo, pace, event) if slo is not None else ()
    return (MISSED if missed else MET), missed


def _missed(slo: Slo, pace: Pace, event: Finished) -> tuple[str, ...]:
    finished_s = event.times.finished_s or pace.last_s
    late = {
        "ttft": slo.ttft_s is not None and (pace.first_s or 0.0) > slo.ttft_s,
        "itl": pace.late_gaps > floor(pace.gaps * MISSES_ALLOWED),
        "deadline": slo.deadline_s is not None
        and finished_s - pace.request.arrived_s > slo.deadline_s,
    }
    return tuple(target for target in TARGETS if late[target])


@dataclass(slots=True)
class Attainment:
    """The share of promises kept within the last WINDOW_S seconds, by class."""

    recent: dict[str, deque[tuple[float, bool]]] = field(default_factory=dict)

    def add(self, slo_class: str, met: bool, now_s: float) -> None:
        self.recent.setdefault(slo_class, deque(maxlen=10_000)).append((now_s, met))

    def ratio(self, slo_class: str, now_s: float) -> float | None:
        """None where nothing was promised lately."""
        recent = self.recent.get(slo_class, deque())
        while recent and recent[0][0] < now_s - WINDOW_S:
            recent.popleft()
        return sum(met for _, met in recent) / len(recent) if recent else None
