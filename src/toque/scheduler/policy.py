"""Who comes first, who gives way, how long a step may take. Pure functions of what sequences show.

A policy is an order with exceptions that are bounded: whoever is first in the order of those that
run keeps its pages until it ends, and the head of the queue gets at least half of what a step has
for prompts. So progress never stops and nobody waits for ever behind those who came later.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Listed
from typing import Protocol

from toque.scheduler.sequence import Sequence

SHORT_SHARE = 0.5  # of a step's prompt tokens, for prompts shorter than the first one's


class Policy(Protocol):
    promises: bool  # whether `late_s` may ever be above zero: else nobody is asked to predict

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Sort key: the smallest is served first. Unique; taken once, when a sequence begins to
        wait."""

    def victim(self, running: Collection[Sequence]) -> Sequence:
        """Who gives its pages back when none are left. `running` is not empty.

        The scheduler may preempt the very sequence that asks for a page. For progress there must
        be one among the running that is never chosen while others run, and stays it until it ends
        or one that came before it runs.
        """

    def aside(self, line: Listed[Sequence], now_s: float) -> tuple[float, list[Sequence]]:
        """A share of the step's prompt tokens and those who may use it before the order is
        followed. `line`: prompts in order, two or more, that do not all fit into the step."""

    def limit_ms(self, streams: Collection[Sequence], now_s: float) -> float:
        """The longest that a step may take that decodes these."""

    def late_s(self, sequence: Sequence, first_token_s: float, last_token_s: float) -> float:
        """By how much it would miss what it was promised; above zero, it is turned away. Its first
        and last tokens are predicted for so many seconds after its arrival."""


class Fcfs:
    """First come, first served; the latest comer is preempted.

    Half of what a step has for prompts goes to those that are shorter than the first in line,
    shortest first, so that a question does not wait until a book is read. What the prefix cache
    has does not count as length, so who comes while its prefix is there goes ahead, too.
    """

    promises = False

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.order,)

    def victim(self, running: Collection[Sequence]) -> Sequence:
        return max(running, key=lambda sequence: sequence.key)

    def aside(self, line: Listed[Sequence], now_s: float) -> tuple[float, list[Sequence]]:
        first = line[0]
        shorter = [s for s in line[1:] if s.num_expected < first.num_expected]
        return SHORT_SHARE, sorted(shorter, key=lambda s: (s.num_expected, s.key))

    def limit_ms(self, streams: Collection[Sequence], now_s: float) -> float:
        return math.inf

    def late_s(self, sequence: Sequence, first_token_s: float, last_token_s: float) -> float:
        return 0.0


class ByPriority(Fcfs):
    """Lower numbers first, equal ones as they came; the last of that order is preempted.

    A steady flow of more urgent requests keeps a less urgent one waiting for ever: that is what
    the client who numbers them asks for.
    """

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.request.priority, sequence.order)

    def aside(self, line: Listed[Sequence], now_s: float) -> tuple[float, list[Sequence]]:
        urgent = line[0].request.priority
        return super().aside([s for s in line if s.request.priority == urgent], now_s)
