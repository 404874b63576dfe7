"""Engines that the server did not start, and hosts that are network namespaces."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

NETWORK = "10.213.77"  # of the hosts in tests


class Elsewhere:
    """A running `toque engine`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.process = process
        self.address = address
        self._log = log

    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, words: str, deadline_s: float = 120.0) -> None:
        end = time.monotonic() + deadline_s
        while words not in self.log():
            assert time.monotonic() < end, f"{words!r} does not come\n{self.log()}"
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)


def secret_file(folder: Path) -> Path:
    path = folder / "secret"
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
    return path


@contextmanager
def listening(
    model: str, folder: Path, address: str, *flags: str, prefix: Sequence[str] = ()
) -> Iterator[Elsewhere]:
    """Start an engine at HOST:PORT; whatever happens, it is not left behind."""
    log = folder / f"engine-{secrets.token_hex(4)}.log"
    command = [
        *prefix, sys.executable, "-m", "toque", "engine", model, "--listen", address,
        "--secret-file", str(secret_file(folder)), *flags,
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Elsewhere(process, address, log)
    finally:
        process.kill()
        process.wait()


class Host:
    """A network namespace with one address, on a switch with the others."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.prefix = ("ip", "netns", "exec", name)
        self.link = f"tq{number}{name[-6:]}"

    def received_bytes(self) -> int:
        path = "/sys/class/net/eth0/statistics/rx_bytes"
        return int(_run(*self.prefix, "cat", path))


@contextmanager
def hosts(count: int) -> Iterator[tuple[list[Host], Host]]:
    """So many hosts and the one that the test reaches them from, which is the switch as well."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2) to make network namespaces")
    mark = secrets.token_hex(3)
    made = [Host(f"toque-{number}-{mark}", number) for number in range(1, count + 1)]
    switch = Host(f"toque-s-{mark}", 100)
    with ExitStack() as stack:
        try:
            for host in (switch, *made):
                _run("ip", "netns", "add", host.name)
                stack.callback(_run, "ip", "netns", "del", host.name)
                _run(*host.prefix, "ip", "link", "set", "lo", "up")
            _run(*switch.prefix, "ip", "link", "add", "eth0", "type", "bridge")
            _address(switch)
            for host in made:
                _plug(host, switch)
            _plug_test(switch, f"tq{mark}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield made, switch


def _plug(host: Host, switch: Host) -> None:
    end = ("peer", "name", "eth0", "netns", host.name)
    _run(*switch.prefix, "ip", "link", "add", host.link, "type", "veth", *end)
    _run(*switch.prefix, "ip", "link", "set", host.link, "master", "eth0", "up")
    _address(host)


def _plug_test(switch: Host, name: str) -> None:
    """The test's own end of a cable: it goes with the switch."""
    _run("ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", switch.name)
    _run(*switch.prefix, "ip", "link", "set", name, "master", "eth0", "up")
    _run("ip", "address", "add", f"{NETWORK}.200/24", "dev", name)
    _run("ip", "link", "set", name, "up")


def _address(host: Host) -> None:
    _run(*host.prefix, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    _run(*host.prefix, "ip", "link", "set", "eth0", "up")


def pull_the_cable(host: Host, switch: Host, *, out: bool) -> None:
    state = "down" if out else "up"
    _run(*switch.prefix, "ip", "link", "set", host.link, state)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout
