"""The decode side of a hand-over: pages computed elsewhere enter this engine's prefix tree.

Owns: fetches in progress, their deadlines. Knows: the cache manager, the pool's bytes, pullers.
Does not know: the scheduler, routing.

    Fetch --> parked --> open -------------------------------------> over: the request goes on
              no room,   pages reserved and announced in the tree;   what came stays in the tree
              or another pulled ones are verified, copied in and     as a cached prefix, the rest
              computes   committed in order of position              vanishes from it
              the pages

An open fetch is a holding of the cache manager, exactly like a running sequence that computes the
same pages: other requests with this prefix wait for it, and when it is released they find what came
and compute what did not. One deadline, counted from the Fetch, ends every state. Pulls write into
buffers of their own; one that comes too late for its fetch is dropped, not copied.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from msgspec import structs

from toque.disagg.names import page_names
from toque.disagg.pullers import Connect, Pull, Pulled, Puller
from toque.disagg.transport import Bytes, PoolView
from toque.memory.manager import CacheManager
from toque.types import (
    Fetch,
    Fetched,
    PageFault,
    PageRef,
    PagesReady,
    Request,
    TokenId,
)

PULLERS = 2  # pulls at a time
PEER_IDLE_S = 60.0  # a peer that nothing was asked of for so long is let go
BATCH_PAGES = 64  # of one pull: what is verified and usable at a time


@dataclass(slots=True)
class _Fetch:
    order: Fetch
    began_s: float
    names: list[bytes]  # of the pages wanted: all full ones that leave a token to compute
    cached: int = 0  # of these, here when it was opened
    done: int = 0  # in the tree, cached ones included
    opened: bool = False
    arrived: dict[int, Bytes] = field(default_factory=dict)  # by index: verified, not in order yet
    asked: set[int] = field(default_factory=set)  # indices that a pull is under way for
    failed: Counter[str] = field(default_factory=Counter)  # PageFault -> pages
    pulls: int = 0  # under way
    complete: bool = False  # the source has said that there is no more
    last: tuple[PageRef, ...] = ()  # all that the source keeps
    retried: bool = False
    transport: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> str:
        return self.order.request.id

    @property
    def tokens(self) -> tuple[TokenId, ...]:
        """All that are known: a request that moves brings output along."""
        return self.order.request.prompt + self.order.request.output

    @property
    def wanted(self) -> int:
        return len(self.names)

    @property
    def key(self) -> str:
        return f"fetch of {self.id}"

    @property
    def deadline_s(self) -> float:
        return self.began_s + self.order.patience_s


class Importer:
    """Called from the engine's loop, between steps; pulls run in threads."""

    def __init__(
        self,
        cache: CacheManager,
        pool: PoolView,
        connect: Connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._connect = connect
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}
        self._early: dict[str, list[PagesReady]] = {}  # for fetches that are parked
        self._pulled: SimpleQueue[Pulled] = SimpleQueue()
        self._pullers: list[Puller] = [
            Puller(connect, clock, self._pulled.put) for _ in range(PULLERS)
        ]
        self._next_puller = 0
        self._looked_s = clock()
        self.discarded_pages = 0  # came for a fetch that was over

    @property
    def busy(self) -> bool:
        """Whether something may happen here without a message."""
        return bool(self._fetches)

    def begin(self, order: Fetch) -> None:
        request = order.request
        tokens = (request.prompt + request.output)[:-1]
        names = page_names(tokens, request.cache_salt, self._cache.block_size)
        fetch = _Fetch(order, self._clock(), names)
        self._fetches[fetch.id] = fetch
        self._early[fetch.id] = []

    def ready(self, message: PagesReady) -> None:
        """The source has more pages; of a fetch that is over, nobody wants to know."""
        fetch = self._fetches.get(message.id)
        if fetch is None:
            return
        if not fetch.opened:
            self._early[message.id].append(message)
        else:
            self._take_note(fetch, message)

    def abort(self, request_id: str) -> Request | None:
        """End a fetch; returns its request, None if there is no such fetch."""
        fetch = self._fetches.get(request_id)
        if fetch is None:
            return None
        self._close(fetch)
        return fetch.order.request

    def poll(self) -> tuple[list[Request], list[Fetched]]:
        """Requests that can go on now, and what became of their fetches."""
        self._drain()
        over = [fetch for fetch in list(self._fetches.values()) if self._advance(fetch)]
        told = [self._told(fetch) for fetch in over]
        for fetch in over:
            self._close(fetch)
        self._let_go()
        return [self._going_on(fetch) for fetch in over], told

    def close(self) -> None:
        for puller in self._pullers:
            puller.close()

    def _let_go(self) -> None:
        """An engine that is gone tells nobody, and its pool would stay in memory for ever."""
        now_s = self._clock()
        if now_s >= self._looked_s + PEER_IDLE_S / 2:
            self._looked_s = now_s
            for puller in self._pullers:
                puller.let_go(now_s - PEER_IDLE_S)

    # --------------------------------------------------------------------------------- states

    def _advance(self, fetch: _Fetch) -> bool:
        """One look at a fetch; true when its request can go on."""
        if self._clock() >= fetch.deadline_s:
            return True
        if not fetch.opened:
            return self._open(fetch)
        if fetch.done == fetch.wanted:
            return True
        if fetch.complete and not fetch.pulls:
            return not self._retry(fetch)
        return False

    def _open(self, fetch: _Fetch) -> bool:
        """Reserve and announce the pages; true if there is nothing to wait for."""
        salt = fetch.order.request.cache_salt
        match = self._cache.match(fetch.tokens, salt)
        if len(match.pages) == fetch.wanted:
            fetch.cached = fetch.done = fetch.wanted
            return True
        missing = fetch.wanted - len(match.pages)
        if match.pending is not None or not self._cache.fits(match, missing):
            return False  # parked: somebody computes them, or there is no room yet
        tokens = fetch.tokens[: fetch.wanted * self._cache.block_size]
        self._cache.admit(fetch.key, (*tokens, 0), salt, match, guest=True)
        pages = self._cache.grow(fetch.key, len(tokens))
        assert pages is not None  # they fitted
        fetch.opened = True
        fetch.cached = fetch.done = len(match.pages)
        for message in self._early.pop(fetch.id):
            self._take_note(fetch, message)
        return False

    def _take_note(self, fetch: _Fetch, message: PagesReady) -> None:
        if message.last:
            fetch.complete, fetch.last = True, message.pages[: fetch.wanted]
        self._ask(fetch, dict(enumerate(message.pages[: fetch.wanted], message.first)))

    def _retry(self, fetch: _Fetch) -> bool:
        """Once, from the pages that the source has kept to the end: what was announced earlier may
        have moved since. True if something is asked for again."""
        if fetch.retried:
            return False
        fetch.retried = True
        self._ask(fetch, dict(enumerate(fetch.last)))
        return fetch.pulls > 0

    def _ask(self, fetch: _Fetch, refs: dict[int, PageRef]) -> None:
        missing = [
            index
            for index in sorted(refs)
            if fetch.done <= index < fetch.wanted
            and index not in fetch.arrived
            and index not in fetch.asked
        ]
        for begin in range(0, len(missing), BATCH_PAGES):
            indices = tuple(missing[begin : begin + BATCH_PAGES])
            fetch.asked.update(indices)
            fetch.pulls += 1
            self._puller().pull(
                Pull(
                    id=fetch.id,
                    began_s=fetch.began_s,
                    source=fetch.order.source,
                    deadline_s=fetch.deadline_s,
                    over=fetch.over,
                    indices=indices,
                    refs=tuple(refs[index] for index in indices),
                    names=tuple(fetch.names[index] for index in indices),
                )
            )

    def _puller(self) -> Puller:
        self._next_puller = (self._next_puller + 1) % len(self._pullers)
        return self._pullers[self._next_puller]

    # -------------------------------------------------------------------------------- arrivals

    def _drain(self) -> None:
        while True:
            try:
                pulled = self._pulled.get_nowait()
            except Empty:
                return
            fetch = self._fetches.get(pulled.pull.id)
            if fetch is not None and fetch.began_s == pulled.pull.began_s:
                self._arrive(fetch, pulled)
            else:
                self.discarded_pages += len(pulled.rows)

    def _arrive(self, fetch: _Fetch, pulled: Pulled) -> None:
        fetch.pulls -= 1
        fetch.asked.difference_update(pulled.pull.indices)
        fetch.failed[pulled.fault] += len(pulled.pull.indices) - len(pulled.rows)
        fetch.arrived.update(pulled.rows)
        fetch.transport = pulled.transport or fetch.transport
        pages = self._cache.pages_of(fetch.key)
        before = fetch.done
        while fetch.done in fetch.arrived:
            self._pool.scatter(pages[fetch.done], fetch.arrived.pop(fetch.done))
            fetch.done += 1
        if fetch.done > before:
            self._cache.commit(fetch.key, fetch.tokens, fetch.done * self._cache.block_size)

    def _going_on(self, fetch: _Fetch) -> Request:
        moved_tokens = (fetch.done - fetch.cached) * self._cache.block_size
        return structs.replace(fetch.order.request, moved_tokens=moved_tokens)

    def _told(self, fetch: _Fetch) -> Fetched:
        moved, now_s = fetch.done - fetch.cached, self._clock()
        fetch.failed[PageFault.LATE] += len(fetch.asked)  # whatever comes of these pulls
        return Fetched(
            id=fetch.id,
            cached_pages=fetch.cached,
            moved_pages=moved,
            missing_pages=fetch.wanted - fetch.done,
            failed={fault: pages for fault, pages in fetch.failed.items() if pages},
            moved_bytes=moved * self._pool.page_bytes,
            seconds=now_s - fetch.began_s,
            ended_s=now_s,
            transport=fetch.transport,
            timed_out=fetch.done < fetch.wanted and now_s >= fetch.deadline_s,
        )

    def _close(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.id]
        fetch.over.set()
        self._early.pop(fetch.id, None)
        if fetch.opened:
            self._cache.release(fetch.key)
