"""The text side's view of the engine: open requests, their events, and whether it is alive.

Owns: which requests are open, each call's unread events, the engine's last sign of life.
Knows: ServePort, the messages of types.py, metrics. Does not know: HTTP, text, JSON.

One pump task reads the port and hands events to calls; each call has one reader, which takes all
its unread events at a time, so a reader that falls behind gets fewer and larger portions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from toque import __version__
from toque.errors import EngineError
from toque.ipc import ServePort
from toque.metrics import Metrics, Pace
from toque.serve.dashboard.recent import Recent
from toque.serve.failures import FailedCall, Failure
from toque.serve.timelines import NOBODY, Origin, Timelines
from toque.types import (
    Abort,
    EngineFailed,
    Event,
    Explain,
    Finished,
    FinishReason,
    FleetReport,
    FromEngine,
    Heartbeat,
    Hello,
    Load,
    Look,
    Refused,
    Request,
    Shutdown,
    Snapshot,
    Spellings,
    StepReport,
    Timeline,
    Tokens,
)

log = logging.getLogger("toque.serve")

Clock = Callable[[], float]
MIN_PATIENCE_S = 20.0  # a step is never called stuck before this
PATIENCE_STEPS = 10  # ... or before this many times its predicted length


class ClientGone(Exception):
    """The client closed its connection; nobody waits for an answer."""


class Call:
    """The sequences of one HTTP call: their unread events and the call's only reader."""

    def __init__(self, ids: Sequence[str], cut: Callable[[], None]) -> None:
        self.ids = tuple(ids)
        self.ended = 0  # sequences whose last event has come
        self.longest_tokens = 0  # output
        self.oldest_unread_s: float | None = None
        self._cut = cut
        self._unread: list[Event] = []
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    async def take(self) -> list[Event]:
        """All events since the last take, at least one.

        Raises:
            EngineError, FailedCall, ClientGone: why there will be no more, after the last event.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            await self._wake.wait()
            self._wake.clear()
        events, self._unread = self._unread, []
        self.oldest_unread_s = None
        return events

    def push(self, event: Event, now_s: float) -> None:
        if self.oldest_unread_s is None:
            self.oldest_unread_s = now_s
        self._unread.append(event)
        self._wake.set()

    def fail(self, error: BaseException) -> None:
        """No more events; the first reason given is the one that is told."""
        self._error = self._error or error
        self._wake.set()

    def cut(self) -> None:
        """Drop what nobody reads, and the connection."""
        self._unread.clear()
        self.oldest_unread_s = None
        self._cut()  # first: the connection is known to be lost when the reader wakes up
        self.fail(ClientGone())


@dataclass(slots=True)
class _Open:
    """A sequence that the engine has and has not finished."""

    pace: Pace
    call: Call | None  # None: its reader has left, its end is still to come
    key: str  # label of the API key
    aborted: bool = False


class EngineClient:
    """Sends requests to the engine and distributes what comes back."""

    def __init__(self, port: ServePort, metrics: Metrics, clock: Clock = time.monotonic) -> None:
        self.hello: Hello | None = None
        self.failure: EngineError | None = None
        self.load = Load()
        self.snapshots: dict[int, Snapshot] = {}  # the last answers to `look`, by engine
        self.timelines = Timelines()
        self.recent = Recent(clock)
        self.fleet: FleetReport | None = None  # where there are several engines
        self.predicted_ms = 0.0
        self.said_hello = asyncio.Event()
        self.gone = asyncio.Event()
        self._port = port
        self._metrics = metrics
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._calls: set[Call] = set()
        self._quiet_since_s = clock()
        self._answers: dict[str, asyncio.Future[None]] = {}  # to `explain`, by request id
        self._looking: asyncio.Future[None] | None = None
        self._asked: set[int] = set()  # engines that have not answered `look` yet
        metrics.probe("engine_silence_seconds", self.silence_s)

    # --------------------------------------------------------------------------------- requests

    @property
    def open_requests(self) -> int:
        """Sequences at the engine, those whose reader has left included."""
        return len(self._open)

    @property
    def can_answer(self) -> bool:
        """Whether an engine is there that answers requests."""
        return self.fleet is None or any(
            engine.alive for engine in self.fleet.engines if engine.role != "prefill"
        )

    @contextmanager
    def submit(
        self,
        requests: Sequence[Request],
        cut: Callable[[], None] = lambda: None,
        origin: Origin = NOBODY,
    ) -> Iterator[Call]:
        """A call for these requests; what is unfinished when the block is left gets aborted.

        `cut` closes the client's connection. Raises: FailedCall (503) when the engine is gone.
        """
        if self.failure is not None:
            raise FailedCall(Failure(503, str(self.failure), code="engine_gone"))
        call = Call([request.id for request in requests], cut)
        self._calls.add(call)
        if not self._open:
            self._quiet_since_s = self._clock()
        paces = [Pace(request) for request in requests]
        self.timelines.opened(origin, paces)
        for pace in paces:
            self._open[pace.request.id] = _Open(pace, call, origin.label)
            self._port.send(pace.request)
        self._metrics.open_requests(len(self._open))
        try:
            yield call
        finally:
            self._leave(call)

    def abort(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.ABORT,
        kept_tokens: int | None = None,
    ) -> None:
        """Tell the engine to stop working on a request; its Finished is still to come."""
        entry = self._open.get(request_id)
        if entry is not None and not entry.aborted:
            entry.aborted = True
            self._port.send(Abort(id=request_id, reason=reason, kept_tokens=kept_tokens))

    def _leave(self, call: Call) -> None:
        self._calls.discard(call)
        for request_id in call.ids:
            self.abort(request_id)
            entry = self._open.get(request_id)
            if entry is not None:
                entry.call = None

    def fail_all(self, error: BaseException) -> int:
        """End every open call with an error; returns how many there were."""
        calls = list(self._calls)
        for call in calls:
            call.fail(error)
        return len(calls)

    def cut_slow(self, timeout_s: float) -> int:
        """Abort calls whose oldest unread event has waited too long; returns how many."""
        limit_s = self._clock() - timeout_s
        slow = [c for c in self._calls if c.oldest_unread_s and c.oldest_unread_s < limit_s]
        for call in slow:
            for request_id in call.ids:
                self.abort(request_id)
            call.cut()
        return len(slow)

    def teach(self, spellings: Spellings) -> None:
        """Tell the engine how tokens are spelled."""
        self._port.send(spellings)

    def shutdown(self) -> None:
        """Ask the engine to end."""
        self._port.send(Shutdown())

    # ------------------------------------------------------------------------------------- life

    def silence_s(self) -> float:
        """Since the engine's last word, while it has work."""
        return self._clock() - self._quiet_since_s if self._open else 0.0

    def stuck_s(self) -> float | None:
        """Seconds of silence with open work, once they are more than patience allows."""
        if not self._open:
            return None
        silent_s = self._clock() - self._quiet_since_s
        patience_s = max(MIN_PATIENCE_S, PATIENCE_STEPS * self.predicted_ms / 1000)
        return silent_s if silent_s > patience_s else None

    async def pump(self) -> None:
        """Distribute messages until the engine is gone; then every open call has its error."""
        try:
            while True:
                self._dispatch(await self._port.receive())
        except EngineError as error:
            self._die(error)
        except Exception:
            log.exception("the front end could not handle a message of the engine")
            self._die(EngineError("internal error between the server and its engine"))

    def _die(self, error: EngineError) -> None:
        self.failure = error
        self._metrics.ended(FinishReason.ERROR, len(self._open))
        self._open.clear()
        self._metrics.open_requests(0)
        self.fail_all(error)
        self.gone.set()

    # --------------------------------------------------------------------------------- messages

    def _dispatch(self, message: FromEngine) -> None:
        self._quiet_since_s = now_s = self._clock()
        match message:
            case StepReport():
                self._report(message, now_s)
            case Heartbeat():
                self.predicted_ms = message.predicted_ms
                self._metrics.heartbeat(message.predicted_ms)
            case Hello():
                self.hello = message
                self.load = Load(free_pages=message.total_pages, total_pages=message.total_pages)
                self._metrics.hello(message, __version__)
                self.said_hello.set()
            case Timeline():
                self.timelines.explained(message.id, message.notes)
                _settle(self._answers.pop(message.id, None))
            case Snapshot():
                self.snapshots[message.engine] = message
                self._saw(message.engine)
            case FleetReport():
                self.fleet = message
                self._metrics.fleet(message)
                for index in (self.snapshots.keys() | self._asked) - self._alive():
                    self.snapshots.pop(index, None)  # nothing of it is true any more
                    self._saw(index)
            case EngineFailed():
                raise EngineError(message.message)

    def _report(self, report: StepReport, now_s: float) -> None:
        self.load = report.load
        if report.times is not None:
            self.predicted_ms = 0.0  # the step that announced itself is over
        self._metrics.step(report)
        gaps_s: dict[float, int] = defaultdict(int)
        for event in report.events:
            entry = self._open.get(event.id)
            if entry is None:
                continue
            if isinstance(event, Tokens):
                self._timed(entry.pace, len(event.ids), now_s, gaps_s)
            elif isinstance(event, Finished | Refused):
                self._ended(entry, event)
            if entry.call is not None:
                entry.call.push(event, now_s)
        self._metrics.token_gaps(gaps_s)
        self.recent.step(report, gaps_s)
        self._metrics.open_requests(len(self._open))

    def _timed(self, pace: Pace, tokens: int, now_s: float, gaps_s: dict[float, int]) -> None:
        if not tokens:
            return
        gap_s = pace.came(tokens, now_s)
        if gap_s is not None:
            gaps_s[gap_s] += tokens
        elif pace.first_s is not None:
            self._metrics.first_token(pace.first_s)
            self.recent.first_token(pace.first_s)

    def _ended(self, entry: _Open, event: Finished | Refused) -> None:
        del self._open[event.id]
        self.timelines.ended(event)
        pace, call = entry.pace, entry.call
        if isinstance(event, Refused):
            kept = self._metrics.refusal(event, pace.request)
        else:
            kept = self._metrics.finished(event, pace, entry.key)
        if kept is not None:
            self.recent.promise(kept)
        if call is not None and isinstance(event, Finished):
            call.ended += 1
            call.longest_tokens = max(call.longest_tokens, event.usage.completion_tokens)
            if call.ended == len(call.ids):
                self._metrics.call_ended(call.ended, call.longest_tokens)

    # -------------------------------------------------------------------------------- questions

    async def look(self, patience_s: float) -> None:
        """Have `snapshots` brought up to date; gives up while a step takes longer than this. An
        engine that has not answered yet is not asked again: the others are."""
        for index in self._alive() - self._asked:
            self._asked.add(index)
            self._port.send(Look(engine=index))
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._looking,), timeout=patience_s)

    def _alive(self) -> set[int]:
        if self.fleet is None:
            return {0}
        return {engine.index for engine in self.fleet.engines if engine.alive}

    def _saw(self, engine: int) -> None:
        """An engine has answered `look`, or never will."""
        self._asked.discard(engine)
        if not self._asked:
            _settle(self._looking)

    async def explain(self, request_ids: Sequence[str], patience_s: float) -> None:
        """Have `timelines` brought up to date for open requests; gives up as `look` does."""
        asked = []
        for request_id in request_ids:
            if request_id not in self._answers:
                self._answers[request_id] = asyncio.get_running_loop().create_future()
                self._port.send(Explain(id=request_id))
            asked.append(self._answers[request_id])
        if asked:
            await asyncio.wait(asked, timeout=patience_s)


def _settle(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
