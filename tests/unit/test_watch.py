"""How long pages live, against a search through all that happened to them.

The machine of the manager's own test makes the history; the model of it says which pages were
evicted. What is watched is found by asking a second watch with nothing but allocations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from tests.unit.test_manager_machine import CacheMachine, Model
from toque.build import build_engine
from toque.ipc import InProcess
from toque.memory import CacheManager, Match
from toque.memory.watch import PageWatch, mixed
from toque.options import EngineOptions
from toque.types import PageLife

MOST = 3000  # allocations of one run of the machine


def watched_of(share: float) -> set[int]:
    """The numbers of the watched allocations, from 1: each page here is evicted at once."""
    watch, found = PageWatch(lambda: 0.0, share), set()
    for number in range(1, MOST):
        watch.allocated(number, number - 1)
        if watch.take():
            found.add(number - 1)
    return found


@dataclass
class ToldModel(Model):
    """Remembers what it evicted."""

    evicted: list[int] = field(default_factory=list)

    def evict(self) -> int:
        self.evicted.append(super().evict())
        return self.evicted[-1]

    def take_evicted(self) -> list[int]:
        taken, self.evicted = self.evicted, []
        return taken


class WatchedMachine(CacheMachine):
    SHARE = 1.0

    @initialize(total_pages=st.integers(3, 12), block_size=st.sampled_from([1, 1, 2, 3]))
    def start(self, total_pages: int, block_size: int) -> None:
        super().start(total_pages, block_size)
        self.now_s = 0.0
        self.watch = PageWatch(lambda: self.now_s, self.SHARE)
        self.cache = CacheManager(total_pages, block_size, watch=self.watch)
        self.model = ToldModel(block_size, set(range(total_pages)), caching=True)
        self.history: list[tuple[float, str, int, int]] = []  # when, what, page, number
        self.allocations = 0
        self.numbers_watched = watched_of(self.SHARE) if self.SHARE < 1 else set(range(MOST))
        self.told: list[PageLife] = []

    def _admit(self, tokens: list[int], salt: str, match: Match) -> str:
        self._pass()
        key = super()._admit(tokens, salt, match)
        self.history += [(self.now_s, "used", page, 0) for page in match.pages]
        return key

    def _grow(self, key: str, num_tokens: int) -> bool:
        self._pass()
        before = len(self.model.live[key].pages)
        grown = super()._grow(key, num_tokens)
        for page in self.model.take_evicted():
            self.history.append((self.now_s, "evicted", page, 0))
        for page in self.model.live[key].pages[before:]:
            self.allocations += 1
            self.history.append((self.now_s, "allocated", page, self.allocations))
        return grown

    def _pass(self) -> None:
        """Different spans, all of them whole: sums and differences are exact."""
        self.now_s += 1.0 + len(self.history) % 5

    def lives(self) -> list[PageLife]:
        found = []
        for place, (end_s, what, page, _) in enumerate(self.history):
            if what != "evicted":
                continue
            past = [event for event in self.history[:place] if event[2] == page]
            births = [at for at, event in enumerate(past) if event[1] == "allocated"]
            began_s, _, _, number = past[births[-1]]
            uses = [at_s for at_s, kind, _, _ in past[births[-1] :] if kind == "used"]
            gaps = [uses[at + 1] - uses[at] for at in range(len(uses) - 1)][-3:]
            if number in self.numbers_watched:
                idle_s = end_s - max([began_s, *uses])
                found.append(PageLife(end_s - began_s, idle_s, tuple(gaps)))
        return found

    @invariant()
    def each_life_is_told_once_as_it_was(self) -> None:
        self.model.take_evicted()  # by a reset, which is no eviction: nobody needed the pages
        self.told += self.watch.take()
        assert sorted(map(repr, self.told)) == sorted(map(repr, self.lives()))


class HalfWatchedMachine(WatchedMachine):
    SHARE = 0.5


@pytest.mark.parametrize("machine", [WatchedMachine, HalfWatchedMachine])
def test_lives_are_what_a_search_finds(machine) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


def test_a_life_by_hand() -> None:
    """Only the last four accesses are kept, and an allocation is none."""
    now = [5.0]
    watch = PageWatch(lambda: now[0], 1.0)
    watch.allocated(3, None)
    for at_s in (10.0, 11.0, 13.0, 17.0, 25.0):
        now[0] = at_s
        watch.used([3, 4])  # 4 was never allocated: it is not watched
    now[0] = 100.0
    watch.allocated(9, 3)
    assert watch.take() == (PageLife(95.0, 75.0, (2.0, 4.0, 8.0)),)
    assert watch.take() == ()
    now[0] = 101.0
    watch.allocated(3, 9)
    assert watch.take() == (PageLife(1.0, 1.0),)


def test_a_page_given_back_unevicted_begins_anew() -> None:
    now = [0.0]
    watch = PageWatch(lambda: now[0], 1.0)
    watch.allocated(0, None)
    watch.used([0])
    now[0] = 8.0
    watch.allocated(0, None)  # it was free again
    now[0] = 9.0
    watch.allocated(1, 0)
    assert watch.take() == (PageLife(1.0, 1.0),)


def test_the_share_holds_at_every_place_of_a_prompt() -> None:
    """One in a hundred of all, and of the first pages of prompts that have a hundred each."""
    most = int(0.01 * 2**64)
    everywhere = sum(mixed(number) < most for number in range(1, 100_001))
    first = sum(mixed(number) < most for number in range(1, 10_000_001, 100))
    assert 850 < everywhere < 1150 and 850 < first < 1150
    assert watched_of(0.25) == watched_of(0.25) < watched_of(0.5)
    assert not watched_of(1e-9)


def test_the_mixing_is_splitmix64() -> None:
    """The first outputs from state 0, as the generator's reference gives them."""
    known = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert tuple(mixed(number) for number in (1, 2, 3)) == known


@pytest.mark.parametrize(("asked", "watched"), [(False, False), (True, True)])
def test_an_engine_watches_when_it_is_told_to(
    tiny_config: Path, asked: bool, watched: bool
) -> None:
    options = EngineOptions(
        load_format="dummy",
        kernels="ref",
        kv_cache_memory_bytes=1 << 20,
        kv_cache_metrics=asked,
    )
    engine = build_engine(tiny_config, "tiny", options, InProcess().engine)
    assert (engine.core.scheduler.cache.watch is not None) == watched
    assert engine.config.watched_pages_share == (0.01 if asked else 0.0)
