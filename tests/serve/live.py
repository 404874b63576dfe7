"""A real `toque serve` in its own processes, for tests from outside."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx


class Live:
    def __init__(
        self, process: subprocess.Popen[str], port: int, log: Path, host: str = "127.0.0.1"
    ) -> None:
        self.process = process
        self.port = port
        self.url = f"http://{host}:{port}"
        self._log = log

    def log(self) -> str:
        return self._log.read_text()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.split("{")[0] == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total += float(value)
        return total

    def wait_until(self, what: str, deadline_s: float = 120.0, **conditions: float) -> None:
        """Poll metrics until each has its value."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            found = {name: self.metric(name) for name in conditions}
            if found == conditions:
                return
            time.sleep(0.05)
        raise AssertionError(f"{what}: {found} instead of {conditions}\n{self.log()}")

    def wait_for(self, name: str, least: float, **labels: str) -> None:
        """Poll a metric until it is at least so much."""
        end = time.monotonic() + 120.0
        while (found := self.metric(name, **labels)) < least:
            assert time.monotonic() < end, f"{name} is {found}, not {least}\n{self.log()}"
            time.sleep(0.02)

    def wait_idle(self) -> None:
        """Nothing runs, nothing waits, no page is held."""
        self.wait_until(
            "the server does not come to rest",
            toque_num_requests_running=0,
            toque_num_requests_waiting=0,
            toque_open_requests=0,
        )
        end = time.monotonic() + 60.0  # leases of other engines end a moment after their request
        while held := self.metric("toque_kv_cache_pages", state="held"):
            assert time.monotonic() < end, f"{held} pages are held by nobody\n{self.log()}"
            time.sleep(0.05)

    def engine_pids(self) -> list[int]:
        """In the order of their starts."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def engine_pid(self) -> int:
        return self.engine_pids()[0]


@contextmanager
def serving_tiny(config: Path, folder: Path, template: str, *flags: str) -> Iterator[Live]:
    """The tiny random model (conftest.tiny_config) under a chat template of the test's own, and
    with a context that holds tools; comes to rest at the end."""
    model = folder / "model"
    shutil.copytree(config, model)
    for name, values in (
        ("tokenizer_config.json", {"chat_template": template}),
        ("config.json", {"max_position_embeddings": 4096}),
    ):
        kept = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**kept, **values}))
    dummy = ("--load-format", "dummy", "--served-model-name", "tiny", "--max-num-seqs", "8")
    with serving(str(model), folder, *dummy, *flags) as live:
        yield live
        live.wait_idle()


def free_port() -> int:
    """Not one that the system gives to outgoing connections (from 32768 on): anybody's next
    connection could take it before the server does."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def serving(
    model: str, folder: Path, *flags: str, prefix: Sequence[str] = (), host: str = "127.0.0.1"
) -> Iterator[Live]:
    """Start, wait for /ready, stop. Whatever happens, no process is left behind."""
    port, log = free_port(), folder / "serve.log"
    command = [*prefix, sys.executable, "-m", "toque", "serve", model, "--port", str(port), *flags]
    command += ["--host", host]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)
    live = Live(process, port, log, host)
    try:
        _wait_ready(live)
        yield live
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)  # the second one does not wait for streams
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"the server did not stop\n{live.log()}") from None


def _wait_ready(live: Live, deadline_s: float = 240.0) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if live.process.poll() is not None:
            raise AssertionError(f"the server ended at start\n{live.log()}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{live.url}/ready", timeout=60).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"the server is not ready after {deadline_s:g} s\n{live.log()}")
