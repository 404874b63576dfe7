"""The policy that plans to keep promises: least slack first, short steps, no hopeless admissions.

Owns: nothing. Knows: what each sequence was promised, what its prompt costs.
Does not know: pages, rows, how long the queue is.

- **Order.** Who must be started soonest so that its promise is kept comes first. Those without a
  promise come after all that have one, as they came.
- **Steps** end before the first running stream is due for its next token; a long prompt gets the
  time that is left.
- **At the door** the predicted first (or last) token is compared with the promise; who cannot be
  served in time is told at once, or served without a promise if its class says so.
- **Starvation bound.** Who has no promise and has waited STARVE_S gets a quarter of what each step
  has for prompts, before the order is followed.
- **Preemption** takes from those without a promise first and from running streams last; of equals
  the one that is cheapest to compute again, and not the same one again and again.

Least slack: Mok, "Fundamental design problems of distributed systems for the hard-real-time
environment" (1983). Chunks sized by the running streams' targets: Sarathi-Serve, OSDI'24.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listed

from toque.scheduler.sequence import Sequence
from toque.types import Slo

STARVE_S = 20.0
STARVED_SHARE = 0.25
OVERHEAD_MS = 1.0  # of a step, beside what runs on the device
CAUTION = 1.0  # how many usual errors of the cost model a step keeps away from its limit

Need = Callable[[int, int], float]  # (start, tokens) -> ms that they add to the steps


class BySlo:
    promises = True

    def __init__(self, prompt_ms: Need, error: Callable[[], float] = lambda: 0.0) -> None:
        """`error`: the cost model's usual relative error."""
        self._prompt_ms = prompt_ms
        self._error = error

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        if sequence.preemptions and sequence.num_output:  # its stream has stopped in the middle
            return (-1.0, sequence.order, 0.0)
        slo = sequence.slo
        if slo is None:
            return (1.0, sequence.order, 0.0)
        return (0.0, latest_start_s(sequence, slo, self._prompt_ms), sequence.order)

    def victim(self, running: Collection[Sequence]) -> Sequence:
        # The oldest never gives way. It asks for pages until it has ended, and gets them.
        oldest = min(running, key=lambda sequence: sequence.order)
        others = [sequence for sequence in running if sequence is not oldest]
        return min(others, key=self._reluctance, default=oldest)

    def _reluctance(self, sequence: Sequence) -> tuple[float, ...]:
        cost_ms = self._prompt_ms(0, sequence.num_computed)
        return (rank(sequence), cost_ms * (1 + sequence.preemptions) ** 2, -sequence.order)

    def aside(self, line: Listed[Sequence], now_s: float) -> tuple[float, list[Sequence]]:
        starved = [s for s in line if s.slo is None and now_s - s.request.arrived_s > STARVE_S]
        return STARVED_SHARE, sorted(starved, key=lambda s: s.order)

    def limit_ms(self, streams: Collection[Sequence], now_s: float) -> float:
        due_ms = min((next_due_ms(sequence, now_s) for sequence in streams), default=math.inf)
        return due_ms / (1.0 + CAUTION * self._error()) - OVERHEAD_MS

    def late_s(self, sequence: Sequence, first_token_s: float, last_token_s: float) -> float:
        slo = sequence.slo
        if slo is None:
            return 0.0
        late_s = -math.inf
        if slo.ttft_s is not None:
            late_s = first_token_s - slo.ttft_s
        if slo.deadline_s is not None:
            late_s = max(late_s, last_token_s - slo.deadline_s)
        return late_s


def latest_start_s(sequence: Sequence, slo: Slo, prompt_ms: Need) -> float:
    """The moment at which its prompt must be begun, were it alone. A class that promises nothing
    about the first token is due as if it were promised half of its deadline for it."""
    ends_s = [s for s in (slo.ttft_s, slo.deadline_s and slo.deadline_s / 2) if s is not None]
    if not ends_s:  # it promises the time between tokens only
        ends_s = [STARVE_S]
    todo = sequence.num_expected
    need_ms = prompt_ms(len(sequence.tokens) - todo, todo)
    return sequence.request.arrived_s + min(ends_s) - need_ms / 1e3


def next_due_ms(sequence: Sequence, now_s: float) -> float:
    """Until its next token is due. A gap that is too long already cannot be made good by a short
    step: then the next one counts."""
    slo = sequence.slo
    if slo is None or slo.itl_s is None:
        return math.inf
    if sequence.last_token_s is None:
        return slo.itl_s * 1e3
    left_s = sequence.last_token_s + slo.itl_s - now_s
    return (left_s if left_s > 0 else slo.itl_s) * 1e3


def rank(sequence: Sequence) -> int:
    """How much a preemption would break: 0 no promise, 1 a first token that is still to come,
    2 a stream that would stop."""
    slo = sequence.slo
    if slo is None:
        return 0
    return 2 if slo.itl_s is not None and sequence.num_output else 1
