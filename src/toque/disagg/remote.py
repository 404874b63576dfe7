"""The server's end of a session with an engine on another host.

Owns: the connection, what is known of the engine's clock. Knows: messages.
Does not know: requests, routing, what happens when the engine is lost.

ZeroMQ's own heartbeats find a host or process that does not answer, whatever the engine computes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor
from msgspec import structs

from toque import __version__
from toque.disagg.session import (
    PING_S,
    SILENT_S,
    Busy,
    ClockOffset,
    FromRemote,
    Join,
    Ping,
    Pong,
    keys,
    to_engine_clock,
    to_server_clock,
)
from toque.errors import EngineError
from toque.ipc import ServePort, end_monitor, heartbeats, monitor_of, next_word, prepared
from toque.types import EngineFailed, FromEngine, Hello, Shutdown, ToEngine

log = logging.getLogger("toque.serve")

REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
# Not MONITOR_STOPPED: the one who stops would wait until somebody takes it.
WATCHED = REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class RemotePort:
    """A ServePort over TCP. Made within a running event loop."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        model: str,
        server: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: HOST:PORT. `model`: identity of the server's checkpoint, which the engine's
        must be. `server`: a name that no other server has."""
        self.address = address
        self._model = model
        self._server = server
        self._told = False
        self._clock = clock
        self._offset = ClockOffset()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._decoder = msgspec.msgpack.Decoder(FromRemote)
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = prepared(zmq.asyncio.Socket(zmq.Context.instance(), zmq.DEALER))
        keys(secret, engine=False).put_on(self._socket, engine=False)
        heartbeats(self._socket, SILENT_S)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._monitor = monitor_of(self._socket, WATCHED)
        self._tasks = [asyncio.ensure_future(self._watch())]
        self._socket.connect(f"tcp://{address}")
        self._join()

    # --------------------------------------------------------------------------- as a ServePort

    def send(self, message: ToEngine) -> None:
        self._say(to_engine_clock(message, self._offset.ahead_s))

    async def receive(self) -> FromEngine:
        while True:
            message = self._decoder.decode(await next_word(self._socket, self._gone))
            match message:
                case Pong():
                    self._offset.learn(message, self._clock())
                    continue
                case Busy():
                    await self._join_later()
                    continue
                case EngineFailed():
                    raise EngineError(f"the engine at {self.address}: {message.message}")
                case Hello():
                    if message.model_identity != self._model:
                        raise EngineError(
                            f"the engine at {self.address} has other weights: {message.model_name} "
                            f"{message.model_identity}, the server {self._model}"
                        )
                    self._tasks.append(asyncio.ensure_future(self._ping()))
                    return structs.replace(message, pid=0)  # it means something there only
            return to_server_clock(message, self._offset.ahead_s)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        end_monitor(self._socket, self._monitor)
        self._socket.close()

    # ----------------------------------------------------------------------------- the connection

    def _say(self, message: ToEngine | Join | Ping) -> None:
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _join(self) -> None:
        self._say(Join(server=self._server, version=__version__, now_s=self._clock()))

    async def _join_later(self) -> None:
        """A server that was killed has its engine until its silence is noticed."""
        if not self._told:
            log.info("another server has the engine at %s: waiting for it", self.address)
        self._told = True
        await asyncio.wait((self._gone,), timeout=PING_S)
        self._join()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._say(Ping(now_s=self._clock()))

    async def _watch(self) -> None:
        """Completes `gone` when the connection is lost, or never came to be for want of the secret.
        A host that does not listen yet is waited for: an engine may start later than its server."""
        known, waiting = False, False
        while True:  # to the end: an event that nobody takes would block ZeroMQ's thread
            event = zmq.utils.monitor.parse_monitor_message(await self._monitor.recv_multipart())
            kind = event["event"]
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                known = True
            elif kind & REFUSED or (kind == zmq.EVENT_DISCONNECTED and not known):
                self._lost("did not take our secret, or is no engine of toque")
            elif kind == zmq.EVENT_DISCONNECTED:
                self._lost(f"is gone, or was silent for {SILENT_S:g} s")
            elif kind == zmq.EVENT_CLOSED and not waiting and not known:
                waiting = True
                log.info("nobody listens on %s yet: waiting for the engine", self.address)

    def _lost(self, what: str) -> None:
        if not self._gone.done():
            self._gone.set_result(f"the engine at {self.address} {what}")


class RemoteEngine:
    """A disagg.members.Launcher for an engine that others start and stop."""

    role = "unknown"  # its hello tells

    def __init__(self, address: str, secret: bytes, model: str, server: str) -> None:
        self._connection = (address, secret, model, server)

    async def start(self) -> ServePort:
        return RemotePort(*self._connection)

    async def stop(self, port: ServePort) -> None:
        with suppress(zmq.ZMQError):
            port.send(Shutdown())  # of the session; the engine goes on
        port.close()
