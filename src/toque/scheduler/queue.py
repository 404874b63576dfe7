"""Who waits, in which order, how many may, and for how long.

Owns: the waiting sequences and their sums. Knows: the policy's order, the queue's limits.
Does not know: rows, pages, promises.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from toque.scheduler.policy import Policy
from toque.scheduler.sequence import Sequence, Status
from toque.types import RefusalCause


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """None = no limit. They bound who comes; who was preempted always has a place."""

    max_requests: int | None = None
    max_tokens: int | None = None
    timeout_s: float | None = None


NO_LIMITS = QueueLimits()


class Queue:
    """Iterates in the policy's order."""

    def __init__(self, policy: Policy, limits: QueueLimits) -> None:
        self._policy = policy
        self._limits = limits
        self._waiting: list[Sequence] = []  # sorted by key
        self._by_age: deque[Sequence] = deque()  # as they came; who has left is passed over
        self._counted: dict[str, int] = {}  # tokens of each, as of when it began to wait
        self.tokens = 0  # to be computed for all of them, as far as is known

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def head(self, most: int) -> list[Sequence]:
        return list(islice(self._waiting, most))

    def before(self, sequence: Sequence) -> list[Sequence]:
        """Those that come first; it need not be here itself."""
        return self._waiting[: self._place(sequence)]

    @property
    def oldest(self) -> Sequence | None:
        """Of those that have never run."""
        while self._by_age and not _never_ran(self._by_age[0]):
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def full(self, prompt_tokens: int, free_rows: int) -> tuple[RefusalCause, str] | None:
        """Why one more may not wait: which limit, and a sentence. For the first `free_rows` here
        the queue is only a passage; so one of any length is taken when nobody waits."""
        limits, waiting = self._limits, len(self) - free_rows
        if waiting < 0:
            return None
        if limits.max_requests is not None and waiting >= limits.max_requests:
            text = f"{waiting} sequences wait already (--max-queue-requests)"
            return RefusalCause.QUEUE_REQUESTS, text
        if limits.max_tokens is not None and self.tokens + prompt_tokens > limits.max_tokens:
            text = f"{self.tokens} prompt tokens wait already (--max-queue-tokens)"
            return RefusalCause.QUEUE_TOKENS, text
        return None

    def push(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.key = self._policy.key(sequence)
        insort(self._waiting, sequence, key=lambda waiting: waiting.key)
        if sequence.admitted_s is None and sequence.id not in self._counted:
            self._by_age.append(sequence)
        self._counted[sequence.id] = sequence.num_expected
        self.tokens += sequence.num_expected

    def remove(self, sequence: Sequence) -> None:
        """Its status is the caller's to change, at once."""
        place = self._place(sequence)
        assert self._waiting[place] is sequence
        del self._waiting[place]
        self.tokens -= self._counted.pop(sequence.id)

    def reorder(self, sequence: Sequence) -> None:
        """What its key is made of has changed."""
        self.remove(sequence)
        self.push(sequence)

    def timed_out(self, now_s: float) -> Iterator[Sequence]:
        """Those that have waited too long for their first step, the oldest first. Remove each."""
        limit_s = self._limits.timeout_s
        while limit_s is not None and (oldest := self.oldest) is not None:
            if now_s - oldest.request.arrived_s <= limit_s:
                return
            yield oldest

    def _place(self, sequence: Sequence) -> int:
        return bisect_left(self._waiting, sequence.key, key=lambda waiting: waiting.key)


def _never_ran(sequence: Sequence) -> bool:
    return sequence.status is Status.WAITING and sequence.admitted_s is None
