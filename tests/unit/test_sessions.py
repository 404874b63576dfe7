"""A server's session with an engine elsewhere: who has it, what it leaves, whose clock counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import zmq

from toque.disagg import remote
from toque.disagg.listening import ListeningEnd
from toque.disagg.remote import RemotePort
from toque.disagg.session import ClockOffset, Pong, keys
from toque.errors import ConfigError, EngineError
from toque.types import (
    Abort,
    Counters,
    Fetch,
    Finished,
    FinishReason,
    Hello,
    Note,
    NoteKind,
    PagesReady,
    Prefill,
    Release,
    Request,
    SamplingParams,
    Shutdown,
    Source,
    StepReport,
    Timeline,
    Times,
    ToEngine,
    Tokens,
    Usage,
)

SECRET, OTHER = b"s" * 32, b"t" * 32
AHEAD_S = 5000.0  # the engine's clock
HELLO = Hello(
    model_name="m",
    vocab_size=1000,
    max_model_len=512,
    end_token_ids=(),
    block_size=4,
    total_pages=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    kv_cache_dtype="float16",
    fingerprint="f",
    role="prefill",
    model_identity="weights",
    pid=77,
)
SOURCE = Source(engine="e", addresses=(), layout="l", layer_bytes=(8,), total_pages=64)


def request(name: str, arrived_s: float = 0.0) -> Request:
    return Request(id=name, prompt=(1, 2, 3), sampling=SamplingParams(seed=1), arrived_s=arrived_s)


def ended(name: str, reason: FinishReason = FinishReason.LENGTH) -> Finished:
    return Finished(
        id=name,
        reason=reason,
        usage=Usage(prompt_tokens=3, completion_tokens=1),
        times=Times(arrived_s=0.0),
    )


@dataclass
class Engine:
    """An engine's loop without an engine: what it gets is written down."""

    end: ListeningEnd
    got: list[ToEngine] = field(default_factory=list)
    steps: int = 0

    def turn(self) -> None:
        self.got += self.end.receive(0.0)

    def report(self, *events: Finished | Tokens) -> None:
        self.steps += 1
        self.end.send(StepReport(events=events, counters=Counters(steps=self.steps)))

    async def until(self, number: int) -> None:
        deadline_s = time.monotonic() + 20
        while len(self.got) < number:
            assert time.monotonic() < deadline_s, self.got
            await asyncio.sleep(0.005)

    async def run(self) -> None:
        while True:
            self.turn()
            await asyncio.sleep(0.005)


@asynccontextmanager
async def engine(silent_s: float = 10.0) -> AsyncIterator[Engine]:
    made = Engine(
        ListeningEnd("127.0.0.1", 0, SECRET, lambda: time.monotonic() + AHEAD_S, silent_s)
    )
    made.end.send(HELLO)
    running = asyncio.ensure_future(made.run())
    try:
        yield made
    finally:
        running.cancel()
        made.end.close()


def server(
    made: Engine, name: str = "one", secret: bytes = SECRET, model: str = "weights"
) -> RemotePort:
    return RemotePort(f"127.0.0.1:{made.end.port}", secret, model, name)


async def next_report(port: RemotePort) -> StepReport:
    message = await port.receive()
    assert isinstance(message, StepReport)
    return message


def test_moments_go_from_one_clock_to_the_other() -> None:
    async def run() -> None:
        async with engine() as made:
            port = server(made)
            hello = await port.receive()
            assert isinstance(hello, Hello) and hello.role == "prefill" and hello.pid == 0
            now_s = time.monotonic()
            port.send(request("a", now_s))
            port.send(Fetch(request=request("b", now_s), source=SOURCE, patience_s=3.0))
            port.send(Prefill(request=request("c", now_s), lease_s=3.0))
            await made.until(3)
            a, b, c = made.got
            assert isinstance(a, Request) and isinstance(b, Fetch) and isinstance(c, Prefill)
            for arrived in (a, b.request, c.request):
                assert arrived.arrived_s == pytest.approx(now_s + AHEAD_S, abs=0.5)
            assert b.patience_s == 3.0 and c.lease_s == 3.0  # lengths of time are the same
            there_s = now_s + AHEAD_S
            times = Times(arrived_s=there_s, first_token_s=there_s + 1, finished_s=there_s + 2)
            note = Note(NoteKind.QUEUED, there_s, there_s + 1)
            usage = Usage(prompt_tokens=3, completion_tokens=1)
            made.report(
                Finished(
                    id="a", reason=FinishReason.STOP, usage=usage, times=times, timeline=(note,)
                )
            )
            (event,) = (await next_report(port)).events
            assert isinstance(event, Finished) and event.times.admitted_s is None
            assert event.times.first_token_s == pytest.approx(now_s + 1, abs=0.5)
            assert event.times.finished_s == pytest.approx(now_s + 2, abs=0.5)
            assert event.timeline[0].until_s == pytest.approx(now_s + 1, abs=0.5)
            made.end.send(Timeline(id="b", notes=(note,)))
            told = await port.receive()
            assert isinstance(told, Timeline)
            assert told.notes[0].at_s == pytest.approx(now_s, abs=0.5)
            port.close()

    asyncio.run(run())


def test_the_quickest_answer_tells_the_clock() -> None:
    offset = ClockOffset()
    assert offset.ahead_s == 0.0
    offset.learn(Pong(asked_s=100.0, now_s=1100.9), 101.0)  # it waited for a step
    offset.learn(Pong(asked_s=200.0, now_s=1200.1), 200.2)
    offset.learn(Pong(asked_s=300.0, now_s=1300.5), 302.0)
    assert offset.ahead_s == pytest.approx(1000.0)


def test_what_a_session_leaves_open_ends_with_it() -> None:
    """And the ends of it are not told to the next server, not even under the same name."""

    async def run() -> None:
        async with engine() as made:
            port = server(made)
            await port.receive()
            port.send(request("runs"))
            port.send(request("over"))
            port.send(Fetch(request=request("fetches"), source=SOURCE, patience_s=3.0))
            for name in ("computes", "leased", "released"):
                port.send(Prefill(request=request(name), lease_s=3.0))
            await made.until(6)
            made.report(ended("over"), ended("leased"), ended("released"))
            assert (await next_report(port)).counters.steps == 1
            port.send(Release(id="released"))
            port.send(Shutdown())
            await made.until(11)
            assert made.got[6] == Release(id="released")
            assert sorted(made.got[7:], key=lambda m: m.id) == [  # type: ignore[union-attr]
                Release(id="computes"),
                Abort(id="fetches"),
                Release(id="leased"),
                Abort(id="runs"),
            ]
            port.close()

            second = server(made, "two")
            await second.receive()
            second.send(request("runs"))
            await made.until(12)
            made.report(ended("runs", FinishReason.ABORT), ended("fetches", FinishReason.ABORT))
            made.end.send(PagesReady(id="computes", first=0, pages=(), last=True))
            made.report(ended("computes", FinishReason.ABORT), Tokens(id="runs", ids=(5,)))
            first, then = await next_report(second), await next_report(second)
            assert first.events == () and then.events == (Tokens(id="runs", ids=(5,)),)
            assert then.counters.steps == 2  # of this session
            made.report(ended("runs"))
            assert (await next_report(second)).events == (_at_server(ended("runs"), second),)
            second.close()

    asyncio.run(run())


def _at_server(event: Finished, port: RemotePort) -> Finished:
    from toque.disagg.session import to_server_clock

    moved = to_server_clock(StepReport(events=(event,)), port._offset.ahead_s)
    assert isinstance(moved, StepReport) and isinstance(moved.events[0], Finished)
    return moved.events[0]


def test_one_server_at_a_time_and_the_next_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PING_S", 0.05)

    async def run() -> None:
        async with engine(silent_s=2.0) as made:
            first = server(made, "one")
            await first.receive()
            first.send(request("a"))
            second = server(made, "two")
            joining = asyncio.ensure_future(second.receive())
            await asyncio.sleep(3.0)  # the first one pings: it has the engine
            assert not joining.done()
            first.close()  # without a word
            assert isinstance(await asyncio.wait_for(joining, 20), Hello)
            assert made.got[1] == Abort(id="a")
            second.close()

    asyncio.run(run())


def test_the_same_server_has_its_engine_back_at_once() -> None:
    """Its connection broke: it need not wait for its own silence."""

    async def run() -> None:
        async with engine() as made:
            first = server(made, "one")
            await first.receive()
            first.send(request("a"))
            await made.until(1)
            again = server(made, "one")
            assert isinstance(await again.receive(), Hello)
            assert made.got[1] == Abort(id="a")
            first.send(request("b"))  # of the old session
            with pytest.raises(EngineError, match=r"joins again|session is over"):
                await first.receive()
            assert len(made.got) == 2
            first.close()
            again.close()

    asyncio.run(run())


def test_an_engine_that_leaves_says_so() -> None:
    async def run() -> None:
        async with engine() as made:
            port = server(made)
            await port.receive()
            made.end.leave("it was told to end")
            made.report(ended("a"))
            with pytest.raises(EngineError, match="it was told to end"):
                await port.receive()
            port.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("secret", "model", "version", "what"),
    [
        (OTHER, "weights", None, "did not take our secret"),
        (SECRET, "others", None, "has other weights: m weights, the server others"),
        (SECRET, "weights", "0.0.1", "the server 0.0.1"),
    ],
)
def test_who_does_not_fit_is_told_why(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, model: str, version: str | None, what: str
) -> None:
    if version is not None:
        monkeypatch.setattr(remote, "__version__", version)

    async def run() -> None:
        async with engine() as made:
            port = server(made, secret=secret, model=model)
            with pytest.raises(EngineError, match=what):
                await asyncio.wait_for(port.receive(), 20)
            port.close()
            assert made.got == []

    asyncio.run(run())


def test_nonsense_is_answered_and_hurts_nobody() -> None:
    """From a peer that knows the secret; who does not is not even read."""

    async def run() -> None:
        async with engine() as made:
            port = server(made)
            await port.receive()
            stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            keys(SECRET, engine=False).put_on(stranger, engine=False)
            plain: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            for socket in (stranger, plain):
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(f"tcp://127.0.0.1:{made.end.port}")
                for nonsense in (b"", b"\xff" * 100, b"\x81\xa4type\xa5Nobody"):
                    socket.send(nonsense)
            for _ in range(3):
                await asyncio.sleep(0)
                answer = await asyncio.to_thread(stranger.recv)
                assert b"no message of toque" in answer
            assert not plain.poll(300)
            port.send(request("a"))
            await made.until(1)
            made.report(Tokens(id="a", ids=(4,)))
            assert (await next_report(port)).events == (Tokens(id="a", ids=(4,)),)
            for socket in (stranger, plain):
                socket.close()
            port.close()

    asyncio.run(run())


def test_an_address_that_is_taken_is_named() -> None:
    first = ListeningEnd("127.0.0.1", 0, SECRET)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{first.port}"):
        ListeningEnd("127.0.0.1", first.port, SECRET)
    first.close()
