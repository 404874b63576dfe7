"""Who comes first. Pure functions of what a sequence shows; the scheduler does the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from toque.scheduler.sequence import Sequence


class Policy(Protocol):
    def key(self, sequence: Sequence) -> tuple[float, ...]:
        """Sort key: the smallest is served first. Unique, and constant while a sequence waits."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who gives its pages back when none are left. `running` is not empty.

        The scheduler may preempt the very sequence that asks for a page. For progress, the sequence
        that `key` puts first among the running ones must never be chosen while others run.
        """


class Fcfs:
    """First come, first served; the latest comer is preempted."""

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.order,)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return max(running, key=self.key)
