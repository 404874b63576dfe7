"""The engine's end of a session over TCP: it waits for a server, serves it, and waits for the next.

Owns: the listening socket, which server has the engine, which of its requests are open.
Knows: messages. Does not know: the engine's loop, pages, what a request asks for.

    no server --Join--> its session --silent for SILENT_S, or Shutdown--> no server

One server has an engine at a time; another that asks is told so. When a session ends, all that it
left open is aborted and its pages are released, so the next one finds an engine at rest, with the
prefix cache as it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import zmq
from msgspec import structs

from toque import __version__
from toque.disagg.session import SILENT_S, Busy, Join, Ping, Pong, ToRemote, keys
from toque.errors import ConfigError
from toque.ipc import Inbox, heartbeats, prepared
from toque.telemetry import minus
from toque.types import (
    Abort,
    Counters,
    EngineFailed,
    Fetch,
    Fetched,
    Finished,
    FromEngine,
    Hello,
    Kept,
    PagesReady,
    Prefill,
    Refused,
    Release,
    Request,
    Shutdown,
    StepReport,
    ToEngine,
)

log = logging.getLogger(__name__)


class ListeningEnd:
    """An EnginePort whose other end comes and goes."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
        silent_s: float = SILENT_S,
    ) -> None:
        """Raises ConfigError when the address cannot be had. Port 0: any free one."""
        self._socket: zmq.Socket[bytes] = prepared(zmq.Context.instance().socket(zmq.ROUTER))
        keys(secret, engine=True).put_on(self._socket, engine=True)
        heartbeats(self._socket, silent_s)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            self._socket.bind(f"{where}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self._inbox = Inbox(self._socket)
        self._clock = clock
        self._silent_s = silent_s
        self._decoder = msgspec.msgpack.Decoder(ToRemote)
        self._encoder = msgspec.msgpack.Encoder()
        self._hello: Hello | None = None
        self._server: tuple[bytes, str] | None = None  # who has the engine: identity and name
        self._heard_s = 0.0
        self._running: dict[str, ToEngine] = {}  # id -> what ends it before its end
        self._leased: set[str] = set()  # prefills that ended and are not released
        self._stale: set[str] = set()  # of earlier sessions: their ends are nobody's
        self._counters = Counters()  # of the engine, all sessions together
        self._before = Counters()  # of the sessions before this one
        self._kept = Kept()  # the same two for what it keeps
        self._kept_before = Kept()

    @property
    def port(self) -> int:
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    # -------------------------------------------------------------------------- as an EnginePort

    def receive(self, wait_s: float) -> list[ToEngine]:
        out: list[ToEngine] = []
        for identity, data in self._inbox.take(wait_s):
            try:
                message = self._decoder.decode(data)
            except msgspec.DecodeError as error:
                self._refuse(identity, f"that is no message of toque {__version__}: {error}")
                continue
            out += self._sort(identity, message)
        if self._server is not None and self._clock() - self._heard_s > self._silent_s:
            out += self._end(f"the server was silent for {self._silent_s:g} s")
        return out

    def send(self, message: FromEngine) -> None:
        match message:
            case Hello():
                self._hello = message  # said to each server that joins
                return
            case StepReport():
                message = self._report(message)
            case Kept():
                self._kept = message
                since = minus(message, self._kept_before)
                now = {"leases": message.leases, "oldest_lease_s": message.oldest_lease_s}
                message = structs.replace(since, **now)
            case PagesReady() | Fetched():
                if message.id not in self._running and message.id not in self._leased:
                    return
        if self._server is not None:
            self._tell(self._server[0], message)

    def _report(self, report: StepReport) -> StepReport:
        """As this session is to see it."""
        events = []
        for event in report.events:
            is_end = isinstance(event, Finished | Refused)
            if event.id not in self._stale:
                events.append(event)
                if is_end and isinstance(self._running.pop(event.id, None), Release):
                    self._leased.add(event.id)
            elif is_end:
                self._stale.discard(event.id)
        self._counters = report.counters
        counters = minus(report.counters, self._before)
        return structs.replace(report, events=tuple(events), counters=counters)

    def leave(self, reason: str) -> None:
        """The engine ends: its server is told, so that it moves what runs here, and then nothing
        more."""
        if self._server is not None:
            self._tell(self._server[0], EngineFailed(message=reason))
            self._server = None

    def close(self) -> None:
        self._socket.close()

    # ------------------------------------------------------------------------------- the session

    def _sort(self, identity: bytes, message: ToEngine | Join | Ping) -> list[ToEngine]:
        if isinstance(message, Join):
            return self._join(identity, message)
        if self._server is None or identity != self._server[0]:
            self._refuse(identity, "this session is over")
            return []
        self._heard_s = self._clock()
        match message:
            case Ping():
                self._tell(identity, Pong(asked_s=message.now_s, now_s=self._clock()))
                return []
            case Shutdown():
                return self._end("the server has ended")
            case Request():
                self._running[message.id] = Abort(id=message.id)
            case Fetch():
                self._running[message.request.id] = Abort(id=message.request.id)
            case Prefill():
                self._running[message.request.id] = Release(id=message.request.id)
            case Release():
                self._leased.discard(message.id)
        return [message]

    def _join(self, identity: bytes, join: Join) -> list[ToEngine]:
        """Messages are read once the engine is ready, so it has said its hello."""
        if join.version != __version__:
            self._refuse(identity, f"it is toque {__version__}, the server {join.version}")
            return []
        left: list[ToEngine] = []
        if self._server is not None and self._server[1] == join.server:
            left = self._end("its server joins again")
        if self._server is not None or self._hello is None:
            self._tell(identity, Busy())
            return left
        log.info("a server has joined")
        self._server, self._heard_s = (identity, join.server), self._clock()
        self._before, self._kept_before = self._counters, self._kept
        self._tell(identity, Pong(asked_s=join.now_s, now_s=self._clock()))
        self._tell(identity, self._hello)
        return left

    def _end(self, why: str) -> list[ToEngine]:
        """The session is over: what ends all that it left open."""
        log.info("%s: %d requests end with it", why, len(self._running))
        self.leave(why)
        left = [*self._running.values(), *(Release(id=name) for name in self._leased)]
        self._stale |= self._running.keys()
        self._running.clear()
        self._leased.clear()
        return left

    # -------------------------------------------------------------------------------- the socket

    def _tell(self, identity: bytes, message: FromEngine | Pong | Busy) -> None:
        """Dropped by ZeroMQ if that server is gone."""
        self._socket.send_multipart([identity, self._encoder.encode(message)], zmq.NOBLOCK)
        self._inbox.touched()

    def _refuse(self, identity: bytes, why: str) -> None:
        self._tell(identity, EngineFailed(message=why))
