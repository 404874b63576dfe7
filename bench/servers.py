"""Start a server on a free port, wait until it answers, stop it.

Owns: the server's process. Knows: how toque and llama-server are started on a GGUF file.
Does not know: what is measured.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.client import Address, get_json
from bench.processes import tree
from bench.workloads import Workload

START_S = 300.0  # the longest time that a server may take to be ready
STOP_S = 20.0
POLL_S = 0.02
SLACK_TOKENS = 64  # beside every sequence: chunks of a unified KV cache are rounded up


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start one engine for one workload."""

    name: str
    argv: tuple[str, ...]
    ready_path: str  # answers 200 once requests are taken


def toque_recipe(
    name: str, model: Path, port: int, threads: int, extra: Sequence[str] = ()
) -> Recipe:
    """Its defaults, but for the number of threads."""
    argv = (sys.executable, "-m", "toque", "serve", str(model), "--port", str(port))
    return Recipe(name, (*argv, "--threads", str(threads), *extra), "/ready")


def llama_recipe(
    name: str, binary: Path, model: Path, port: int, threads: int, workload: Workload
) -> Recipe:
    """llama-server's best flags for a workload: a slot per client, one KV cache shared by all
    slots, flash attention, a context that holds every client's sequence and no more."""
    context_tokens = workload.clients * (workload.length_tokens + SLACK_TOKENS)
    flags = {
        "-m": model,
        "--host": "127.0.0.1",
        "--port": port,
        "-t": threads,
        "-np": workload.clients,
        "-c": context_tokens,
        "-fa": "on",
    }
    given = (str(part) for flag in flags.items() for part in flag)
    return Recipe(name, (str(binary), *given, "--kv-unified"), "/health")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`with Server(recipe, port) as server`: running and ready inside, ended outside.

    Raises RuntimeError with the end of the server's output if it does not become ready.
    """

    def __init__(self, recipe: Recipe, port: int) -> None:
        self.recipe = recipe
        self.address = Address("127.0.0.1", port, "/v1")
        self.started_s = 0.0  # time.perf_counter() just before the process began
        self.ready_s = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="toque-bench-")
        self._output = Path(self._folder.name) / "output"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.started_s = time.perf_counter()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self.recipe.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        url = f"http://127.0.0.1:{self.address.port}{self.recipe.ready_path}"
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{self.recipe.name} ended at start:\n{self._tail()}")
            if time.perf_counter() - self.started_s > START_S:
                raise RuntimeError(f"{self.recipe.name} is not ready after {START_S:g} s")
            try:
                get_json(url)
            except (OSError, ValueError):
                time.sleep(POLL_S)
            else:
                self.ready_s = time.perf_counter()
                return

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-2000:]

    def _stop(self) -> None:
        """SIGTERM to the process that was started, which ends its own children; SIGKILL to all
        of them if it does not."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                for pid in tree(process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.wait()
        self._folder.cleanup()
