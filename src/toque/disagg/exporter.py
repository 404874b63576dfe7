"""The prefill side of a hand-over: computed pages are announced as they come, and kept on lease.

Owns: which prefills run, which pages are announced, leases and their ends.
Knows: the cache manager, the pool's bytes. Does not know: the scheduler, transports, who reads.

    Prefill --> running --(after every step: PagesReady of what is new)--> finished: HANDOFF
                                                                           leased --> Release,
                                                                           or lease_s is over

A lease is a holding of the cache manager under a name of its own: it keeps the pages like a running
sequence would, so there is no second way to count them. Pages are announced while their request
runs and holds them; the last announcement names all that the lease keeps, from the first one on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from toque.disagg.names import page_names
from toque.disagg.transport import PoolView
from toque.memory.manager import CacheManager
from toque.types import (
    Event,
    Finished,
    FinishReason,
    Kept,
    PageRef,
    PagesReady,
    Prefill,
    Refused,
    Request,
)


@dataclass(slots=True)
class _Prefill:
    request: Request
    lease_s: float
    names: list[bytes]  # of its full pages
    refs: list[PageRef] = field(default_factory=list)  # announced so far, in order of position


@dataclass(frozen=True, slots=True)
class _Lease:
    began_s: float
    end_s: float


class Exporter:
    """Called from the engine's loop, between steps."""

    def __init__(self, cache: CacheManager, pool: PoolView) -> None:
        self._cache = cache
        self._pool = pool
        self._running: dict[str, _Prefill] = {}
        self._leases: dict[str, _Lease] = {}
        self._released = self._expired = 0

    def kept(self, now_s: float) -> Kept:
        """In numbers; of what comes from elsewhere it knows nothing."""
        oldest_s = min((lease.began_s for lease in self._leases.values()), default=now_s)
        return Kept(
            leases=len(self._leases),
            oldest_lease_s=now_s - oldest_s,
            released=self._released,
            expired=self._expired,
        )

    def begin(self, order: Prefill) -> Request:
        """The request that the engine is to run: it reads its prompt, and that is all."""
        request = order.request
        names = page_names(request.prompt, request.cache_salt, self._cache.block_size)
        self._running[request.id] = _Prefill(request, order.lease_s, names)
        return request

    def release(self, request_id: str) -> None:
        """The pages are no longer wanted: cached from now on, evicted when others need them.
        A lease that has ended already, or never began, is no error: the two crossed."""
        if request_id in self._leases:
            self._end(request_id)
            self._released += 1

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over."""
        for request_id in [i for i, lease in self._leases.items() if lease.end_s <= now_s]:
            self._end(request_id)
            self._expired += 1

    def _end(self, request_id: str) -> None:
        del self._leases[request_id]
        self._cache.release(_key(request_id))

    def after_step(self, events: tuple[Event, ...], now_s: float) -> list[PagesReady]:
        """What can be read since the last call. `events` are those of the step just committed."""
        ended = {e.id: e for e in events if isinstance(e, Finished | Refused)}
        out: list[PagesReady] = []
        for request_id in list(self._running):
            prefill = self._running[request_id]
            event = ended.get(request_id)
            if event is None:
                fresh = self._fresh(prefill)
            else:
                del self._running[request_id]
                whole = isinstance(event, Finished) and event.reason is FinishReason.LENGTH
                fresh = (
                    self._lease(prefill, now_s)
                    if whole
                    else PagesReady(id=request_id, first=0, pages=(), last=True)
                )
            if fresh is not None:
                out.append(fresh)
        return out

    def _fresh(self, prefill: _Prefill) -> PagesReady | None:
        """Pages that were computed since the last announcement."""
        pages = self._cache.computed_pages_of(prefill.request.id)
        first = len(prefill.refs)
        if len(pages) <= first:
            return None
        fresh = zip(pages[first:], prefill.names[first:], strict=False)  # a full page has a name
        prefill.refs += [self._pool.reference(page, name) for page, name in fresh]
        return PagesReady(id=prefill.request.id, first=first, pages=tuple(prefill.refs[first:]))

    def _lease(self, prefill: _Prefill, now_s: float) -> PagesReady:
        """Keep all that the tree has of the prompt. Its request has just let go of it, and nothing
        was allocated since: what it computed is there, in its own pages or in equal ones."""
        request = prefill.request
        tokens = (*request.prompt, 0)  # a match leaves at least one token to compute
        match = self._cache.match(tokens, request.cache_salt)
        self._cache.admit(_key(request.id), tokens, request.cache_salt, match, guest=True)
        self._leases[request.id] = _Lease(now_s, now_s + prefill.lease_s)
        known = {ref.page: ref for ref in prefill.refs}
        kept = zip(match.pages, prefill.names, strict=False)
        refs = tuple(self._kept(page, name, known) for page, name in kept)
        return PagesReady(id=request.id, first=0, pages=refs, last=True)

    def _kept(self, page: int, name: bytes, known: dict[int, PageRef]) -> PageRef:
        """The reference announced before, if it is still of the same use of the page."""
        ref = known.get(page)
        if ref is not None and ref.epoch == self._cache.epoch(page):
            return ref
        return self._pool.reference(page, name)


def _key(request_id: str) -> str:
    return f"lease of {request_id}"
