"""Prefill and decode engines in one process, over real transports, for tests that break things.

Engines, fleet and the server's engine client are the real ones; a test steps the engines itself, in
the event loop, so nothing happens between two looks. Faults are put between the collaborators: a
transport's peer that lies, a port that loses announcements, an engine that is not stepped any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from toque.build import Engine, Loaded, assemble, configure, load
from toque.config import EngineConfig
from toque.disagg import fleet as fleet_module
from toque.disagg.fleet import Fleet
from toque.disagg.order import Sharing
from toque.disagg.sharing import SharedEngine
from toque.disagg.transport import Bytes, Peer, TransferError
from toque.ipc import InProcess
from toque.memory.manager import CacheManager
from toque.metrics import Metrics
from toque.options import EngineOptions
from toque.serve.frontend import EngineClient
from toque.types import (
    Event,
    Fetch,
    Finished,
    FinishReason,
    FromEngine,
    PageFault,
    PageRef,
    PagesReady,
    Refused,
    Release,
    Request,
    SamplingParams,
    Source,
    ToEngine,
    Tokens,
)

SECRET = b"s" * 32
PATIENT_S = 100.0  # a test's own patience, on a machine that is busy with something else
OPTIONS = EngineOptions(
    load_format="dummy",
    threads=1,
    max_model_len=256,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=96 * 16 * 384,  # 96 pages of 16 tokens: a few sequences fill them
)


class Model:
    """Loaded once; engines are made of it in a moment."""

    def __init__(self, path: Path) -> None:
        self.loaded: Loaded = load(path, OPTIONS)
        self.config: EngineConfig = configure(self.loaded, OPTIONS)

    def engine(self, channel: Any, sharing: Sharing | None = None) -> Engine:
        return assemble(self.loaded, self.config, "tiny", channel, sharing)

    def answers(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """What one engine says, alone, one request at a time."""
        channel = InProcess()
        core = self.engine(channel.engine).core
        told: dict[str, list[int]] = {}
        for request in requests:
            channel.send(request)
            told[request.id] = []
            while core.step() or core.scheduler.has_work:
                for event in _events(channel.drain()):
                    if isinstance(event, Tokens):
                        told[request.id] += event.ids
        return told


def _events(messages: Sequence[FromEngine]) -> Iterator[Event]:
    for message in messages:
        yield from getattr(message, "events", ())


def request(number: int) -> Request:
    """Greedy and seeded ones, of all lengths around pages and chunks; every fourth begins like
    another one. Of the first few hundred numbers, no two are the same."""
    length = 17 + 37 * number % 180
    family = number // 4 * 4 if number % 4 == 3 else number
    tokens = [3 + (7 * place + 13 * family + place * family % 11) % 250 for place in range(length)]
    tokens[-1] = 3 + number % 250
    sampled = SamplingParams(
        temperature=float(number % 2), seed=number, max_tokens=12, ignore_eos=True
    )
    return Request(
        id=f"r{number}", prompt=tuple(tokens), sampling=sampled, arrived_s=time.monotonic()
    )


# -------------------------------------------------------------------------------------- faults


@dataclass
class Faults:
    """What goes wrong; nothing by default. Each is asked with a number that counts up."""

    pull: Callable[[int, Peer, Sequence[PageRef], Bytes, float], None] | None = None
    announce: Callable[[int, PagesReady], list[PagesReady]] | None = None
    lose_releases: bool = False
    pulls: int = 0
    announcements: int = 0


class FaultyPeer:
    """A real transport's peer, with somebody at the cable."""

    def __init__(self, peer: Peer, faults: Faults, frozen: Callable[[], bool]) -> None:
        self.name = peer.name
        self._peer, self._faults, self._frozen = peer, faults, frozen

    def pull(self, refs: Sequence[PageRef], out: Bytes, deadline_s: float) -> None:
        while self._frozen():  # whose process is stopped, answers nothing
            if time.monotonic() >= deadline_s:
                raise TransferError("the deadline has passed", PageFault.LATE)
            time.sleep(0.001)
        self._faults.pulls += 1
        if self._faults.pull is None:
            self._peer.pull(refs, out, deadline_s)
        else:
            self._faults.pull(self._faults.pulls, self._peer, refs, out, deadline_s)

    def fence(self) -> None:
        self._peer.fence()

    def close(self) -> None:
        self._peer.close()


@dataclass
class Seen:
    """How far each request has come, as its messages tell."""

    fetching: set[str] = field(default_factory=set)
    first_page: set[str] = field(default_factory=set)
    last_page: set[str] = field(default_factory=set)
    decoding: set[str] = field(default_factory=set)


class TestEngine:
    """A Launcher, and the engine that it launched last."""

    __test__ = False

    def __init__(self, role: str, hall: Hall) -> None:
        self.role = role
        self.starts = 0
        self.frozen = False
        self.pause_s = 0.0  # between two steps
        self._stepped_s = 0.0
        self._hall = hall
        self._engine: Engine | None = None

    async def start(self) -> InProcess:
        self.starts += 1
        self.frozen = False
        self._channel = _Tapped(self)
        sharing = Sharing(secret=SECRET, transport=self._hall.transport, role=self.role)
        self._engine = self._hall.model.engine(self._channel.engine, sharing)
        source = self._engine.hello.source
        assert source is not None
        self._hall.owners[source.engine] = (self, self.starts)
        self._channel.engine.send(self._engine.hello)
        return self._channel

    async def stop(self, port: Any) -> None:
        self.end()

    def end(self) -> None:
        if self._engine is not None:
            self._engine.core._port.close()
            self._engine = None

    def step(self) -> bool:
        now_s = time.monotonic()
        if self._engine is None or self.frozen or now_s < self._stepped_s + self.pause_s:
            return False
        self._stepped_s = now_s
        return self._engine.core.step()

    def kill(self) -> None:
        """As by signal 9: not a word more, and whatever it served over the network is gone."""
        self.frozen = False
        self.end()
        self._channel.fail("the engine process was ended by SIGKILL")

    def gone(self, start: int) -> bool:
        return self._engine is None or start != self.starts

    @property
    def cache(self) -> CacheManager | None:
        return None if self._engine is None else self._engine.core.scheduler.cache

    # ------------------------------------------------------------------------------ messages

    def to_engine(self, message: ToEngine) -> list[ToEngine]:
        if isinstance(message, Fetch):
            self._hall.seen.fetching.add(message.request.id)
        if isinstance(message, PagesReady):
            self._hall.seen.first_page.add(message.id)
            if message.last:
                self._hall.seen.last_page.add(message.id)
        lost = isinstance(message, Release) and self._hall.faults.lose_releases
        return [] if lost else [message]

    def from_engine(self, message: FromEngine) -> list[FromEngine]:
        faults = self._hall.faults
        for event in _events([message]):
            if isinstance(event, Tokens) and self.role != "prefill":
                self._hall.seen.decoding.add(event.id)
        if isinstance(message, PagesReady) and faults.announce is not None:
            faults.announcements += 1
            return list(faults.announce(faults.announcements, message))
        return [message]


class _Tapped(InProcess):
    """The channel of an engine, with a look at what passes."""

    def __init__(self, of: TestEngine) -> None:
        super().__init__()
        self._of = of
        inner = self.engine.send

        def send(message: FromEngine) -> None:
            for passed in of.from_engine(message):
                inner(passed)

        self.engine.send = send  # type: ignore[method-assign]

    def send(self, message: ToEngine) -> None:
        for passed in self._of.to_engine(message):
            super().send(passed)


class Hall:
    """A fleet, its engines, and the client that a server would have of it."""

    def __init__(
        self, model: Model, transport: str, faults: Faults | None = None, decoders: int = 1
    ) -> None:
        self.model, self.transport = model, transport
        self.faults = faults or Faults()
        self.seen = Seen()
        self.owners: dict[str, tuple[TestEngine, int]] = {}  # by name of the source
        self.prefill = TestEngine("prefill", self)
        self.decoders = [TestEngine("decode", self) for _ in range(decoders)]
        self.engines = [self.prefill, *self.decoders]
        self.metrics = Metrics()

    def play(self, scenario: Callable[[], Any], **settings: float) -> None:
        """Run it while the engines step. `settings` are of the fleet, in seconds."""
        settings = {"FIRST_RETRY_S": 0.01, "LONGEST_RETRY_S": 0.05, "TELL_S": 0.02, **settings}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setattr(fleet_module, name, value)
            with self._faulty(patch):
                asyncio.run(self._play(scenario))

    @contextmanager
    def _faulty(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        connect = SharedEngine.connect

        def faulty(engine: SharedEngine, source: Source) -> Peer:
            owner, start = self.owners[source.engine]
            if owner.gone(start):
                raise TransferError("nobody is there")
            return FaultyPeer(connect(engine, source), self.faults, lambda: owner.frozen)

        patch.setattr(SharedEngine, "connect", faulty)
        yield

    async def _play(self, scenario: Callable[[], Any]) -> None:
        self.fleet = Fleet(self.engines)
        self.client = EngineClient(self.fleet, self.metrics)
        tasks = [asyncio.create_task(self.client.pump()), asyncio.create_task(self._step())]
        try:
            await asyncio.wait_for(self.client.said_hello.wait(), PATIENT_S)
            await scenario()
        finally:
            self.fleet.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self.fleet._tasks, return_exceptions=True)
            for engine in self.engines:
                engine.end()

    async def _step(self) -> None:
        while True:
            moved = [engine.step() for engine in self.engines]
            await asyncio.sleep(0 if any(moved) else 0.001)  # the threads that pull need a turn

    # ------------------------------------------------------------------------------- requests

    async def ask(self, request: Request, leave: Callable[[], bool] = lambda: False) -> Answer:
        """Until its end, or until `leave` says so."""
        answer = Answer()
        with self.client.submit([request]) as call:
            while answer.end is None and not leave():
                try:
                    events = await asyncio.wait_for(call.take(), 0.002)
                except TimeoutError:
                    continue
                for event in events:
                    if isinstance(event, Tokens):
                        answer.first_s = answer.first_s or time.monotonic()
                        answer.tokens += event.ids
                    elif isinstance(event, Finished | Refused):
                        answer.end = event
        return answer

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENT_S
        while not condition():
            assert time.monotonic() < end, f"never: {what}"
            await asyncio.sleep(0.001)

    async def at_rest(self) -> None:
        """Every page is returned on both sides, by the books proved from scratch."""
        assert not self.client.stuck_s()
        await self.until("all requests are over", lambda: not self.fleet._placed)
        await self.until("all engines are there", lambda: all(e.cache for e in self.engines))
        caches = [engine.cache for engine in self.engines]
        await self.until(
            "no page is held",
            lambda: not any(c and (c.held_pages or c.guests) for c in caches),
        )
        for cache in caches:
            assert cache is not None
            cache.check()

    def metric(self, name: str) -> float:
        """`name` or `name{label=value}`: the sum of all samples that carry the label."""
        name, _, condition = name.removesuffix("}").partition("{")
        label, _, value = condition.partition("=")
        return sum(
            sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == f"toque_{name}" and (not label or sample.labels.get(label) == value)
        )


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    end: Finished | Refused | None = None
    first_s: float | None = None

    @property
    def whole(self) -> bool:
        return isinstance(self.end, Finished) and self.end.reason is FinishReason.LENGTH

    @property
    def unserved(self) -> bool:
        """Told so: 503, or an error after what came."""
        if isinstance(self.end, Refused):
            return self.end.status == 503
        return isinstance(self.end, Finished) and self.end.reason is FinishReason.ERROR
