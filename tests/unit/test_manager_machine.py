"""CacheManager against a model of dictionaries, as a state machine.

The model knows prefixes as tuples of tokens and searches all of them for every question. It also
keeps what a worker would have written into each page: for every position the whole prefix that
its keys and values depend on. Pages lose their contents when they are handed out, so that a page
which is matched without having been computed, or which two sequences write, shows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from toque.memory import CacheManager, Match, Node

SALTS = st.sampled_from(["", "", "", "s"])
Prefix = tuple[str, tuple[int, ...]]  # salt, a whole number of pages of tokens


@dataclass
class ModelSequence:
    salt: str
    tokens: list[int]
    pages: list[int]
    attached: int  # so many of its pages are shared through the tree
    computed: int = 0


@dataclass
class Announcement:
    owner: str


@dataclass
class Model:
    """Prefix caching with dictionaries and searches."""

    block_size: int
    free: set[int]
    caching: bool
    ready: dict[Prefix, int] = field(default_factory=dict)
    pending: dict[Prefix, Announcement] = field(default_factory=dict)
    used: dict[Prefix, int] = field(default_factory=dict)  # time of the last release
    live: dict[str, ModelSequence] = field(default_factory=dict)
    now: int = 0

    def prefix(self, salt: str, tokens: list[int], num_pages: int) -> Prefix:
        return salt, tuple(tokens[: num_pages * self.block_size])

    def holders(self, page: int) -> int:
        return sum(page in seq.pages for seq in self.live.values())

    def held(self) -> set[int]:
        return {page for seq in self.live.values() for page in seq.pages}

    def cached(self) -> set[int]:
        return set(self.ready.values()) - self.held()

    def match(self, tokens: list[int], salt: str) -> tuple[list[int], Announcement | None]:
        pages: list[int] = []
        for count in range(1, (len(tokens) - 1) // self.block_size + 1):
            prefix = self.prefix(salt, tokens, count)
            if prefix not in self.ready:
                return pages, self.pending.get(prefix)
            pages.append(self.ready[prefix])
        return pages, None

    def admit(self, key: str, tokens: list[int], salt: str, pages: list[int]) -> None:
        seq = ModelSequence(salt, list(tokens), list(pages), len(pages))
        seq.computed = len(pages) * self.block_size
        self.live[key] = seq
        for count in range(len(pages) + 1, len(tokens) // self.block_size + 1):
            prefix = self.prefix(salt, tokens, count)
            if not self.caching or prefix in self.ready or prefix in self.pending:
                break
            self.pending[prefix] = Announcement(key)

    def evict(self) -> int:
        """The unheld page without continuation that was released longest ago."""
        everything = [*self.ready, *self.pending]
        leaves = [
            (self.used[prefix], prefix)
            for prefix, page in self.ready.items()
            if not self.holders(page)
            and not any(
                other[0] == prefix[0]
                and len(other[1]) > len(prefix[1])
                and other[1][: len(prefix[1])] == prefix[1]
                for other in everything
            )
        ]
        prefix = min(leaves)[1]
        del self.used[prefix]
        return self.ready.pop(prefix)

    def commit(self, key: str) -> None:
        seq = self.live[key]
        while self.caching and seq.attached < seq.computed // self.block_size:
            prefix = self.prefix(seq.salt, seq.tokens, seq.attached + 1)
            page = seq.pages[seq.attached]
            if prefix in self.pending:
                if self.pending[prefix].owner != key:
                    break
                del self.pending[prefix]
            elif prefix in self.ready:
                if self.holders(self.ready[prefix]):
                    break
                self.free.add(self.ready[prefix])
            self.ready[prefix] = page
            seq.attached += 1

    def release(self, key: str) -> None:
        seq = self.live.pop(key)
        self.free |= set(seq.pages[seq.attached :])
        self.pending = {p: a for p, a in self.pending.items() if a.owner != key}
        self.now += 1
        for count in range(1, seq.attached + 1):
            self.used[self.prefix(seq.salt, seq.tokens, count)] = self.now


class CacheMachine(RuleBasedStateMachine):
    """Tiny pools and two tokens, so that prefixes collide and eviction never rests."""

    PREFIX_CACHING = True

    @initialize(total_pages=st.integers(3, 12), block_size=st.sampled_from([1, 1, 2, 3]))
    def start(self, total_pages: int, block_size: int) -> None:
        self.cache = CacheManager(total_pages, block_size, self.PREFIX_CACHING)
        self.model = Model(block_size, set(range(total_pages)), self.PREFIX_CACHING)
        self.contents: dict[int, list[Prefix | None]] = {}
        self.watched: dict[Node, Announcement] = {}
        self.kept: list[tuple[list[int], str, Match]] = []
        self.keys = 0

    def some_key(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model.live)), label="key")

    def some_tokens(self, data: st.DataObject) -> list[int]:
        """A live or cached sequence's tokens, whole or cut, with a new end; fresh ones at first."""
        known = [seq.tokens for seq in self.model.live.values()]
        known += [list(prefix[1]) for prefix in self.model.ready]
        base = data.draw(st.sampled_from(sorted(known) or [[]]), label="base")
        cut = data.draw(st.sampled_from([0, 0, 1, 2]), label="cut") * self.model.block_size
        end = data.draw(st.lists(st.integers(0, 1), max_size=4), label="end")
        return [*base[: max(0, len(base) - cut)], *end][:24] or [0]

    def written(self, page: int) -> list[Prefix | None]:
        return self.contents.setdefault(page, [None] * self.model.block_size)

    def _match(self, tokens: list[int], salt: str) -> Match:
        match = self.cache.match(tokens, salt)
        pages, announcement = self.model.match(tokens, salt)
        size = self.model.block_size
        assert list(match.pages) == pages
        assert match.num_tokens == len(pages) * size < len(tokens)
        assert (match.pending is None) == (announcement is None)
        if match.pending is not None and announcement is not None:
            assert self.watched.setdefault(match.pending, announcement) is announcement
        for index, page in enumerate(match.pages):
            assert self.written(page) == [
                (salt, tuple(tokens[: index * size + offset + 1])) for offset in range(size)
            ], f"page {page} does not hold what match says"
        return match

    def _admit(self, tokens: list[int], salt: str, match: Match) -> str:
        key = f"r{self.keys}"
        self.keys += 1
        self.cache.admit(key, tokens, salt, match)
        self.model.admit(key, tokens, salt, list(match.pages))
        return key

    def _grow(self, key: str, num_tokens: int) -> bool:
        model, seq = self.model, self.model.live[key]
        needed = max(0, -(-num_tokens // model.block_size) - len(seq.pages))
        new_pages = self.cache.grow(key, num_tokens)
        if needed > len(model.free) + len(model.cached()):
            assert new_pages is None
            return False
        assert new_pages is not None
        while len(model.free) < needed:
            model.free.add(model.evict())
        assert len(new_pages) == len(set(new_pages)) == needed
        assert set(new_pages) <= model.free, "a page was handed out that was not free"
        model.free -= set(new_pages)
        seq.pages += new_pages
        for page in new_pages:
            self.contents[page] = [None] * model.block_size
        return True

    def _compute(self, key: str, num_tokens: int) -> None:
        """The worker writes a chunk, then it is committed."""
        model, seq = self.model, self.model.live[key]
        end = min(len(seq.tokens), len(seq.pages) * model.block_size, seq.computed + num_tokens)
        for position in range(seq.computed, end):
            page = seq.pages[position // model.block_size]
            assert model.holders(page) == 1, "written by one while another reads"
            assert page not in model.ready.values(), "written while it can be matched"
            self.written(page)[position % model.block_size] = (
                seq.salt,
                tuple(seq.tokens[: position + 1]),
            )
        seq.computed = end
        model.commit(key)
        self.cache.commit(key, seq.tokens, end)

    def _run(self, key: str, num_tokens: int) -> None:
        seq = self.model.live[key]
        if self._grow(key, min(len(seq.tokens), seq.computed + num_tokens)):
            self._compute(key, num_tokens)

    @rule(data=st.data(), salt=SALTS)
    def serve(self, data: st.DataObject, salt: str) -> None:
        """A short life, so that the cache has something: 99 tokens are all of them."""
        tokens = self.some_tokens(data)
        key = self._admit(tokens, salt, self._match(tokens, salt))
        self._run(key, data.draw(st.sampled_from([0, 1, 99, 99]), label="computed"))
        self.release(key)

    @precondition(lambda self: len(self.model.live) < 4)
    @rule(data=st.data(), salt=SALTS, num_tokens=st.sampled_from([0, 1, 3, 99]))
    def match_and_admit(self, data: st.DataObject, salt: str, num_tokens: int) -> None:
        tokens = self.some_tokens(data)
        self._run(self._admit(tokens, salt, self._match(tokens, salt)), num_tokens)

    @rule(data=st.data(), salt=SALTS)
    def match_and_wait(self, data: st.DataObject, salt: str) -> None:
        tokens = self.some_tokens(data)
        self.kept.append((tokens, salt, self._match(tokens, salt)))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def admit_with_an_old_match(self, data: st.DataObject) -> None:
        """It works if the tree still has (or has again) these pages there; else it is refused."""
        index = data.draw(st.integers(0, len(self.kept) - 1))
        tokens, salt, match = self.kept.pop(index)
        pages = self.model.match(tokens, salt)[0]
        if list(match.pages) == pages[: len(match.pages)]:
            self._admit(tokens, salt, match)
            return
        before = self.numbers()
        with pytest.raises(ValueError, match="stale"):
            self.cache.admit("stale", tokens, salt, match)
        assert self.numbers() == before

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), num_tokens=st.integers(0, 26))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        self._grow(self.some_key(data), num_tokens)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        self._compute(self.some_key(data), num_tokens)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 3, 99]))
    def grow_and_compute(self, data: st.DataObject, num_tokens: int) -> None:
        self._run(self.some_key(data), num_tokens)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def decode(self, data: st.DataObject, tokens: list[int]) -> None:
        key = self.some_key(data)
        seq = self.model.live[key]
        for token in tokens:
            if seq.computed == len(seq.tokens):
                seq.tokens.append(token)
            self._run(key, 1)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        self.release(self.some_key(data))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        key = self.some_key(data)
        seq = self.model.live[key]
        self.release(key)
        self._admit(seq.tokens, seq.salt, self._match(seq.tokens, seq.salt))

    def release(self, key: str) -> None:
        self.cache.release(key)
        self.model.release(key)

    @rule(really=st.sampled_from([False, False, False, True]))
    def reset(self, really: bool) -> None:
        if not really:  # each time would leave nothing to match
            return
        self.cache.reset()
        while self.model.cached():
            self.model.free.add(self.model.evict())

    def numbers(self) -> tuple[int, int, int]:
        return self.cache.free_pages, self.cache.cached_pages, self.cache.held_pages

    @invariant()
    def the_manager_is_consistent(self) -> None:
        self.cache.check()

    @invariant()
    def the_numbers_are_the_models(self) -> None:
        cache, model = self.cache, self.model
        assert self.numbers() == (len(model.free), len(model.cached()), len(model.held()))
        assert sum(self.numbers()) == cache.total_pages
        assert cache.available_pages == cache.free_pages + cache.cached_pages
        for key, seq in model.live.items():
            assert cache.pages_of(key) == tuple(seq.pages)
            assert cache.num_pages(key) == len(seq.pages)

    @invariant()
    def every_ready_page_holds_its_prefix_and_can_be_matched(self) -> None:
        for salt, tokens in self.model.ready:
            longer = [*tokens, 0]  # match leaves a token to compute
            assert len(self._match(longer, salt).pages) == len(tokens) // self.model.block_size

    @invariant()
    def waiting_ends_with_the_announcement(self) -> None:
        announced = [id(announcement) for announcement in self.model.pending.values()]
        for node, announcement in self.watched.items():
            assert self.cache.is_pending(node) == (id(announcement) in announced)

    @invariant()
    def one_sequence_alone_can_have_the_whole_pool(self) -> None:
        """The engine admits what fits an empty pool, so nothing may cost a second page."""
        if len(self.model.live) == 1:
            seq = next(iter(self.model.live.values()))
            assert self.cache.available_pages + len(seq.pages) == self.cache.total_pages

    def teardown(self) -> None:
        """Everything comes back: no page is lost or kept after the last sequence and a reset."""
        if not hasattr(self, "cache"):
            return
        for key in list(self.model.live):
            self.release(key)
        self.cache.reset()
        assert self.numbers() == (self.cache.total_pages, 0, 0)
        self.cache.check()


class UncachedMachine(CacheMachine):
    """Without prefix caching the same model holds, with nothing ever ready or pending."""

    PREFIX_CACHING = False

    @invariant()
    def nothing_is_cached(self) -> None:
        assert self.cache.cached_pages == 0
        assert self.cache.match([0] * 9, "") == Match((), 0, None)


@pytest.mark.parametrize(
    ("machine", "examples", "steps"), [(CacheMachine, 250, 40), (UncachedMachine, 20, 30)]
)
def test_the_manager_equals_the_model(machine, examples, steps) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )


@pytest.mark.long
def test_the_manager_equals_the_model_for_long() -> None:
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=3000, stateful_step_count=80, deadline=None)
    )
