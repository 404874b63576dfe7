"""Several engines behind one port, played by fakes: who gets what, and what a client sees of it.

The fake engines give token `position * 7 % 1000` at every position, so whoever goes on with a
request in the wrong place, or says something twice, is seen.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from itertools import groupby
from typing import Any

import pytest
from msgspec import structs

from toque.disagg import fleet as fleet_module
from toque.disagg.fleet import Fleet
from toque.errors import EngineError
from toque.types import (
    Abort,
    Counters,
    Event,
    Fetch,
    Fetched,
    Finished,
    FinishReason,
    FleetReport,
    FromEngine,
    Hello,
    Lane,
    Load,
    Look,
    PagesReady,
    Prefill,
    Refused,
    Release,
    Request,
    SamplingParams,
    Shutdown,
    Slo,
    Snapshot,
    Source,
    StepReport,
    Times,
    ToEngine,
    Tokens,
    Usage,
)

BLOCK, OUTPUT = 4, 9


def token_at(position: int) -> int:
    return position * 7 % 1000


class FakeEngine:
    """A ServePort and its launcher in one."""

    def __init__(self, role: str, fingerprint: str = "f", tokens_per_s: float = 0.0) -> None:
        self.role = role
        self.tokens_per_s = tokens_per_s
        self.fingerprint = fingerprint
        self.sent: list[ToEngine] = []  # over all starts
        self.starts = 0
        self._out: asyncio.Queue[FromEngine | EngineError] = asyncio.Queue()

    async def start(self) -> FakeEngine:
        self.starts += 1
        self._out = asyncio.Queue()
        name = f"{id(self)}-{self.starts}"
        source = Source(engine=name, addresses=(), layout="l", layer_bytes=(8,), total_pages=64)
        self.say(
            Hello(
                model_name="m",
                vocab_size=1000,
                max_model_len=512,
                end_token_ids=(),
                block_size=BLOCK,
                total_pages=64,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                kv_cache_dtype="float16",
                fingerprint=self.fingerprint,
                source=source,
                role=self.role,
                prefill_tokens_per_s=self.tokens_per_s,
            )
        )
        return self

    async def stop(self, port: Any) -> None:
        assert port is self

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        message = await self._out.get()
        if isinstance(message, EngineError):
            raise message
        return message

    def close(self) -> None: ...

    def say(self, message: FromEngine | EngineError) -> None:
        self._out.put_nowait(message)

    def report(self, *events: Event) -> None:
        self.say(StepReport(events=events, load=Load(total_pages=64), counters=Counters(steps=1)))

    def die(self) -> None:
        self.say(EngineError("the engine process was ended by SIGKILL"))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def request(name: str, tokens: int = 41) -> Request:
    return Request(
        id=name, prompt=tuple(range(3, 3 + tokens)), arrived_s=0.0,
        sampling=SamplingParams(max_tokens=OUTPUT, seed=1),
    )  # fmt: skip


def end(name: str, reason: FinishReason = FinishReason.LENGTH, cached_tokens: int = 0) -> Finished:
    usage = Usage(prompt_tokens=41, completion_tokens=OUTPUT, cached_tokens=cached_tokens)
    return Finished(id=name, reason=reason, usage=usage, times=Times(arrived_s=0.0))


class Client:
    """Reads the fleet's port and keeps what it says of requests."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, list[Event]] = {}
        self.others: list[FromEngine] = []
        self.counters = Counters()
        self.load = Load()

    async def read(self) -> None:
        while True:
            message = await self.fleet.receive()
            if isinstance(message, StepReport):
                self.counters, self.load = message.counters, message.load
            else:
                self.others.append(message)
            for event in message.events if isinstance(message, StepReport) else ():
                if isinstance(event, Tokens):
                    self.tokens.setdefault(event.id, []).extend(event.ids)
                else:
                    self.ends.setdefault(event.id, []).append(event)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.others if isinstance(message, kind)]

    async def until(self, condition: Callable[[], Any]) -> None:
        for _ in range(20_000):
            if condition():
                return
            await asyncio.sleep(0.0005)
        raise AssertionError("it never came")


def play(engines: list[FakeEngine], scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        fleet = Fleet(engines)
        client = Client(fleet)
        reading = asyncio.create_task(client.read())
        await client.until(lambda: fleet._hello is not None or reading.done())
        try:
            if reading.done():
                await reading
            await scenario(client)
        finally:
            fleet.send(Shutdown())
            fleet.close()
            reading.cancel()
            await asyncio.gather(reading, *fleet._tasks, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "FIRST_RETRY_S", 0.001)
        patch.setattr(fleet_module, "LONGEST_RETRY_S", 0.01)
        asyncio.run(run())


def test_a_prompt_is_handed_over_and_its_pages_are_let_go() -> None:
    """Prefill and Fetch under one id; announcements pass; the lease ends with the fetch. Tokens
    computed for this very request elsewhere are no cache hit."""
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")

    async def scenario(client: Client) -> None:
        client.fleet.send(request("a"))
        (order,), (fetch,) = prefill.of(Prefill), decode.of(Fetch)
        assert fetch.request.id == "a"
        name = order.request.id
        assert order.request.prompt == request("a").prompt[:40]  # whole pages, one token left
        prefill.say(PagesReady(id=name, first=0, pages=()))
        prefill.say(PagesReady(id=name, first=0, pages=(), last=True))
        await client.until(lambda: len(decode.of(PagesReady)) == 2)
        assert {message.id for message in decode.of(PagesReady)} == {"a"}
        decode.say(Fetched(id="a", moved_pages=10, moved_bytes=80))
        await client.until(lambda: prefill.of(Release))
        decode.report(Tokens(id="a", ids=(5,)), end("a", cached_tokens=40))
        await client.until(lambda: client.ends)
        (event,) = client.ends["a"]
        assert isinstance(event, Finished) and event.usage.cached_tokens == 0
        client.fleet.send(request("b"))  # its beginning is where it decodes: no journey
        assert len(prefill.of(Prefill)) == 1 and len(decode.of(Request)) == 1

    play([prefill, decode], scenario)


def test_a_fetch_is_told_by_stage_until_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "TELL_S", 0.001)
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")

    async def scenario(client: Client) -> None:
        def told(stages: dict[str, int]) -> Callable[[], bool]:
            return lambda: client.of(FleetReport)[-1].stages == stages

        client.fleet.send(request("a"))
        client.fleet.send(structs.replace(request("b"), prompt=tuple(range(100, 141))))
        await client.until(told({"waiting_to_start": 2}))
        name = prefill.of(Prefill)[0].request.id
        prefill.say(PagesReady(id=name, first=0, pages=()))
        await client.until(told({"waiting_to_start": 1, "in_progress": 1}))
        prefill.say(PagesReady(id=name, first=0, pages=(), last=True))
        decode.say(Fetched(id="a", moved_pages=10))
        await client.until(told({"waiting_to_start": 1, "completed_waiting": 1}))
        decode.report(Tokens(id="a", ids=(5,)))
        client.fleet.send(Abort(id="b"))
        decode.report(end("b", FinishReason.ABORT))
        await client.until(told({}))

    play([prefill, decode], scenario)


def test_a_prompt_counts_where_it_is_answered_and_its_work_where_it_is_done() -> None:
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
    there = Counters(prompt_tokens=40, prefix_queries=40, prefix_hits=8, computed_tokens=32)
    here = Counters(prompt_tokens=41, prefix_queries=41, moved_tokens=40, computed_tokens=9)

    async def scenario(client: Client) -> None:
        prefill.say(StepReport(counters=there))
        decode.say(StepReport(counters=here))
        await client.until(lambda: client.counters.computed_tokens == 41)
        assert client.counters == structs.replace(here, computed_tokens=41)

    play([prefill, decode], scenario)


def test_a_look_goes_to_one_engine_and_the_picture_says_whose_it_is() -> None:
    """A prompt that is computed for another engine goes by its request's name there."""
    engines = [FakeEngine("prefill"), FakeEngine("decode")]

    async def scenario(client: Client) -> None:
        client.fleet.send(Look(engine=1))
        assert len(engines[1].of(Look)) == 1 and not engines[0].of(Look)
        client.fleet.send(request("a~b"))
        (order,) = engines[0].of(Prefill)
        for engine, name in zip(engines, (order.request.id, "a~b"), strict=True):
            engine.say(Snapshot(step=1, lanes=(Lane(id=name, prompt_tokens=41, arrived_s=0.0),)))
        await client.until(lambda: len(client.of(Snapshot)) == 2)
        assert order.request.id != "a~b"
        assert {(seen.engine, seen.lanes[0].id) for seen in client.of(Snapshot)} == {
            (0, "a~b"),
            (1, "a~b"),
        }

    play(engines, scenario)


def test_an_engine_is_told_alive_lost_starting_and_alive_again() -> None:
    class Slow(FakeEngine):
        async def start(self) -> FakeEngine:
            port = await super().start()
            if self.starts > 1:
                self.hello, self._out = self._out, asyncio.Queue()
            return port

    engines = [FakeEngine("both"), Slow("both")]

    def lives(client: Client) -> list[tuple[bool, bool, int]]:
        told = [report.engines[1] for report in client.of(FleetReport)]
        return [(state.alive, state.starting, state.restarts) for state in told]

    async def scenario(client: Client) -> None:
        engines[1].die()
        await client.until(lambda: (False, False, 1) in lives(client))
        await client.until(lambda: (False, True, 1) in lives(client))
        engines[1].say(await engines[1].hello.get())
        await client.until(lambda: lives(client)[-1] == (True, False, 1))
        assert [states[0] for states, _ in groupby(lives(client))] == [True, False, False, True]

    play(engines, scenario)


@pytest.mark.parametrize("computed", [False, True])
def test_dg03_dg08_an_abort_reaches_both_sides_at_once(computed: bool) -> None:
    """While the prompt is computed, and when it is and the other side has not heard of it."""
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")

    async def scenario(client: Client) -> None:
        client.fleet.send(request("a"))
        name = prefill.of(Prefill)[0].request.id
        if computed:
            prefill.say(PagesReady(id=name, first=0, pages=(), last=True))
            await client.until(lambda: decode.of(PagesReady))
        client.fleet.send(Abort(id="a"))
        assert [m.id for m in prefill.of(Release)] == [name]
        assert [m.id for m in decode.of(Abort)] == ["a"]
        decode.report(end("a", FinishReason.ABORT))
        await client.until(lambda: client.ends)
        prefill.say(PagesReady(id=name, first=0, pages=(), last=True))  # they crossed
        await client.until(lambda: len(prefill.of(Release)) == 2)
        assert client.fleet._members[0].open_requests == client.fleet._members[1].open_requests == 0

    play([prefill, decode], scenario)


def test_what_a_lost_engine_held_is_held_no_more() -> None:
    """Though no other engine has anything to do, and so nothing to report."""
    engines = [FakeEngine("both"), FakeEngine("both")]

    async def scenario(client: Client) -> None:
        engines[0].say(StepReport(load=Load(total_pages=64, held_pages=9, free_pages=55)))
        await client.until(lambda: client.load.held_pages == 9)
        engines[0].die()
        await client.until(lambda: client.load.held_pages == 0)

    play(engines, scenario)


def test_a_lost_prefill_engine_ends_the_wait() -> None:
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")

    async def scenario(client: Client) -> None:
        client.fleet.send(request("a"))
        prefill.die()
        await client.until(lambda: decode.of(PagesReady))
        (message,) = decode.of(PagesReady)
        assert message.last and not message.pages
        await client.until(lambda: prefill.starts == 2)

    play([prefill, decode], scenario)


def test_no_engine_left_is_a_503_or_a_failed_end() -> None:
    """503 for who has seen nothing, an error for who has, the abort's own end for who has left."""
    engine = FakeEngine("both")

    async def scenario(client: Client) -> None:
        for name in ("new", "begun", "left"):
            client.fleet.send(request(name))
        engine.report(Tokens(id="begun", ids=(token_at(41),)))
        await client.until(lambda: client.tokens)
        client.fleet.send(Abort(id="left"))
        engine.die()
        await client.until(lambda: len(client.ends) == 3)
        (refused,), (failed,), (aborted,) = (client.ends[n] for n in ("new", "begun", "left"))
        assert isinstance(refused, Refused) and refused.status == 503 and refused.retry_after_s
        assert isinstance(failed, Finished) and failed.reason is FinishReason.ERROR and failed.error
        assert failed.usage.completion_tokens == 1
        assert isinstance(aborted, Finished) and aborted.reason is FinishReason.ABORT
        await client.until(lambda: engine.starts == 2 and client.fleet._members[0].alive)
        client.fleet.send(request("later"))
        assert engine.of(Request)[-1].id == "later"

    play([engine], scenario)


def test_a_first_token_that_would_be_late_is_sought_elsewhere() -> None:
    """A slow engine has most of the prompt, a fast one has nothing of it: fewer tokens to compute
    decide, unless the class's target would be missed. When it is missed anyway they decide again,
    and a queue that the engine itself reports says how fast it is."""
    slow, fast = FakeEngine("both", tokens_per_s=10), FakeEngine("both", tokens_per_s=1000)
    chat = Slo(name="chat", ttft_s=0.9)

    def asked(name: str, slo: Slo | None = None, late_s: float = 0.0) -> Request:
        arrived_s = time.monotonic() - late_s
        return structs.replace(request(name), arrived_s=arrived_s, slo=slo)

    async def scenario(client: Client) -> None:
        async def goes_to(wanted: FakeEngine, sent: Request) -> None:
            client.fleet.send(sent)
            assert wanted.of(Request)[-1].id == sent.id
            wanted.report(Tokens(id=sent.id, ids=(1,)), end(sent.id))
            await client.until(lambda: sent.id in client.ends)

        await goes_to(slow, asked("first"))  # both know nothing: the lower index
        await goes_to(slow, asked("cached"))  # one token to compute
        client.fleet.send(request("long", 9))  # a second's work for the slow one
        await goes_to(slow, asked("no class"))
        await goes_to(fast, asked("chat", chat))
        # Now both have the prompt, and the slow one its queue; too late everywhere: fewer tokens.
        assert slow.of(Request)[-2].id == "long"
        slow.report(Tokens(id="long", ids=(1,)), end("long"))
        await client.until(lambda: "long" in client.ends)
        await goes_to(slow, asked("late", chat, late_s=2.0))
        load = Load(total_pages=64, waiting_tokens=100, backlog_s=1000.0)
        slow.say(StepReport(load=load))
        await client.until(lambda: client.fleet._members[0].load is load)
        await goes_to(fast, asked("slow as told", chat))

    play([slow, fast], scenario)


def test_engines_that_differ_do_not_start_together() -> None:
    with pytest.raises(EngineError, match=r"is [fg] with .*, the others [fg] with"):
        play([FakeEngine("both"), FakeEngine("both", "g")], _never)


async def _never(client: Client) -> None:
    raise AssertionError("it serves")


def test_an_engine_that_comes_back_as_another_gets_nothing() -> None:
    """An upgrade halfway: it is tried again and again, and the others serve."""
    same, other = FakeEngine("both"), FakeEngine("both")

    async def scenario(client: Client) -> None:
        other.fingerprint = "g"
        other.die()
        await client.until(lambda: other.starts >= 3)
        for number in range(4):
            client.fleet.send(request(f"r{number}"))
        assert len(same.of(Request)) == 4 and not other.of(Request)

    play([same, other], scenario)


@pytest.mark.parametrize("seed", range(12))
def test_dg12_every_request_ends_once_whoever_comes_and_goes(seed: int) -> None:
    """Engines die at random while they answer, and say a little more after their requests have
    moved. All tokens are there once, in order, and each request has one end."""
    chance = random.Random(seed)
    engines = [FakeEngine("both") for _ in range(3)]
    names = [f"r{number}" for number in range(40)]

    def step(engine: FakeEngine, taken: dict[str, int]) -> None:
        """Some tokens of some of its requests, as an engine that knows only what it was sent."""
        for name in list(taken):
            if chance.random() < 0.5:
                position = taken[name]
                taken[name] += 1
                engine.report(Tokens(id=name, ids=(token_at(position),)))
                if taken[name] == 41 + OUTPUT:
                    engine.report(end(name))
                    del taken[name]

    async def scenario(client: Client) -> None:
        taken: list[dict[str, int]] = [{} for _ in engines]
        read = [0] * len(engines)
        waiting = list(names)
        while len(client.ends) < len(names):
            if waiting:
                client.fleet.send(request(waiting.pop()))
            for index, engine in enumerate(engines):
                for message in engine.sent[read[index] :]:
                    if isinstance(message, Request):
                        taken[index][message.id] = 41 + len(message.output)
                        assert message.output == tuple(
                            token_at(41 + place) for place in range(len(message.output))
                        )
                read[index] = len(engine.sent)
                step(engine, taken[index])
                if chance.random() < 0.03:
                    engine.die()
                    taken[index].clear()
            await asyncio.sleep(0)
            await asyncio.sleep(0.0002)
        for name in names:
            (event,) = client.ends[name]
            if isinstance(event, Finished) and event.reason is FinishReason.LENGTH:
                assert client.tokens[name] == [token_at(41 + place) for place in range(OUTPUT)]
            else:  # for a moment nobody was there
                assert isinstance(event, Refused) or event.reason is FinishReason.ERROR  # type: ignore[union-attr]
        assert sum(engine.starts for engine in engines) > 3
        assert not client.fleet._placed
        assert all(not m.open_requests for m in client.fleet._members)

    play(engines, scenario)
