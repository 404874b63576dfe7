"""The server process's life: bind, load, ready, drain, exit.

Owns: the tasks of the process and the order of its end. Knows: uvicorn, signals.
Does not know: routes, requests.

    loading --Hello + tokenizer--> ready --signal--> draining --empty, late or signalled--> exit 0
        \\________________________ the engine is gone ________________________> exit 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn

from toque.errors import ToqueError
from toque.ipc import ServePort
from toque.metrics import Metrics, custom_buckets
from toque.options import ServeOptions
from toque.serve.app import create_app
from toque.serve.classes import check_key_classes
from toque.serve.connections import Connections
from toque.serve.failures import FailedCall, shutting_down
from toque.serve.frontend import EngineClient
from toque.serve.keys import keys_of
from toque.serve.protocol import tracked_protocol
from toque.serve.service import Service, TextTokenizer

log = logging.getLogger("toque.serve")

FLUSH_S = 1.0  # what answers get to reach their clients once they have been ended
_TICK_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def serve(
    sock: socket.socket,
    options: ServeOptions,
    port: ServePort,
    load_tokenizer: Callable[[], TextTokenizer],
    seed: int | None = None,
) -> int:
    """Serve on a bound socket until a signal or the engine's end; returns the exit code.

    `seed` is for requests that bring none. The engine is sent Shutdown at the end; closing the
    port is the caller's. Signals are handled when this runs in the main thread.
    """
    server = Server(sock, options, port, seed)
    with _signal_handlers(server.signalled):
        return await server.run(load_tokenizer)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run `serve` on the quickest event loop that is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


class Server:
    """One HTTP server over one engine port."""

    def __init__(
        self, sock: socket.socket, options: ServeOptions, port: ServePort, seed: int | None = None
    ) -> None:
        buckets = custom_buckets(options.custom_histogram_buckets)
        metrics = Metrics(options.metrics_compat, buckets=buckets)
        self.connections = Connections()
        self.client = EngineClient(port, metrics)
        self.service = Service(options, self.client, metrics, self.connections, seed)
        self.app = create_app(self.service)
        self._sock = sock
        self._options = options
        self._http = _quiet_uvicorn(self.app, self.connections, options)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def signalled(self) -> None:
        """The first call drains, the second ends everything at once."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self, load_tokenizer: Callable[[], TextTokenizer]) -> int:
        """Until the end; 0 after a signal, 1 when the engine or the tokenizer failed."""
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        tasks = [
            http,
            asyncio.create_task(self.client.pump()),
            asyncio.create_task(self._cut_slow_clients()),
            asyncio.create_task(self._measure_delay()),
            loading := asyncio.create_task(self._load(load_tokenizer)),
        ]
        try:
            code = await self._until_over(http, loading)
        finally:
            await self._close(http, tasks)
        return code

    async def _until_over(self, http: asyncio.Task[None], loading: asyncio.Task[bool]) -> int:
        stop = asyncio.create_task(self._stop.wait())
        gone = asyncio.create_task(self.client.gone.wait())
        waiting: set[asyncio.Task[Any]] = {stop, gone, http, loading}
        try:
            while not (stop.done() or gone.done()):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if http.done() or (loading.done() and not loading.result()):
                    return 1
            if not gone.done():
                await self._drain(gone)
        finally:
            stop.cancel()
            gone.cancel()
        return self._verdict()

    def _verdict(self) -> int:
        if self.client.failure is None:
            return 0
        log.error("the engine is gone: %s", self.client.failure)
        return 1

    async def _load(self, load_tokenizer: Callable[[], TextTokenizer]) -> bool:
        """Load what the model's text needs while the engine loads the model; false = impossible."""
        try:
            with self.service.metrics.phase("tokenizer") as took:
                tokenizer = self.service.tokenizer = await asyncio.to_thread(load_tokenizer)
            log.info("tokenizer: %d tokens, %.1f s", tokenizer.vocab_size, took())
        except ToqueError as error:
            log.error("the tokenizer could not be loaded: %s", error)
            return False
        except Exception:
            log.exception("the tokenizer could not be loaded")
            return False
        await self.client.said_hello.wait()
        hello = self.client.hello
        assert hello is not None
        try:
            check_key_classes(keys_of(self._options), hello)
        except ToqueError as error:
            log.error("%s", error)
            return False
        names = ", ".join(self.service.model_names(hello))
        took_s = self.service.metrics.ready()
        log.info("ready: %s serves %s, %.1f s", self._url(), names, took_s)
        return True

    def _url(self) -> str:
        host, port = self._sock.getsockname()[:2]
        scheme = "https" if self._options.ssl_certfile else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    # ------------------------------------------------------------------------------------ ending

    async def _drain(self, gone: asyncio.Task[Any]) -> None:
        """No new requests; the running ones may finish, until time is up or a second signal."""
        self.service.draining = True
        timeout_s = self._options.shutdown_timeout
        log.info("stopping: %d requests may finish within %g s", self.app.in_progress, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.app.in_progress and not (self._hurry.is_set() or gone.done()):
                    await asyncio.sleep(_TICK_S)
        ended = self.client.fail_all(FailedCall(shutting_down()))
        if ended:
            log.warning("ended %d requests that had not finished", ended)

    async def _close(self, http: asyncio.Task[None], tasks: list[asyncio.Task[Any]]) -> None:
        self.service.draining = True
        self.client.fail_all(FailedCall(shutting_down()))
        await self._flush()
        self.client.shutdown()
        self.connections.cut_all()
        self._http.should_exit = True
        await http
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.service.close()

    async def _flush(self) -> None:
        """Let the last events reach their readers; who does not read them is cut."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while self.app.in_progress or self.connections.unsent_bytes():
                    await asyncio.sleep(_TICK_S)

    # ----------------------------------------------------------------------------------- running

    async def _cut_slow_clients(self) -> None:
        unread_s, coming_s = self._options.slow_reader_timeout, self._options.read_timeout
        while True:
            await asyncio.sleep(min(1.0, unread_s / 4, coming_s / 4))
            cut = self.client.cut_slow(unread_s) + self.connections.cut_slow(unread_s)
            if cut:
                log.warning("cut %d connections that were not read for %g s", cut, unread_s)
                self.service.metrics.slow_readers(cut)
            late = self.connections.cut_late(coming_s)
            if late:
                log.warning("cut %d connections whose request took over %g s", late, coming_s)
                self.service.metrics.slow_senders(late)

    async def _measure_delay(self) -> None:
        """How late the loop wakes a sleeper: what any stream waits behind other work here."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.service.metrics.loop_delay(max(0.0, clock() - due_s))


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours."""
        yield


def _quiet_uvicorn(app: Any, connections: Connections, options: ServeOptions) -> _Uvicorn:
    config = uvicorn.Config(
        app,
        loop="none",
        http=tracked_protocol(connections),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # they would change the peer's name, which connections are found by
        timeout_graceful_shutdown=1,
        timeout_keep_alive=65,
        backlog=1024,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return _Uvicorn(config)


@contextlib.contextmanager
def _signal_handlers(handler: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    for number in _SIGNALS:
        before[number] = signal.getsignal(number)
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])
