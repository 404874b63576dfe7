"""`toque engine` and `toque serve --engines`: engines that come and go without their server."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tests.serve.elsewhere import Elsewhere, hosts, listening, pull_the_cable, secret_file
from tests.serve.live import Live, free_port, serving
from tests.serve.test_disagg import ask, ask_together, bodies, expected

__all__ = ["expected"]  # a fixture: what one engine answers

DUMMY = ("--load-format", "dummy")
SMALL = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16")
TCP = ("--kv-transfer", "tcp")  # namespaces of one machine share its memory: not this time


def server(config: Path, folder: Path, *engines: str) -> tuple[str, ...]:
    secret = str(secret_file(folder))
    return (*DUMMY, "--served-model-name", "tiny", "--engines", ",".join(engines),
            "--secret-file", secret)  # fmt: skip


def local() -> str:
    return f"127.0.0.1:{free_port()}"


# ------------------------------------------------------------------------------- several hosts


def test_prompts_and_answers_on_two_hosts(
    tiny_config: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """Prefill and decode in a network namespace each: pages really cross."""
    with hosts(2) as ((one, two), switch), ExitStack() as stack:
        for host, role in ((one, "prefill"), (two, "decode")):
            stack.enter_context(
                listening(str(tiny_config), tmp_path, f"{host.address}:8001", *DUMMY, *SMALL,
                          *TCP, "--role", role, prefix=host.prefix)
            )  # fmt: skip
        flags = server(tiny_config, tmp_path, f"{one.address}:8001", f"{two.address}:8001")
        live = stack.enter_context(
            serving(str(tiny_config), tmp_path, *flags, prefix=switch.prefix,
                    host=switch.address)
        )  # fmt: skip
        assert [ask(live, body) for body in bodies()] == expected
        assert ask_together(live, bodies()) == expected
        moved_bytes = live.metric("toque_kv_transfer_bytes_total")
        assert live.metric("toque_kv_transfer_pages_total", fate="moved") > 0
        assert live.metric("toque_kv_transfer_failed_pages_total") == 0
        assert two.received_bytes() > moved_bytes > 0
        live.wait_idle()


def test_a_cable_is_pulled(tiny_config: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    """Two hosts answer 16 streams; one of them is cut off in the middle: all 16 end with the right
    text, and it is joined again, at rest, when the cable is back."""
    asked = [{**body, "max_tokens": 24} for body in (bodies() + bodies())[:16]]
    with hosts(2) as ((one, two), switch), ExitStack() as stack:
        engines = [
            stack.enter_context(
                listening(str(tiny_config), tmp_path, f"{host.address}:8001", *DUMMY, *SMALL,
                          prefix=host.prefix)
            )
            for host in (one, two)
        ]  # fmt: skip
        flags = server(tiny_config, tmp_path, *(engine.address for engine in engines))
        live = stack.enter_context(
            serving(str(tiny_config), tmp_path, *flags, prefix=switch.prefix, host=switch.address)
        )
        answers: list[list[int]] = []
        asking = threading.Thread(target=lambda: answers.extend(ask_together(live, asked)))
        asking.start()
        live.wait_for("toque_generation_tokens_total", 20)
        pull_the_cable(one, switch, out=True)
        asking.join(120)
        assert answers == (expected + expected)[:16]
        live.wait_for("toque_engine_restarts_total", 1)
        pull_the_cable(one, switch, out=False)
        live.wait_until("both are there again", toque_engine_up=2.0)
        assert ask_together(live, asked) == (expected + expected)[:16]
        live.wait_idle()


# ----------------------------------------------------------------------------- coming and going


@pytest.fixture
def engines(tiny_config: Path, tmp_path: Path) -> Iterator[list[Elsewhere]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(listening(str(tiny_config), tmp_path, local(), *DUMMY, *SMALL))
            for _ in range(2)
        ]


def test_an_engine_is_told_to_end_and_comes_back(
    engines: list[Elsewhere], tiny_config: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """What ran there goes on at the other; a new one at its place is joined."""
    asked = [{**body, "max_tokens": 24} for body in (bodies() + bodies())[:16]]
    flags = server(tiny_config, tmp_path, *(engine.address for engine in engines))
    with serving(str(tiny_config), tmp_path, *flags) as live:
        answers: list[list[int]] = []
        asking = threading.Thread(target=lambda: answers.extend(ask_together(live, asked)))
        asking.start()
        live.wait_for("toque_generation_tokens_total", 20)
        engines[0].process.send_signal(signal.SIGTERM)
        asking.join(120)
        assert answers == (expected + expected)[:16]
        assert engines[0].process.wait(60) == 0
        assert "ended by SIGTERM" in engines[0].log()
        with listening(str(tiny_config), tmp_path, engines[0].address, *DUMMY, *SMALL):
            live.wait_until("both are there again", toque_engine_up=2.0)
            assert ask(live, bodies()[6]) == expected[6]
            live.wait_idle()


def test_a_server_that_was_killed_is_followed_by_another(
    engines: list[Elsewhere], tiny_config: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """Its requests end at the engines, their pages are let go, and the engines have one server at
    a time: the second one waits until the first one's silence is noticed."""
    long = [{**body, "max_tokens": 300} for body in bodies()]
    flags = server(tiny_config, tmp_path, *(engine.address for engine in engines))
    with serving(str(tiny_config), tmp_path, *flags) as live:
        threads = [threading.Thread(target=_try, args=(live, body)) for body in long]
        for thread in threads:
            thread.start()
        live.wait_for("toque_generation_tokens_total", 20)
        live.process.kill()
        for thread in threads:
            thread.join(60)
    with serving(str(tiny_config), tmp_path, *flags) as live:
        assert "another server has the engine" in live.log()
        assert ask_together(live, bodies()) == expected
        live.wait_idle()
        assert live.metric("toque_generation_tokens_total") == 24 * len(bodies())
    for engine in engines:
        assert "the server was silent for 10 s" in engine.log()
        engine.wait_for("the server has ended")


def _try(live: Live, body: dict[str, object]) -> None:
    with suppress(httpx.TransportError):  # its server was killed
        ask(live, body)


def refused(config: Path, folder: Path, address: str, *more: str) -> str:
    """What a server says that does not start."""
    command = [sys.executable, "-m", "toque", "serve", str(config), "--port", str(free_port())]
    flags = [*server(config, folder, address), *more]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2)
    return done.stderr


def test_who_does_not_belong_is_refused(
    engines: list[Elsewhere], tiny_config: Path, tmp_path: Path
) -> None:
    address = engines[0].address
    engines[0].wait_for("engine on")
    other = tmp_path / "other"
    other.mkdir()
    assert "did not take our secret" in refused(tiny_config, other, address)
    flags = server(tiny_config, tmp_path, address)
    with serving(str(tiny_config), tmp_path, *flags):
        pass  # the right secret is taken afterwards as well
    bigger = tmp_path / "bigger"
    bigger.mkdir()
    text = (tiny_config / "config.json").read_text()
    (bigger / "config.json").write_text(text.replace('"rms_norm_eps"', '"x": 1, "rms_norm_eps"'))
    for name in tiny_config.iterdir():
        if name.name != "config.json":
            (bigger / name.name).write_bytes(name.read_bytes())
    assert "has other weights" in refused(bigger, tmp_path, address)
    (other / "secret").chmod(0o644)
    assert "chmod 600" in refused(tiny_config, other, address)
