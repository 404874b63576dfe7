"""How long pages live, how long they lie unused, how often they are used again: for a share of
them.

Owns: what is known of the pages that are watched. Knows: page ids, moments of a clock it is given.
Does not know: tokens, sequences, why a page is evicted.

A page's life begins when it is allocated and ends when it is evicted from the prefix cache. In
between requests find it there: each time is one access. A page that is given back without having
been evicted (it was private, or an equal one took its place) has no such life and is not told of;
its next allocation begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

from toque.types import PageLife

LAST_ACCESSES = 4  # of one page: a popular one must not grow without bound
_BITS = (1 << 64) - 1


class PageWatch:
    """Which pages are watched depends on nothing but how many were allocated before."""

    def __init__(self, clock: Callable[[], float], share: float) -> None:
        """`share`: of the allocations, 0 to 1."""
        self._clock = clock
        self._most = int(share * (_BITS + 1))
        self._allocated = 0
        self._began_s: dict[int, float] = {}  # by page
        self._accesses_s: dict[int, deque[float]] = {}  # by page
        self._lives: list[PageLife] = []

    def allocated(self, page: int, evicted: int | None) -> None:
        """`evicted`: the page that had to go first, if one had to."""
        if evicted is not None:
            self._evicted(evicted)
        self._allocated += 1
        self._accesses_s.pop(page, None)
        if mixed(self._allocated) < self._most:
            self._began_s[page] = self._clock()
        else:
            self._began_s.pop(page, None)

    def used(self, pages: Iterable[int]) -> None:
        """A request found them in the prefix cache."""
        for page in pages:
            if page in self._began_s:
                accesses_s = self._accesses_s.setdefault(page, deque(maxlen=LAST_ACCESSES))
                accesses_s.append(self._clock())

    def _evicted(self, page: int) -> None:
        began_s = self._began_s.pop(page, None)
        accesses_s = self._accesses_s.pop(page, ())
        if began_s is None:
            return
        now_s = self._clock()
        last_s = accesses_s[-1] if accesses_s else began_s
        gaps_s = tuple(after_s - before_s for before_s, after_s in pairwise(accesses_s))
        self._lives.append(PageLife(now_s - began_s, now_s - last_s, gaps_s))

    def take(self) -> tuple[PageLife, ...]:
        """The lives that have ended since it was asked last."""
        if not self._lives:
            return ()
        ended, self._lives = tuple(self._lives), []
        return ended


def mixed(number: int) -> int:
    """64 bits that look random (splitmix64): prompts of a hundred pages each, one page in a hundred
    watched, must not always have the same one watched."""
    x = number * 0x9E3779B97F4A7C15 & _BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _BITS
    return x ^ x >> 31
