"""The rows of the worker's state, and who runs in them.

Owns: which row is whose. Knows: sequences. Does not know: order, pages.
"""

from __future__ import annotations

from toque.scheduler.sequence import Sequence, Status


class Rows:
    def __init__(self, total: int) -> None:
        self.running: dict[int, Sequence] = {}
        self.free = list(range(total))[::-1]
        self._total = total

    def take(self, sequence: Sequence) -> int:
        sequence.status = Status.RUNNING
        sequence.row = row = self.free.pop()
        sequence.last_on_worker = False
        self.running[row] = sequence
        return row

    def leave(self, sequence: Sequence) -> None:
        """Its status is the caller's to change, at once."""
        assert sequence.row is not None
        del self.running[sequence.row]
        self.free.append(sequence.row)
        sequence.row = None

    def check(self) -> None:
        rows = sorted(self.free + list(self.running))
        assert rows == list(range(self._total)), "a row is lost or taken twice"
