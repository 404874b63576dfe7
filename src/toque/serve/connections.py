"""Open connections by peer, and the guard against clients that do not read, or write too slowly.

Owns: the set of open transports, since when each has been full, since when its request is coming.
Knows: asyncio's transports. Does not know: HTTP.

A transport whose buffer is full pauses its writer until the client has read most of it. A pause
(or a closing transport's unsent rest) that lasts too long means a client that left its stream
unread: the connection is cut, and the writer behind it sees a disconnect. A request that takes too
long to arrive, first byte to last, is cut too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


class Connections:
    """The open transports of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[asyncio.Transport, Any] = {}  # transport -> its peer name
        self._full_since_s: dict[asyncio.Transport, float] = {}
        self._coming_since_s: dict[asyncio.Transport, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, transport: asyncio.Transport, peer: Any) -> None:
        self._open[transport] = peer
        self.coming(transport)  # who connects means to ask

    def coming(self, transport: asyncio.Transport) -> None:
        """A request begins to arrive."""
        self._coming_since_s.setdefault(transport, self._clock())

    def arrived(self, transport: asyncio.Transport) -> None:
        self._coming_since_s.pop(transport, None)

    def closed(self, transport: asyncio.Transport) -> None:
        self._open.pop(transport, None)
        self._full_since_s.pop(transport, None)
        self._coming_since_s.pop(transport, None)

    def full(self, transport: asyncio.Transport) -> None:
        self._full_since_s.setdefault(transport, self._clock())

    def drained(self, transport: asyncio.Transport) -> None:
        self._full_since_s.pop(transport, None)

    def cut(self, peer: Any) -> None:
        """Drop the connection of a peer at once, unsent bytes included."""
        for transport in [t for t, p in self._open.items() if p == peer]:
            self._abort(transport)

    def cut_slow(self, timeout_s: float) -> int:
        """Drop connections that have been full for too long; returns how many."""
        for transport in self._open:
            if transport.is_closing():
                self.full(transport)  # closed by us: only its unread rest keeps it open
        return self._cut_since(self._full_since_s, timeout_s)

    def cut_late(self, timeout_s: float) -> int:
        """Drop connections whose request has been coming for too long; returns how many."""
        return self._cut_since(self._coming_since_s, timeout_s)

    def _cut_since(self, since_s: dict[asyncio.Transport, float], timeout_s: float) -> int:
        limit_s = self._clock() - timeout_s
        over = [transport for transport, begun_s in since_s.items() if begun_s < limit_s]
        for transport in over:
            self._abort(transport)
        return len(over)

    def unsent_bytes(self) -> int:
        return sum(transport.get_write_buffer_size() for transport in self._open)

    def cut_all(self) -> None:
        for transport in list(self._open):
            self._abort(transport)

    def _abort(self, transport: asyncio.Transport) -> None:
        self.closed(transport)  # now, so that no connection is cut and counted twice
        transport.abort()
