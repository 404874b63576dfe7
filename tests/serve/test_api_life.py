"""Disconnects, slow readers, the engine's death, health, shutdown: every call ends in one way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.fakes import (
    END,
    ByteTokenizer,
    FakeEngine,
    ServerThread,
    bytes_then_end,
    error_of,
    serving,
    wait_for,
)
from toque.errors import ModelError
from toque.metrics import Metrics
from toque.options import ServeOptions
from toque.serve.connections import Connections
from toque.serve.frontend import ClientGone, EngineClient
from toque.serve.server import serve
from toque.types import Finished, FinishReason, Request, SamplingParams, StepReport, Times, Usage

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}


def endless(engine: FakeEngine | None = None, **extra: Any) -> FakeEngine:
    """An engine whose answers take longer than any test."""
    engine = engine or FakeEngine(**extra)
    engine.reply = lambda request: [*b"ab" * 240, END]
    engine.step_s = 0.02
    return engine


@contextlib.contextmanager
def open_stream(server: ServerThread, **body: Any) -> Iterator[tuple[Any, Iterator[str]]]:
    """A stream that has begun, and its lines."""
    asked = {"prompt": "x", "stream": True, "max_tokens": 500, **body}
    with server.http.stream("POST", "/v1/completions", json=asked) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert next(lines).startswith("data: {")
        yield answer, lines


def posted(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A call as bytes, for clients that misbehave."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
    return f"{head}{len(content)}\r\n\r\n".encode() + content


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(call()))
    thread.start()
    return thread, out


# ----------------------------------------------------------------------------------- disconnect


@pytest.mark.parametrize("stream", [True, False])
def test_client_gone_aborts_at_once(stream: bool) -> None:
    """Each of the call's sequences is aborted, and nothing stays open."""
    with serving(endless()) as server:
        asked = posted({"prompt": "x", "n": 2, "stream": stream, "max_tokens": 500})
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(asked)
            wait_for(lambda: server.engine.running)
            if stream:
                assert connection.recv(100)
            assert not server.engine.aborts()
        wait_for(lambda: len(server.engine.aborts()) == 2)
        assert {a.reason for a in server.engine.aborts()} == {FinishReason.ABORT}
        wait_for(lambda: server.server.client.open_requests == 0)
        wait_for(lambda: server.server.app.in_progress == 0)


def test_client_gone_before_its_first_token_aborts() -> None:
    with serving(FakeEngine(paused=True)) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(posted({**CHAT, "stream": True}, "/v1/chat/completions"))
            wait_for(lambda: len(server.engine.requests()) == 1)
        wait_for(lambda: len(server.engine.aborts()) == 1)


def test_finished_calls_are_not_aborted() -> None:
    with serving() as server:
        server.complete()
        server.stream(prompt="x")
        server.complete()
        assert server.engine.aborts() == []


def test_others_do_not_notice_a_disconnect() -> None:
    with serving(
        FakeEngine(reply=lambda r: bytes_then_end("abcdefghij" * 5), step_s=0.002)
    ) as server:
        thread, out = in_thread(lambda: server.stream(prompt="y", max_tokens=100))
        for _ in range(5):
            with (
                httpx.Client(base_url=server.url) as http,
                http.stream(
                    "POST", "/v1/completions", json={"prompt": "x", "stream": True}
                ) as gone,
            ):
                next(gone.iter_lines())
        thread.join(60)
        text = "".join(event["choices"][0]["text"] for event in out[0])
        assert text == "abcdefghij" * 5


def test_small_writes_are_not_delayed() -> None:
    """Accepted sockets carry TCP_NODELAY, however the bound one was made; else 40 ms per answer."""
    with serving() as server:
        server.complete()
        transports = list(server.server.connections._open)
        socks = [transport.get_extra_info("socket") for transport in transports]
        assert socks
        assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in socks)


# --------------------------------------------------------------------------------- slow readers


def test_slow_reader_is_cut_and_aborted() -> None:
    """Who leaves a stream unread loses it; memory for it does not grow until its end."""
    # Ten times as long as the patience: on no machine is the answer out before the reader is cut.
    engine = FakeEngine(reply=lambda r: [65] * 500, per_step=1, step_s=0.01)
    with serving(engine, slow_reader_timeout=0.3) as server:
        # Small kernel buffers on both ends, so that the server notices soon.
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asked = posted({"prompt": ["x"] * 16, "n": 8, "stream": True, "max_tokens": 400})
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        with connection:
            connection.sendall(asked)
            wait_for(lambda: len(server.engine.aborts()) == 128)
            wait_for(lambda: server.server.app.in_progress == 0)
            assert server.server.connections.unsent_bytes() == 0
            with contextlib.suppress(ConnectionError):
                data = b"".join(iter(lambda: connection.recv(65536), b""))
                assert not data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert "toque_slow_readers_total 0.0" not in server.http.get("/metrics").text


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Wire:
    """As much of a transport as the guard needs."""

    closing = aborted = False

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True


def test_only_connections_that_stay_full_are_cut() -> None:
    """A pause that ends in time is forgiven; a closed one with an unread rest is not."""
    clock = Clock()
    connections = Connections(clock)
    stuck, slow, idle, lingering = wires = [Wire() for _ in range(4)]
    for peer, wire in enumerate(wires):
        connections.opened(wire, peer)  # type: ignore[arg-type]
    connections.full(stuck)  # type: ignore[arg-type]
    connections.full(slow)  # type: ignore[arg-type]
    lingering.closing = True
    assert connections.cut_slow(10) == 0
    clock.now_s += 9
    connections.drained(slow)  # type: ignore[arg-type]
    connections.full(slow)  # type: ignore[arg-type]
    clock.now_s += 2
    assert connections.cut_slow(10) == 2
    assert [wire.aborted for wire in wires] == [True, False, False, True]
    connections.cut(2)
    assert idle.aborted and not slow.aborted and len(connections) == 1


# ------------------------------------------------------------------------------- engine's death


def test_engine_death_ends_every_open_call_with_an_error() -> None:
    """Streams get a last typed event, whole answers a 500, health is 503, the exit code is 1."""
    with serving(endless()) as server:
        url = server.url + "/v1/completions"
        body = {"prompt": "x", "max_tokens": 500}
        thread, whole = in_thread(lambda: httpx.post(url, json=body, timeout=60))
        with open_stream(server, n=2) as (answer, lines):
            wait_for(lambda: len(server.engine.requests()) == 3)
            server.engine.dead = "out of memory"
            rest = list(lines)
        assert answer.status_code == 200
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2][6:])["error"]
        assert error["message"] == "out of memory"
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        thread.join(60)
        assert whole[0].status_code == 500 and error_of(whole[0])["message"] == "out of memory"
        server.thread.join(60)
        assert server.exit_code == 1


def test_health_is_503_once_the_engine_is_gone() -> None:
    with serving(endless()) as server, open_stream(server):
        # The stream, not read here, keeps the server up while its answer is flushed.
        server.loop.call_soon_threadsafe(setattr, server.server.app, "in_progress", 100)
        server.engine.dead = "gone"
        wait_for(lambda: server.server.client.failure is not None)
        for path in ("/health", "/ready", "/v1/models"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 503
            assert error_of(answer)["code"] in ("engine_gone", "shutting_down")


def test_one_failed_request_leaves_its_neighbours_alone() -> None:
    def fail(self: FakeEngine, row: Any) -> Any:
        if bytes(row.request.prompt[1:]) == b"bad":
            del self.running[row.request.id]
            usage = Usage(prompt_tokens=4)
            times = Times(arrived_s=row.request.arrived_s)
            return [
                Finished(
                    id=row.request.id, reason=FinishReason.ERROR, usage=usage, times=times,
                    error="not a number",
                )
            ]  # fmt: skip
        return advance(self, row)

    advance = FakeEngine._advance
    engine = FakeEngine()
    engine._advance = fail.__get__(engine)  # type: ignore[method-assign]
    with serving(engine) as server:
        bad = server.http.post("/v1/completions", json={"prompt": ["ok", "bad"]})
        assert bad.status_code == 500 and error_of(bad)["message"] == "not a number"
        assert server.complete(prompt="ok")["choices"][0]["text"] == "Hello"


def test_unfinished_choices_of_a_failed_call_are_aborted() -> None:
    engine = endless()
    with serving(engine) as server, open_stream(server, n=3) as (_, lines):
        victim = engine.requests()[1]
        row = engine.running.pop(victim.id)
        times = Times(arrived_s=victim.arrived_s)
        finished = Finished(
            id=victim.id, reason=FinishReason.ERROR, usage=Usage(prompt_tokens=1), times=times,
            error="broken row",
        )  # fmt: skip
        engine.outbox.append(StepReport(events=(finished,), counters=engine.totals))
        assert row.request is victim
        rest = list(lines)
        assert json.loads(rest[-2][6:])["error"]["message"] == "broken row"
        wait_for(lambda: len(engine.aborts()) == 2)
        assert victim.id not in {a.id for a in engine.aborts()}


# ---------------------------------------------------------------------------------------- health


def request(name: str) -> Request:
    return Request(id=name, prompt=(1,), sampling=SamplingParams(max_tokens=5), arrived_s=0.0)


def test_health_is_progress_not_a_pulse() -> None:
    """Silence counts only with open work, and patience grows with the announced step."""

    async def main() -> None:
        clock, engine = Clock(), FakeEngine(paused=True)
        client = EngineClient(engine, Metrics(), clock)
        pump = asyncio.create_task(client.pump())
        await client.said_hello.wait()
        clock.now_s += 1000
        assert client.stuck_s() is None, "idle engines are silent"
        with client.submit([request("a")]):
            clock.now_s += 19
            assert client.stuck_s() is None
            clock.now_s += 2
            assert client.stuck_s() == pytest.approx(21)
            engine.heartbeat(predicted_ms=5000)
            while client.predicted_ms == 0:
                await asyncio.sleep(0.001)
            clock.now_s += 49
            assert client.stuck_s() is None
            clock.now_s += 2
            assert client.stuck_s() == pytest.approx(51)
        pump.cancel()

    asyncio.run(main())


def test_abandoned_requests_stay_open_until_the_engine_ends_them() -> None:
    """So that what is open is what the engine holds, and each end is counted once."""

    async def main() -> None:
        engine = FakeEngine(paused=True, answer_aborts=False)
        client = EngineClient(engine, metrics := Metrics())
        with client.submit([request("a"), request("b")]):
            client.abort("a", FinishReason.STOP)
        assert [(a.id, a.reason) for a in engine.aborts()] == [
            ("a", FinishReason.STOP),
            ("b", FinishReason.ABORT),
        ]
        assert client.open_requests == 2
        pump = asyncio.create_task(client.pump())
        for name in "ab":
            row = engine.running.pop(name)
            event = engine._finished(row, FinishReason.ABORT)
            engine.outbox.append(StepReport(events=(event,)))
        while client.open_requests:
            await asyncio.sleep(0.001)
        assert b'request_success_total{finished_reason="abort"} 2.0' in metrics.text()
        pump.cancel()

    asyncio.run(main())


def test_a_backlog_that_is_too_old_is_cut() -> None:
    async def main() -> None:
        clock, cuts = Clock(), []
        client = EngineClient(FakeEngine(), Metrics(), clock)
        with client.submit([request("a")], lambda: cuts.append(1)) as call:
            call.push(StepReport, clock())  # type: ignore[arg-type]
            clock.now_s += 9
            assert client.cut_slow(10) == 0
            clock.now_s += 2
            assert client.cut_slow(10) == 1 and cuts == [1]
            with pytest.raises(ClientGone):
                await call.take()

    asyncio.run(main())


# ---------------------------------------------------------------------------------------- loading


def test_routes_wait_for_the_model() -> None:
    """While it loads: health is fine, ready and /v1 are 503 with Retry-After."""
    gate = threading.Event()

    def slow_load() -> ByteTokenizer:
        gate.wait(10)
        return ByteTokenizer()

    engine = FakeEngine(hello=False)
    with serving(engine, ready=False, load_tokenizer=slow_load) as server:
        wait_for(lambda: server.http.get("/health").status_code == 200)
        for answer in (
            server.http.get("/ready"),
            server.http.get("/v1/models"),
            server.http.get("/v1/completions?prompt=x"),
            server.http.post("/v1/completions", json={"prompt": "x"}),
            server.http.post("/v1/chat/completions", json=CHAT),
            server.http.post("/tokenize", json={"prompt": "x"}),
        ):
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            assert "loading" in error_of(answer)["message"]
        engine.say_hello()
        wait_for(lambda: server.server.client.hello is not None)
        assert server.http.get("/ready").status_code == 503, "the tokenizer is still to come"
        gate.set()
        server.wait_ready()
        assert server.complete()["choices"][0]["text"] == "Hello"


def test_a_tokenizer_that_cannot_be_loaded_ends_the_server(caplog: Any) -> None:
    def broken() -> ByteTokenizer:
        raise ModelError("tokenizer.json: damaged")

    with serving(ready=False, load_tokenizer=broken) as server:
        server.thread.join(60)
        assert server.exit_code == 1
    assert "tokenizer.json: damaged" in caplog.text


# --------------------------------------------------------------------------------------- shutdown


def test_first_signal_lets_running_calls_finish() -> None:
    """Not ready, no new calls, the running one ends well, exit code 0, Shutdown is sent."""
    engine = endless()
    with serving(engine) as server, open_stream(server) as (_, lines):
        server.signal()
        wait_for(lambda: server.server.service.draining)
        with httpx.Client(base_url=server.url) as late:
            assert error_of(late.get("/ready"))["code"] == "shutting_down"
            refused = late.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert late.get("/health").status_code == 200
        engine.step_s = 0.0
        rest = list(lines)
        events = [json.loads(line[6:]) for line in rest[:-1]]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert rest[-1] == "data: [DONE]"
        server.thread.join(60)
        assert server.exit_code == 0 and engine.was_shut_down() and not engine.aborts()


@pytest.mark.parametrize("how", ["second signal", "timeout"])
def test_second_signal_or_timeout_ends_open_calls_with_an_error(how: str) -> None:
    timeout_s = 0.3 if how == "timeout" else 60
    with serving(endless(), shutdown_timeout=timeout_s) as server:
        with open_stream(server) as (_, lines):
            server.signal()
            if how == "second signal":
                server.signal()
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["code"] == "shutting_down"
        server.thread.join(60)
        assert server.exit_code == 0
        assert len(server.engine.aborts()) == 1 and server.engine.was_shut_down()


def test_real_signals_drain_a_real_serve(caplog: Any) -> None:
    """`serve` in the main thread: says that it is ready, SIGTERM ends it, handlers are restored."""
    caplog.set_level("INFO", logger="toque.serve")
    before = signal.getsignal(signal.SIGTERM)
    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    engine = FakeEngine(reply=lambda r: bytes_then_end("x" * 20), step_s=0.01)

    def use_it() -> str:
        with httpx.Client(base_url=url, timeout=60) as http:
            wait_for(lambda: http.get("/ready").status_code == 200)
            body = {"prompt": "x", "stream": True, "max_tokens": 30}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                return "".join(lines)

    thread, out = in_thread(use_it)
    assert asyncio.run(serve(sock, ServeOptions(), engine, ByteTokenizer)) == 0
    thread.join(60)
    assert out[0].endswith("data: [DONE]") and '"finish_reason":"stop"' in out[0]
    assert f"ready: {url}" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
