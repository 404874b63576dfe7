"""Threads that pull pages from other engines, so that the engine's loop never waits for a network.

Owns: a thread and its peers (Puller). Knows: transports' peers, checksums.
Does not know: fetches, trees, pools: what it brings lies in buffers of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from toque.disagg.transport import Bytes, Peer, TransferError, verified
from toque.types import PageFault, PageRef, Source

Connect = Callable[[Source], Peer]


@dataclass(frozen=True, slots=True)
class Pull:
    """Some pages of a fetch, and until when they are of use."""

    id: str
    began_s: float  # of the fetch: an id may come again
    source: Source
    deadline_s: float
    over: threading.Event  # the fetch is: nobody wants them any more
    indices: tuple[int, ...]  # places of the pages in the prompt
    refs: tuple[PageRef, ...]
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of it: rows that verified, by index of their page."""

    pull: Pull
    rows: dict[int, Bytes] = field(default_factory=dict)
    transport: str = ""
    fault: PageFault = PageFault.LOST  # of those that are not among the rows


class Puller:
    """One thread and its connections: a peer serves one pull at a time."""

    def __init__(
        self, connect: Connect, clock: Callable[[], float], bring: Callable[[Pulled], None]
    ) -> None:
        """`bring` is called in the thread, once for each pull."""
        self._connect = connect
        self._clock = clock
        self._bring = bring
        self._used_s: dict[str, float] = {}  # by engine, as the peers are
        self._peers: dict[str, Peer] = {}
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")

    def pull(self, pull: Pull) -> None:
        self._thread.submit(self._pull, pull)

    def let_go(self, before_s: float) -> None:
        """Peers that were used last before this moment."""
        if not self._closed and any(used_s < before_s for used_s in list(self._used_s.values())):
            self._thread.submit(self._let_go, before_s)

    def close(self) -> None:
        """A pull under way ends early: an engine that stops does not wait for another one."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        for peer in list(self._peers.values()):
            peer.close()

    # ------------------------------------------------------------------------- in the thread

    def _pull(self, pull: Pull) -> None:
        pulled = Pulled(pull, fault=PageFault.LATE)
        try:
            if not pull.over.is_set():  # while it waited for its turn
                pulled = Pulled(pull)
                pulled = self._pulled(pull)
        except TransferError as error:
            pulled = Pulled(pull, fault=error.fault)
            self._forget(pull.source.engine)
        finally:
            if self._closed:
                self._forget(pull.source.engine)
            self._bring(pulled)

    def _pulled(self, pull: Pull) -> Pulled:
        peer = self._peer(pull.source)
        data = np.empty((len(pull.refs), pull.source.page_bytes), dtype=np.uint8)
        peer.pull(pull.refs, data, pull.deadline_s)
        peer.fence()
        good = verified(pull.refs, data, pull.names)
        rows = {i: row for i, row, fine in zip(pull.indices, data, good, strict=True) if fine}
        return Pulled(pull, rows, peer.name, PageFault.CORRUPT)

    def _peer(self, source: Source) -> Peer:
        if source.engine not in self._peers:
            self._peers[source.engine] = self._connect(source)
        self._used_s[source.engine] = self._clock()
        return self._peers[source.engine]

    def _let_go(self, before_s: float) -> None:
        for engine, used_s in list(self._used_s.items()):
            if used_s < before_s:
                self._forget(engine)

    def _forget(self, engine: str) -> None:
        self._used_s.pop(engine, None)
        peer = self._peers.pop(engine, None)
        if peer is not None:
            peer.close()
