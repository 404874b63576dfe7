"""Handing pages over: whatever goes wrong on the way, what is in the tree is what belongs there.

The oracle: a page's bytes are a function of all tokens up to its end, as keys and values are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toque.disagg.exporter import Exporter
from toque.disagg.importer import Importer
from toque.disagg.transport import Bytes, PoolView, TransferError
from toque.memory.manager import CacheManager
from toque.types import (
    Fetch,
    Finished,
    FinishReason,
    PageRef,
    PagesReady,
    Prefill,
    Request,
    SamplingParams,
    Source,
    Times,
    Usage,
)

BLOCK, PAGES, LAYERS = 4, 24, (24, 8)
SOURCE = Source(engine="p", addresses=(), layout="l", layer_bytes=LAYERS, total_pages=PAGES)


def contents(tokens: Sequence[int], index: int) -> Bytes:
    """What page `index` of a sequence holds."""
    seed = hash(tuple(tokens[: (index + 1) * BLOCK])) & 0xFFFFFFFF
    return np.random.default_rng(seed).integers(0, 256, sum(LAYERS), dtype=np.uint8)


class Side:
    """A cache manager and its pool."""

    def __init__(self) -> None:
        epochs = memoryview(bytearray(8 * PAGES)).cast("q")
        self.pool = PoolView(
            tuple(np.zeros((PAGES, size), dtype=np.uint8) for size in LAYERS), epochs
        )
        self.cache = CacheManager(PAGES, BLOCK, epochs=epochs)

    def check_contents(self, tokens: Sequence[int], salt: str = "") -> int:
        """Every page of the tree that these tokens would hit; returns how many."""
        pages = self.cache.match((*tokens, 0), salt).pages
        row = np.empty(sum(LAYERS), dtype=np.uint8)
        for index, page in enumerate(pages):
            self.pool.gather(page, row)
            assert (row == contents(tokens, index)).all(), f"page {index} holds something else"
        return len(pages)


class Prefiller(Side):
    """Computes prompts, some pages at a time, as an engine would."""

    def __init__(self) -> None:
        super().__init__()
        self.exporter = Exporter(self.cache, self.pool)

    def run(self, request: Request, pages_per_step: int) -> list[PagesReady]:
        """All announcements of one prompt."""
        self.exporter.begin(Prefill(request=request, lease_s=30.0))
        tokens, out = request.prompt, []
        match = self.cache.match(tokens, "")
        self.cache.admit(request.id, tokens, "", match)
        assert self.cache.grow(request.id, len(tokens)) is not None
        done = match.num_tokens
        while done < len(tokens):
            end = min(len(tokens), done + pages_per_step * BLOCK)
            for index in range(done // BLOCK, end // BLOCK):
                self.pool.scatter(self.cache.pages_of(request.id)[index], contents(tokens, index))
            done = end
            self.cache.commit(request.id, tokens, done)
            if done < len(tokens):
                out += self.exporter.after_step((), 0.0)
        self.cache.release(request.id)
        end_event = Finished(
            id=request.id, reason=FinishReason.LENGTH, usage=Usage(prompt_tokens=len(tokens)),
            times=Times(arrived_s=0.0),
        )  # fmt: skip
        return out + self.exporter.after_step((end_event,), 0.0)


@dataclass
class Script:
    """What goes wrong in each pull, in order; afterwards nothing does."""

    faults: list[str]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> str:
        with self.lock:
            return self.faults.pop(0) if self.faults else "none"


class FaultyPeer:
    name = "test"

    def __init__(self, pool: PoolView, script: Script) -> None:
        self._pool, self._script = pool, script
        self.closed = False

    def pull(self, refs: Sequence[PageRef], out: Bytes, deadline_s: float) -> None:
        fault = self._script.next()
        if fault == "lost":
            raise TransferError("the peer closed the connection")
        for ref, row in zip(refs, out, strict=True):
            self._pool.gather(ref.page, row)
        if fault == "corrupt":
            out[len(out) // 2, 7] ^= 4
        elif fault == "swapped":
            out[:] = out[::-1].copy()
        elif fault == "torn":
            out[-1, len(out[-1]) // 2 :] = 0

    def fence(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Clock:
    """Stands still but for what a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Decoder(Side):
    def __init__(self, source: PoolView, faults: list[str]) -> None:
        super().__init__()
        self.clock = Clock()
        self.peers: list[FaultyPeer] = []
        script = Script(faults)

        def connect(_: Source) -> FaultyPeer:
            self.peers.append(FaultyPeer(source, script))
            return self.peers[-1]

        self.importer = Importer(self.cache, self.pool, connect, self.clock)

    def settle(self, fetched_id: str) -> None:
        """Until the request can go on. Pulls are threads: they get real time, the deadline gets
        the clock's."""
        end = time.monotonic() + 60
        while True:
            requests, told = self.importer.poll()
            self.cache.check()
            if requests:
                assert [r.id for r in requests] == [t.id for t in told] == [fetched_id]
                (end_of,) = told
                pages = end_of.cached_pages + end_of.moved_pages + end_of.missing_pages
                assert pages == (len(requests[0].prompt) - 1) // BLOCK
                assert requests[0].moved_tokens == end_of.moved_pages * BLOCK
                return
            fetch = self.importer._fetches[fetched_id]
            if not fetch.pulls:
                self.clock.now_s += 20.0  # nothing is under way: only the deadline can end it
            assert time.monotonic() < end
            time.sleep(0.001)


def request(name: str, tokens: Sequence[int]) -> Request:
    return Request(
        id=name, prompt=tuple(tokens), sampling=SamplingParams(max_tokens=0), arrived_s=0.0
    )


FAULTS = st.lists(st.sampled_from(["none", "lost", "corrupt", "swapped", "torn"]), max_size=8)
NEWS = st.lists(st.sampled_from(["pass", "drop", "twice", "last", "swap"]), max_size=12)
PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 41), st.integers(1, 5)), min_size=1, max_size=6
)


def delivered(news: list[PagesReady], fates: list[str]) -> list[PagesReady]:
    """The source's announcements as a bad link delivers them."""
    out: list[PagesReady] = []
    for message in news:
        fate = fates.pop(0) if fates else "pass"
        if fate == "drop" or (fate == "last" and message.last):
            continue
        out += [message, message] if fate == "twice" else [message]
        if fate == "swap" and len(out) > 1:
            out[-1], out[-2] = out[-2], out[-1]
    return out


@given(PROMPTS, FAULTS, NEWS)
def test_what_enters_the_tree_is_right_whatever_happens(
    prompts: list[tuple[int, int, int]], faults: list[str], fates: list[str]
) -> None:
    """Prompts that share beginnings, announcements lost, doubled and out of order, pulls that fail
    or bring wrong bytes: every request goes on, every page of the tree is right, and at the end
    nobody holds a page on either side."""
    source = Prefiller()
    sink = Decoder(source.pool, list(faults))
    fates = list(fates)
    for number, (family, length, step) in enumerate(prompts):
        tokens = [family * 100 + place for place in range(length)]
        name = f"r{number}"
        sink.importer.begin(Fetch(request=request(name, tokens), source=SOURCE, patience_s=60.0))
        sink.importer.poll() if number % 2 else None
        whole = (length - 1) // BLOCK * BLOCK
        news = source.run(request(name, tokens[:whole]), step) if whole else []
        for message in delivered(news, fates):
            sink.importer.ready(message)
        if name in sink.importer._fetches:
            sink.settle(name)
        assert sink.check_contents(tokens) <= length // BLOCK
        source.exporter.release(name)
        source.cache.check()
        assert source.cache.held_pages == sink.cache.held_pages == 0
    sink.importer.close()


def test_nothing_wrong_moves_everything() -> None:
    """The property above would hold for an importer that never imports."""
    source = Prefiller()
    sink = Decoder(source.pool, [])
    tokens = list(range(38))
    sink.importer.begin(Fetch(request=request("a", tokens), source=SOURCE, patience_s=60.0))
    for message in source.run(request("a", tokens[:36]), 2):
        sink.importer.poll()
        sink.importer.ready(message)
    sink.settle("a")
    assert sink.check_contents(tokens) == 9


def test_a_peer_that_is_not_asked_any_more_is_let_go() -> None:
    """Whoever is gone says nothing; its pool would stay mapped as long as this engine lives."""
    source = Prefiller()
    sink = Decoder(source.pool, [])
    for number, pause_s in enumerate((0.0, 50.0, 200.0)):
        sink.clock.now_s += pause_s
        sink.importer.poll()
        end = time.monotonic() + 60
        while pause_s == 200.0 and not all(peer.closed for peer in sink.peers):
            assert time.monotonic() < end, "nobody closed it"
        name, tokens = f"r{number}", list(range(100 * number, 100 * number + 38))
        fetch = Fetch(request=request(name, tokens), source=SOURCE, patience_s=60.0)
        sink.importer.begin(fetch)
        sink.importer.poll()
        for message in source.run(request(name, tokens[:36]), 9):
            sink.importer.ready(message)
        sink.settle(name)
        assert sink.check_contents(tokens) == 9
        source.exporter.release(name)
    sink.importer.close()


def test_only_missing_pages_travel() -> None:
    source = Prefiller()
    sink = Decoder(source.pool, [])
    long, longer = list(range(18)), list(range(38))
    for name, tokens in (("a", long), ("b", longer), ("c", longer)):
        sink.importer.begin(Fetch(request=request(name, tokens), source=SOURCE, patience_s=60.0))
        whole = (len(tokens) - 1) // BLOCK * BLOCK
        told = sink.importer.poll()[1]
        if name == "c":  # all is here: nothing is asked for
            assert told[0].cached_pages == 9 and told[0].moved_pages == 0
            return
        for message in source.run(request(name, tokens[:whole]), 3):
            sink.importer.ready(message)
        end = time.monotonic() + 60
        while not told:
            told = sink.importer.poll()[1]
            assert time.monotonic() < end
        cached = {"a": 0, "b": 4}[name]
        assert (told[0].cached_pages, told[0].moved_pages) == (cached, whole // BLOCK - cached)
        source.exporter.release(name)


def test_a_lease_keeps_pages_and_ends() -> None:
    """By release or by time; late and double releases change nothing."""
    source = Prefiller()
    tokens = list(range(16))
    (last,) = source.run(request("a", tokens), 9)
    assert last.last and len(last.pages) == 4
    assert source.cache.held_pages == 4 and source.cache.guests == 1
    source.exporter.expire(29.0)
    assert source.cache.held_pages == 4
    source.exporter.expire(31.0)
    assert source.cache.held_pages == 0 and source.exporter.kept(31.0).expired == 1
    source.exporter.release("a")
    source.exporter.release("never")
    source.cache.check()


def test_an_abort_while_pages_are_under_way() -> None:
    """The pull ends when it ends; what it brings is for nobody, and another request may have the
    pages by then."""
    source = Prefiller()
    sink = Decoder(source.pool, [])
    tokens, others = list(range(38)), list(range(500, 596))
    sink.importer.begin(Fetch(request=request("a", tokens), source=SOURCE, patience_s=60.0))
    sink.importer.poll()
    for message in source.run(request("a", tokens[:36]), 9):
        sink.importer.ready(message)
    dropped = sink.importer.abort("a")
    assert dropped is not None and dropped.id == "a" and sink.importer.abort("a") is None
    assert sink.cache.held_pages == 0
    match = sink.cache.match(others, "")
    sink.cache.admit("b", others, "", match)
    pages = sink.cache.grow("b", 96)
    assert pages is not None and len(pages) == PAGES  # every page there is
    for index, page in enumerate(pages):
        sink.pool.scatter(page, contents(others, index))
    end = time.monotonic() + 60
    while sink.importer._pulled.empty():
        assert time.monotonic() < end
    sink.importer.poll()
    sink.cache.commit("b", others, 96)
    assert sink.check_contents(others) == PAGES
    sink.importer.close()


def test_a_fetch_without_room_waits_and_then_gives_up() -> None:
    """Its deadline holds while it is parked, too: the request goes on and computes by itself."""
    source = Prefiller()
    sink = Decoder(source.pool, [])
    others = list(range(500, 596))
    match = sink.cache.match(others, "")
    sink.cache.admit("b", others, "", match)
    assert sink.cache.grow("b", 96) is not None
    sink.importer.begin(
        Fetch(request=request("a", list(range(38))), source=SOURCE, patience_s=60.0)
    )
    assert sink.importer.poll() == ([], [])
    sink.clock.now_s = 61.0
    requests, (told,) = sink.importer.poll()
    assert [r.id for r in requests] == ["a"] and told.missing_pages == 9
    assert not sink.importer.busy
