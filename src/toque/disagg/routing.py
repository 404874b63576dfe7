"""Which engine a request goes to: pure functions of what is known about each.

Owns: what each engine's prefix cache probably holds (PrefixIndex).
Knows: token counts, loads. Does not know: ports, processes, pages.

An engine's cost for a request is the tokens it would compute before the first one comes out: what
waits there already, and what of this prompt it does not have. That one number holds affinity and
load together: a long shared prefix outweighs a queue, and a long queue outweighs a short prefix.
A decode in progress counts as the few tokens that it slows a prompt by. Where the request has a
target, engines that would miss it come last. What is known here may be out of date; that costs
time, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DECODE_TOKENS = 8  # what a running sequence costs a prompt that arrives
REMEMBERED_PAGES = 1 << 16  # of one engine


@dataclass(frozen=True, slots=True)
class View:
    """What is known of an engine that could take a request."""

    index: int
    waiting_tokens: int  # given to it and, as far as we know, not computed yet
    running: int  # sequences
    cached_tokens: int  # of this prompt
    tokens_per_s: float  # of prefill

    def cost_tokens(self, prompt_tokens: int) -> int:
        missing = max(1, prompt_tokens - self.cached_tokens)
        return self.waiting_tokens + missing + DECODE_TOKENS * self.running


def choose(views: Sequence[View], prompt_tokens: int, ttft_s: float | None = None) -> int | None:
    """The index of the engine to take; None if there is none. Ties go to the lower index."""

    def key(view: View) -> tuple[bool, int, int]:
        cost = view.cost_tokens(prompt_tokens)
        late = ttft_s is not None and cost / view.tokens_per_s > ttft_s
        return late, cost, view.index

    return min(views, key=key).index if views else None


def chain(tokens: Sequence[int], salt: str, block_size: int) -> list[int]:
    """A number for each full page that leaves a token to compute, made of all tokens up to it."""
    numbers: list[int] = []
    last = hash(salt)
    for begin in range(0, (len(tokens) - 1) // block_size * block_size, block_size):
        last = hash((last, tuple(tokens[begin : begin + block_size])))
        numbers.append(last)
    return numbers


class PrefixIndex:
    """Pages that an engine has been given or has computed, the least recent forgotten first."""

    def __init__(self, most_pages: int = REMEMBERED_PAGES) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()
        self._most = most_pages

    def matched(self, pages: Iterable[int]) -> int:
        """How many of a prompt's pages, from the first one on, are probably there."""
        count = 0
        for page in pages:
            if page not in self._pages:
                break
            count += 1
        return count

    def remember(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # the first page is the most recent: it is dropped last
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        self._pages.clear()
