"""HTTP/1.1 over one connection: uvicorn's protocol, with bounds on what a client may send.

Owns: the size of the head that is coming. Knows: uvicorn, Connections. Does not know: routes.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from toque.serve.connections import Connections
from toque.serve.failures import Failure

MAX_HEAD_BYTES = 64 << 10


def _send_without_delay(transport: asyncio.Transport) -> None:
    """asyncio does this only for sockets made with proto=IPPROTO_TCP, which a bound one may not be.

    Without it a small write waits for the client's delayed acknowledgement: 40 ms per answer.
    """
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TrackedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, registering its transports and answering in our error shape."""

    tracked: Connections
    _head_bytes = 0  # of the request that is coming
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _send_without_delay(transport)
        self.tracked.opened(transport, self.client)

    def connection_lost(self, exc: Exception | None) -> None:
        self.tracked.closed(self.transport)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self.tracked.full(self.transport)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.tracked.drained(self.transport)
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        # Counted before parsing: the parser itself would keep a header of any length.
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "the request's head is too large")

    def on_message_begin(self) -> None:
        self.tracked.coming(self.transport)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self.tracked.arrived(self.transport)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = Failure(status, message).body()
        head = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n"
            % (status, HTTPStatus(status).phrase.encode(), len(body))
        )
        self.transport.write(head + body)
        self.transport.close()


def tracked_protocol(connections: Connections) -> type[HttpToolsProtocol]:
    """uvicorn makes one per connection, of a class without arguments."""
    return type("Protocol", (TrackedProtocol,), {"tracked": connections})
