"""Open connections by peer, and the guard against clients that do not read.

Owns: the set of open transports and since when each has been full. Knows: uvicorn's protocol.
Does not know: what is sent on them.

A transport whose buffer is full pauses its writer until the client has read most of it. A pause
(or a closing transport's unsent rest) that lasts too long means a client that left its stream
unread: the connection is cut, and the writer behind it sees a disconnect.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toque.serve.failures import Failure


class Connections:
    """The open transports of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[asyncio.Transport, Any] = {}  # transport -> its peer name
        self._full_since_s: dict[asyncio.Transport, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, transport: asyncio.Transport, peer: Any) -> None:
        self._open[transport] = peer

    def closed(self, transport: asyncio.Transport) -> None:
        self._open.pop(transport, None)
        self._full_since_s.pop(transport, None)

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
        limit_s = self._clock() - timeout_s
        slow = [t for t, since_s in self._full_since_s.items() if since_s < limit_s]
        for transport in slow:
            self._abort(transport)
        return len(slow)

    def unsent_bytes(self) -> int:
        return sum(transport.get_write_buffer_size() for transport in self._open)

    def cut_all(self) -> None:
        for transport in list(self._open):
            self._abort(transport)

    def _abort(self, transport: asyncio.Transport) -> None:
        self.closed(transport)  # now, so that no connection is cut and counted twice
        transport.abort()


def _send_without_delay(transport: asyncio.Transport) -> None:
    """asyncio does this only for sockets made with proto=IPPROTO_TCP, which a bound one may not be.

    Without it a small write waits for the client's delayed acknowledgement: 40 ms per answer.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def tracked_protocol(connections: Connections) -> type[HttpToolsProtocol]:
    """uvicorn's HTTP protocol, registering its transports and answering in our error shape."""

    class TrackedProtocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            _send_without_delay(transport)
            connections.opened(transport, self.client)

        def connection_lost(self, exc: Exception | None) -> None:
            connections.closed(self.transport)
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            connections.full(self.transport)
            super().pause_writing()

        def resume_writing(self) -> None:
            connections.drained(self.transport)
            super().resume_writing()

        def send_400_response(self, msg: str) -> None:
            body = Failure(400, "this is not a valid HTTP request").body()
            head = (
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            self.transport.write(head + body)
            self.transport.close()

    return TrackedProtocol
