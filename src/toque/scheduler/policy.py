"""Who comes first. Pure functions of what a sequence shows; the scheduler does the rest.

Every policy is an order, and the last one in it is preempted. So a sequence that comes first keeps
its pages until it ends, and progress never stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class ByPriority(Fcfs):
    """Lower numbers first, equal ones as they came; the last of that order is preempted.

    A steady flow of more urgent requests keeps a less urgent one waiting for ever: that is what
    the client who numbers them asks for.
    """

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.request.priority, sequence.order)


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": Fcfs, "priority": ByPriority}
