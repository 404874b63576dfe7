"""`toque serve`: bind the port, have the model, start the engine, serve until told to stop.

Owns: the listening socket, the engine's process (or thread), the private folder of their channel.
Knows: in which order things start and end. Does not know: what is said over HTTP or the channel.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import resource
import secrets
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.commands.engines import ENGINE_EXIT_S, end_child, local_engines
from toque.commands.secret import shared_secret
from toque.engine_process import Orders, process_exit, setup_logging, start_engine, started
from toque.errors import ConfigError, ToqueError
from toque.files.fetch import Located, locate
from toque.files.progress import terminal_progress
from toque.options import EngineOptions, ServeOptions, check_serve
from toque.types import EngineFailed

if TYPE_CHECKING:
    from toque.disagg.members import Launcher
    from toque.ipc import InProcess
    from toque.serve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_OPEN_FILES = 65536


def serve(model: str, engine: EngineOptions, options: ServeOptions) -> int:
    """Run the server; returns the exit code. The port is taken first: if it cannot be had, nothing
    has been fetched or loaded for it."""
    setup_logging()
    check_serve(options, engine)
    _check_buckets(options)
    _raise_open_files()
    _check_tls(options)
    gc.disable()
    try:
        return _serve(model, engine, options)
    finally:
        gc.enable()


def _serve(model: str, engine: EngineOptions, options: ServeOptions) -> int:
    with bind(options.host, options.port) as listening:
        located = locate(model, progress=terminal_progress())
        names = options.served_model_name or located.served_names
        options = replace(options, served_model_name=names)
        log.info("starting: %s from %s", names[0], located.path)
        if options.engines is not None:
            remote = _elsewhere(options, engine, located)
            return _run(_serve_over(listening, located, engine, options, remote))
        if options.single_process:
            return _run(_serve_in_one(listening, located, engine, options))
        with tempfile.TemporaryDirectory(prefix="toque-") as folder:  # mode 0700
            orders = Orders(
                folder=folder, model_path=str(located.path), model_name=names[0], options=engine
            )
            if options.local_engines > 1:
                with local_engines(orders, options) as engines:
                    return _run(_serve_over(listening, located, engine, options, engines))
            child = start_engine(orders)  # before the server's own imports: both take a moment
            try:
                return _run(_serve_in_two(listening, located, orders, options, child))
            finally:
                end_child(child)


def _elsewhere(
    options: ServeOptions, engine: EngineOptions, located: Located
) -> Sequence[Launcher]:
    """The engines of --engines, none of them reached yet."""
    from toque.disagg.remote import RemoteEngine
    from toque.files.checkpoint import open_checkpoint

    assert options.engines is not None
    secret = shared_secret(options.secret_file)
    model = open_checkpoint(located.path, engine.load_format).identity
    name = secrets.token_hex(16)
    addresses = options.engines.split(",")
    return [RemoteEngine(address, secret, model, name) for address in addresses]


def _check_buckets(options: ServeOptions) -> None:
    """Raises ConfigError: before anything is loaded."""
    if options.custom_histogram_buckets is not None:
        from toque.metrics.buckets import custom_buckets

        custom_buckets(options.custom_histogram_buckets)


def _check_tls(options: ServeOptions) -> None:
    """Raises ConfigError: a certificate that cannot be used is known before anything is loaded."""
    if options.ssl_keyfile and not options.ssl_certfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    if options.ssl_certfile:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"the certificate or its key cannot be used: {error}") from error


def _raise_open_files() -> None:
    """A connection is an open file, and the usual soft limit of 1024 is less than a crowd."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run(main: Coroutine[Any, Any, int]) -> int:
    from toque.serve.server import run

    return run(main)


def bind(host: str, port: int) -> socket.socket:
    """A socket on (host, port), not listening yet. Raises ConfigError saying what to do instead."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # With SO_REUSEADDR two sockets may be bound; the second to listen is refused. Ask now.
        bound.listen(2048)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken: choose another one with --port "
                f"(make serve PORT={port + 1})"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


async def _serve_in_two(
    listening: socket.socket,
    located: Located,
    orders: Orders,
    options: ServeOptions,
    child: subprocess.Popen[bytes],
) -> int:
    from toque.ipc import ZmqServeEnd
    from toque.serve.server import serve as run_server

    port = ZmqServeEnd(Path(orders.folder), process_exit(child))
    try:
        tokenizer = partial(tokenizer_of, located, orders.options)
        return await run_server(listening, options, port, tokenizer, options.seed)
    finally:
        port.close()
        await asyncio.to_thread(end_child, child)


async def _serve_over(
    listening: socket.socket,
    located: Located,
    engine: EngineOptions,
    options: ServeOptions,
    engines: Sequence[Launcher],
) -> int:
    from toque.disagg.fleet import Fleet
    from toque.serve.server import serve as run_server

    fleet = Fleet(engines)
    try:
        tokenizer = partial(tokenizer_of, located, engine)
        return await run_server(listening, options, fleet, tokenizer, options.seed)
    finally:
        fleet.close()


async def _serve_in_one(
    listening: socket.socket, located: Located, engine: EngineOptions, options: ServeOptions
) -> int:
    from toque.ipc import InProcess
    from toque.serve.server import serve as run_server

    channel = InProcess()
    thread = threading.Thread(
        target=engine_thread,
        args=(channel, located, options.served_model_name[0], engine),
        name="engine",
        daemon=True,
    )
    thread.start()
    tokenizer = partial(tokenizer_of, located, engine)
    code = await run_server(listening, options, channel, tokenizer, options.seed)
    await asyncio.to_thread(thread.join, ENGINE_EXIT_S)
    return code


def engine_thread(channel: InProcess, located: Located, name: str, options: EngineOptions) -> None:
    from toque.build import build_engine

    try:
        engine = build_engine(located.path, name, options, channel.engine)
        channel.engine.send(engine.hello)
        engine.core.run()
        channel.fail("the engine has ended")
    except ToqueError as error:
        channel.engine.send(EngineFailed(message=str(error)))
    except Exception as error:
        log.exception("the engine failed")
        channel.engine.send(EngineFailed(message=f"the engine failed: {type(error).__name__}"))


def tokenizer_of(located: Located, options: EngineOptions) -> Tokenizer:
    from toque.files.checkpoint import open_checkpoint
    from toque.serve.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(located.path, options.load_format))
    started()
    return tokenizer
