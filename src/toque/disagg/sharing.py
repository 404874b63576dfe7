"""What makes an engine one of several: a pool that others can read, a port around its channel.

Owns: the shared pool and its listeners. Knows: every transport by name.
Does not know: models, kernels, the scheduler.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from toque.disagg.exporter import Exporter
from toque.disagg.importer import Importer
from toque.disagg.order import Sharing
from toque.disagg.roles import RolePort
from toque.disagg.shm import SCHEME as SHM
from toque.disagg.shm import SharedPeer, SharedPool
from toque.disagg.tcp import PageServer, TcpPeer
from toque.disagg.transport import Listener, Peer, PoolView, TransferError
from toque.ipc import EnginePort
from toque.memory.manager import CacheManager
from toque.types import Source

log = logging.getLogger(__name__)


class SharedEngine:
    """One engine's part of the sharing. Made before its KV pool, whose memory it provides."""

    def __init__(
        self, sharing: Sharing, layer_bytes: Sequence[int], total_pages: int, layout: str
    ) -> None:
        self._sharing = sharing
        engine = secrets.token_hex(16)
        pool = SharedPool(engine, layer_bytes, total_pages, sharing.secret)
        self.pool: PoolView = pool.view
        self._listeners: list[Listener] = []
        if sharing.transport != "tcp":
            self._listeners.append(pool)
        if sharing.transport != "shm":
            self._listeners.append(PageServer(pool.view, sharing.secret, sharing.host))
        self.source = Source(
            engine=engine,
            addresses=tuple(listener.address for listener in self._listeners),
            layout=layout,
            layer_bytes=tuple(layer_bytes),
            total_pages=total_pages,
        )

    def port(self, port: EnginePort, cache: CacheManager) -> RolePort:
        exporter = Exporter(cache, self.pool)
        importer = Importer(cache, self.pool, self.connect)
        return RolePort(port, exporter, importer, tuple(self._listeners))

    def connect(self, source: Source) -> Peer:
        """A peer for another engine's pool, over the first of its addresses that can be used.
        Raises TransferError: pages of another layout would be other numbers."""
        if source.layout != self.source.layout:
            raise TransferError(f"the pages of {source.layout} are not those of this engine")
        why = "it has no address for this transport"
        for address in source.addresses:
            try:
                if address.startswith(SHM):
                    if self._sharing.transport != "tcp":
                        return SharedPeer(address, source, self._sharing.secret)
                elif self._sharing.transport != "shm":
                    return TcpPeer(address, self._sharing.secret)
            except TransferError as error:
                why = str(error)
        log.warning("pages of another engine cannot be reached: %s", why)
        raise TransferError(why)
