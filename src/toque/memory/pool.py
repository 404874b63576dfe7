"""The pages of the KV pool, counted.

Owns: the free list and the reference count of every page.
Knows: page ids. Does not know: tokens, sequences, why an idle page is kept.

    free   --allocate-->  held (count 1)
    held   <--retain, release-->  held (count + 1, - 1)
    held   --release-->   idle (count 0): its last holder is gone and the caller chooses
    idle   --retain-->    held    the prefix tree kept it, a new sequence uses it
    idle   --free-->      free    nobody keeps it

A page's epoch counts how often it was allocated: who has read a page's epoch before and after
reading its contents knows whether they are of one use. It lies in memory that other processes may
map, so that a reader elsewhere can do the same.

Every method is O(1) but `check`. Paging of the KV cache: PagedAttention, arXiv:2309.06180.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

Epochs: TypeAlias = "array[int] | memoryview"  # 64-bit integers, one per page

FREE = -1  # in place of a reference count, so that a double free is seen at once


def require(condition: bool, sentence: str) -> None:
    """`assert` that survives `python -O`. Raises AssertionError(sentence)."""
    if not condition:
        raise AssertionError(sentence)


class PagePool:
    """Pages 0 .. total_pages - 1, all free at first. Misuse raises ValueError, changing nothing."""

    def __init__(self, total_pages: int, epochs: Epochs | None = None) -> None:
        if total_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {total_pages}")
        self.epochs: Epochs = array("q", bytes(8 * total_pages)) if epochs is None else epochs
        self.total_pages = total_pages
        self._references = [FREE] * total_pages
        # A stack: the page freed last is the likeliest to be in the processor's cache.
        self._free = list(range(total_pages - 1, -1, -1))
        self._held_pages = 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def held_pages(self) -> int:
        return self._held_pages

    @property
    def idle_pages(self) -> int:
        """Held by nobody and not free: the pages that the prefix tree keeps."""
        return self.total_pages - len(self._free) - self._held_pages

    def holders(self, page: int) -> int:
        """How many hold the page; 0 for an idle one and for a free one."""
        return max(0, self._references[page])

    def allocate(self) -> int:
        """Takes a page from the free list; the caller is its one holder."""
        if not self._free:
            raise ValueError("no page is free")
        page = self._free.pop()
        self.epochs[page] += 1
        self._references[page] = 1
        self._held_pages += 1
        return page

    def retain(self, page: int) -> None:
        """One more holder of a page that is held or idle."""
        count = self._references[page]
        if count == FREE:
            raise ValueError(f"page {page} is free: it has no contents to hold")
        self._references[page] = count + 1
        self._held_pages += count == 0

    def release(self, page: int) -> None:
        """One holder less; a page without holders is idle, not free."""
        count = self._references[page]
        if count < 1:
            raise ValueError(f"page {page} has no holder to release it")
        self._references[page] = count - 1
        self._held_pages -= count == 1

    def free(self, page: int) -> None:
        """An idle page goes back to the free list; its contents are lost."""
        count = self._references[page]
        if count != 0:
            state = "free already" if count == FREE else f"held by {count}"
            raise ValueError(f"page {page} is {state}")
        self._references[page] = FREE
        self._free.append(page)

    def states(self) -> bytes:
        """One byte per page: 0 free, 1 idle, 2 held by one, 3 by several. O(total_pages)."""
        return bytes(min(count, 2) + 1 for count in self._references)

    def check(self) -> None:
        """Compares the free list with the counts. Raises AssertionError. O(total_pages)."""
        listed = set(self._free)
        require(len(listed) == len(self._free), "a page is on the free list twice")
        marked = {page for page, count in enumerate(self._references) if count == FREE}
        require(listed == marked, f"free list {listed} and marks {marked} differ")
        require(min(self._references) >= FREE, "a reference count is negative")
        held = sum(count > 0 for count in self._references)
        require(held == self._held_pages, f"{held} pages are held, {self._held_pages} counted")
