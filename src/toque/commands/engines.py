"""The engine processes of one server: how each is started, and started again.

Owns: child processes and the private folders of their channels. Knows: orders.
Does not know: requests, which engine gets what.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from toque.disagg.order import Sharing
from toque.engine_process import Orders, process_exit, start_engine
from toque.options import EngineOptions, ServeOptions

if TYPE_CHECKING:
    from toque.ipc import ServePort

log = logging.getLogger(__name__)

ENGINE_EXIT_S = 5.0  # how long an engine gets to end after Shutdown, then it is killed
FROZEN_S = 10.0  # an engine process that does not react for so long is taken for dead


class LocalEngine:
    """A disagg.members.Launcher for a child process; the first one is started at once, since its
    imports and those of the server take a moment each."""

    def __init__(self, orders: Orders, folder: Path, role: str, index: int) -> None:
        self.role = role
        self._orders = orders
        self._folder = folder
        self._index = index
        self._starts = 0
        self._child = self._launch()
        self._fresh = True  # started and not handed out yet

    def _launch(self) -> subprocess.Popen[bytes]:
        """Each start has a folder of its own: a socket's path is never used twice."""
        self._starts += 1
        self._here = self._folder / f"{self._index}-{self._starts}"
        self._here.mkdir()
        return start_engine(structs.replace(self._orders, folder=str(self._here)))

    async def start(self) -> ServePort:
        from toque.ipc import ZmqServeEnd

        if not self._fresh:
            self._child = self._launch()
        self._fresh = False
        return ZmqServeEnd(self._here, process_exit(self._child), FROZEN_S)

    async def stop(self, port: ServePort) -> None:
        port.close()
        self._child.kill()  # it may be frozen, not dead: nothing of it may go on
        await asyncio.to_thread(self._child.wait)

    def end(self) -> None:
        end_child(self._child)


def end_child(child: subprocess.Popen[bytes]) -> None:
    """The engine has been told to shut down, or never will be: wait a little, then make sure."""
    try:
        child.wait(ENGINE_EXIT_S)
    except subprocess.TimeoutExpired:
        log.warning("the engine process did not end: killing it")
        child.kill()
        child.wait()


def roles(options: ServeOptions) -> list[str]:
    """One entry per engine."""
    if options.prefill:
        return ["prefill"] * options.prefill + ["decode"] * options.decode
    return ["both"] * options.data_parallel_size


@contextmanager
def local_engines(orders: Orders, options: ServeOptions) -> Iterator[list[LocalEngine]]:
    """Start the engines of a fleet; whatever happens, none is left behind."""
    wanted = roles(options)
    sharing = Sharing(secret=secrets.token_bytes(32), transport=options.kv_transfer)
    divided = structs.replace(
        orders,
        sharing=sharing,
        options=_own_threads(orders.options, len(wanted)),
        memory_share=1 / len(wanted),
    )
    started: list[LocalEngine] = []
    try:
        for index, role in enumerate(wanted):
            its = structs.replace(divided, sharing=structs.replace(sharing, role=role))
            started.append(LocalEngine(its, Path(orders.folder), role, index))
        yield started
    finally:
        for engine in started:
            engine.end()


def _own_threads(options: EngineOptions, engines: int) -> EngineOptions:
    """Threads of engines that share a machine are divided, where nothing was said."""
    from toque.kernels import physical_cores

    threads = options.threads or max(1, physical_cores() // engines)
    return replace(options, threads=threads)
