"""The channel between the text side (serve, LLM) and the engine: in one process or between two.

Owns: the sockets and the codec. Knows: message types. Does not know: what messages mean.

Messages are msgspec structs; between processes they travel as MessagePack over ZeroMQ `ipc` sockets
in a folder that only this user may enter. Never pickle: decoding yields declared types or an error.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import select
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from toque.errors import EngineError
from toque.types import FromEngine, ToEngine

PORTION = 64  # messages taken between two steps: a crowd that arrives must not stop who runs
LAST_WORDS_S = 0.2  # how long serve listens for what an engine sent before its process ended


class EnginePort(Protocol):
    """The engine's end."""

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Messages that are here, in order, up to PORTION of them; waits up to `wait_s` seconds
        for the first."""

    def send(self, message: FromEngine) -> None:
        """Hand over at once; never blocks on a slow reader."""

    def close(self) -> None: ...


class ServePort(Protocol):
    """The text side's end, used from one asyncio loop."""

    def send(self, message: ToEngine) -> None:
        """Hand over at once; never blocks. Silently lost if the engine is gone: `receive` tells."""

    async def receive(self) -> FromEngine:
        """The next message. Raises EngineError, with the reason, when the engine is gone."""

    def close(self) -> None: ...


class InProcess:
    """Both ends over two queues, for one process. The engine's end may live in another thread.

    `serve_loop`: where `receive` is awaited; None when nobody awaits (LLM drains by hand).
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._outbox: deque[FromEngine] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._failure: str | None = None
        self.engine = _InProcessEngineEnd(self)

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    async def receive(self) -> FromEngine:
        self._loop = asyncio.get_running_loop()
        while not self._outbox:
            if self._failure is not None:
                raise EngineError(self._failure)
            self._arrived.clear()
            if not self._outbox and self._failure is None:
                await self._arrived.wait()
        return self._outbox.popleft()

    def drain(self) -> list[FromEngine]:
        """Everything that is here, without waiting."""
        messages = list(self._outbox)
        self._outbox.clear()
        return messages

    def fail(self, reason: str) -> None:
        """The engine's thread ended: `receive` raises once the messages before it are read."""
        self._failure = reason
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    def close(self) -> None: ...


class _InProcessEngineEnd:
    def __init__(self, channel: InProcess) -> None:
        self._channel = channel

    def receive(self, wait_s: float) -> list[ToEngine]:
        inbox = self._channel._inbox
        messages: list[ToEngine] = []
        with suppress(queue.Empty):
            if wait_s > 0:
                messages.append(inbox.get(timeout=wait_s))
            while len(messages) < PORTION:
                messages.append(inbox.get_nowait())
        return messages

    def send(self, message: FromEngine) -> None:
        self._channel._outbox.append(message)
        self._channel._wake()

    def close(self) -> None: ...


def prepared(socket: Any) -> Any:
    """A socket of either kind, plain or of asyncio, with what all of ours have in common.

    High-water marks are off: a full queue would block the engine or drop a message. What bounds
    memory is that serve always reads and cuts off clients that do not."""
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 500)  # ms for the last words of an engine that ends
    socket.setsockopt(zmq.RECONNECT_IVL, 10)  # ms between looks whether the other end is there
    return socket


def heartbeats(socket: zmq.Socket[Any], silent_s: float) -> None:
    """The other end is asked whether it is there (ZMTP 3.1, answered by ZeroMQ's own thread: a long
    step does not stop it, SIGSTOP does); after so long without an answer the connection ends."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(silent_s * 250))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(silent_s * 1000))


def _socket(kind: int, address: str, *, bind: bool) -> zmq.Socket[bytes]:
    """Who sends connects and who receives binds: ZeroMQ keeps what is sent over a connection that
    is still to come, and refuses it on a bound socket that nobody has reached yet."""
    socket: zmq.Socket[bytes] = prepared(zmq.Context.instance().socket(kind))
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Inbox:
    """Reads a socket without asking it twice: asking takes 40 us in every step, the one system call
    on its descriptor five. The descriptor tells of what comes after the socket was found empty, and
    of nothing else; using the socket otherwise in between (`touched`) may swallow what it tells."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._arrived = select.poll()
        self._arrived.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        self._more = True  # the socket may hold something: it has not been found empty

    def touched(self) -> None:
        self._more = True

    def take(self, wait_s: float) -> list[list[bytes]]:
        """Messages that are here, up to PORTION, each with its frames."""
        taken: list[list[bytes]] = []
        if not self._more and not self._arrived.poll(wait_s * 1000):
            return taken
        try:
            while len(taken) < PORTION:
                taken.append(self._socket.recv_multipart(zmq.NOBLOCK))
            self._more = True
        except zmq.Again:
            self._more = False
        return taken


class ZmqEngineEnd:
    """The engine process's end of two sockets in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._pull = _socket(zmq.PULL, f"ipc://{folder}/to-engine", bind=True)
        self._outbox = _socket(zmq.PUSH, f"ipc://{folder}/from-engine", bind=False)
        self._inbox = Inbox(self._pull)
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, wait_s: float) -> list[ToEngine]:
        return [self._decoder.decode(frames[0]) for frames in self._inbox.take(wait_s)]

    def send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))

    def close(self) -> None:
        self._pull.close()
        self._outbox.close()


async def next_word(socket: zmq.asyncio.Socket, gone: asyncio.Future[str]) -> bytes:
    """The next message of an engine. Raises EngineError, with the reason, once it is gone and its
    last words are read."""
    incoming = asyncio.ensure_future(socket.recv())  # done already when a message is here
    if not incoming.done():
        await asyncio.wait((incoming, gone), return_when=asyncio.FIRST_COMPLETED)
    if not incoming.done():
        await asyncio.wait((incoming,), timeout=LAST_WORDS_S)
    if not incoming.done():
        incoming.cancel()
        raise EngineError(gone.result())
    return incoming.result()


def monitor_of(socket: zmq.asyncio.Socket, events: int) -> zmq.asyncio.Socket:
    """Tells what happens to the connections of a socket; `end_monitor` before that is closed.

    Made by hand: `get_monitor_socket` gives a plain one, and whichever is closed of the two that
    share it then, its descriptor stays in the event loop, or is taken out when it is another's by
    now: a socket that gets the same number is never read."""
    address = f"inproc://monitor-{next(_monitors)}"
    socket.monitor(address, events)
    monitor = zmq.asyncio.Socket(zmq.Context.instance(), zmq.PAIR)
    monitor.connect(address)
    return monitor


def end_monitor(socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> None:
    socket.disable_monitor()
    monitor.close(0)


_monitors = itertools.count()


class ZmqServeEnd:
    """Serve's end: owns the private folder, and watches the engine's process.

    `engine_exit` completes, with the reason as a sentence, when the engine process is gone. With
    `frozen_after_s`, so does an engine that is there and does not answer its socket's heartbeats.
    """

    def __init__(
        self,
        folder: Path,
        engine_exit: asyncio.Future[str],
        frozen_after_s: float | None = None,
    ) -> None:
        self._outbox = _socket(zmq.PUSH, f"ipc://{folder}/to-engine", bind=False)
        self._inbox = prepared(zmq.asyncio.Socket(zmq.Context.instance(), zmq.PULL))
        self._exit = engine_exit
        self._monitor: zmq.asyncio.Socket | None = None
        self._watching: asyncio.Task[None] | None = None
        if frozen_after_s is not None:
            heartbeats(self._inbox, frozen_after_s)
            self._monitor = monitor_of(self._inbox, zmq.EVENT_DISCONNECTED)
            self._watching = asyncio.ensure_future(self._watch(self._monitor, frozen_after_s))
        self._inbox.bind(f"ipc://{folder}/from-engine")
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()

    async def _watch(self, monitor: zmq.asyncio.Socket, frozen_after_s: float) -> None:
        await monitor.recv_multipart()
        await asyncio.wait((self._exit,), timeout=LAST_WORDS_S)
        if not self._exit.done():
            self._exit.set_result(
                f"the engine process gave no sign of life for {frozen_after_s:g} s"
            )

    def send(self, message: ToEngine) -> None:
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        return self._decoder.decode(await next_word(self._inbox, self._exit))

    def close(self) -> None:
        if self._monitor is not None and self._watching is not None:
            self._watching.cancel()
            end_monitor(self._inbox, self._monitor)
        self._outbox.close()
        self._inbox.close()
