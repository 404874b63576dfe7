"""Several engines behind one ServePort: requests are placed, handed over, and moved when one dies.

Owns: the engines' ports and life, which engine has which request, the tokens it gave so far.
Knows: the channel's messages, routing. Does not know: HTTP, text, pages' contents, processes.

    a request   placed on an engine that decodes; if prompts have engines of their own, one of them
                computes it meanwhile (Prefill) and the decoding one takes its pages (Fetch)
    an engine   starting --Hello--> alive --its port fails--> dead --back-off--> starting ...

What the server has seen of a request decides how it goes on elsewhere: its tokens are sent along
as output, so sampling continues at the next position with the same seed, and the text is the same.
Events of an engine that a request has left are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import structs

from toque.disagg.members import (
    HANDOVER,
    Launcher,
    Member,
    Placed,
    merged_counters,
    merged_hello,
    merged_load,
    only_pages,
)
from toque.disagg.routing import chain, choose
from toque.disagg.totals import added, with_move
from toque.errors import EngineError
from toque.types import (
    FETCH_STAGES,
    Abort,
    EngineFailed,
    Event,
    Explain,
    Fetch,
    Fetched,
    Finished,
    FinishReason,
    FleetReport,
    FromEngine,
    Heartbeat,
    Hello,
    Kept,
    Look,
    PagesReady,
    Prefill,
    PromptScores,
    Refused,
    Release,
    Request,
    Shutdown,
    Snapshot,
    Spellings,
    StepReport,
    Timeline,
    ToEngine,
    Tokens,
    Transfers,
)

log = logging.getLogger("toque.serve")

LEASE_S = 30.0  # how long computed pages are kept for who does not come
PATIENCE_S = 60.0  # how long a request waits for pages before it computes them itself
HANDOFF_TOKENS = 32  # a prompt with less to compute is not worth the journey
TELL_S = 1.0  # how often the engines' state is told, beside every change of it
FIRST_RETRY_S, LONGEST_RETRY_S = 0.5, 30.0


class Fleet:
    """A ServePort. Made before the event loop; `receive` starts the engines' tasks."""

    def __init__(
        self, launchers: Sequence[Launcher], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._members = [Member(i, launcher) for i, launcher in enumerate(launchers)]
        self._clock = clock
        self._placed: dict[str, Placed] = {}
        self._out: asyncio.Queue[FromEngine | EngineError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._hello: Hello | None = None
        self._transfers = Transfers()
        self._spellings: Spellings | None = None
        self._stopping = False

    # ------------------------------------------------------------------------- as a ServePort

    def send(self, message: ToEngine) -> None:
        match message:
            case Request():
                placed = self._placed[message.id] = Placed(message)
                self._place(placed)
            case Abort():
                self._abort(message)
            case Explain():
                self._explain(message)
            case Look():
                self._members[message.engine].send(message)
            case Spellings():
                self._spellings = message  # for engines that come later, too
                for member in self._members:
                    member.send(message)
            case Shutdown():
                self._stopping = True
                for member in self._members:
                    member.send(message)

    async def receive(self) -> FromEngine:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep(member)) for member in self._members]
            self._tasks.append(asyncio.create_task(self._tell_often()))
        message = await self._out.get()
        if isinstance(message, EngineError):
            raise message
        return message

    def close(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    # -------------------------------------------------------------------------------- placing

    def _place(self, placed: Placed) -> None:
        """Choose engines for a request and send it there; refuse it if there are none."""
        request = placed.continued()
        if self._hello is None:
            self._refuse(placed)
            return
        tokens = request.prompt + request.output
        placed.pages = chain(tokens, request.cache_salt, self._hello.block_size)
        decode = self._choose(("both", "decode"), placed, len(tokens))
        if decode is None:
            self._refuse(placed)
            return
        placed.decode = decode
        missing_tokens = decode.missing_tokens(placed, len(tokens), self._hello.block_size)
        prefill = None
        if missing_tokens >= HANDOFF_TOKENS and request.sampling.prompt_logprobs is None:
            prefill = self._choose(("prefill",), placed, len(tokens))
        source = None if prefill is None or prefill.hello is None else prefill.hello.source
        if prefill is None or source is None:
            decode.take(placed, missing_tokens)
            decode.send(request)
            return
        placed.prefill, placed.handovers = prefill, placed.handovers + 1
        placed.stage = FETCH_STAGES[0]
        prefill.take_prompt(placed, missing_tokens)
        decode.take(placed, 0)
        decode.send(Fetch(request=request, source=source, patience_s=PATIENCE_S))
        asked = only_pages(placed.handover_id, request, self._hello.block_size)
        prefill.send(Prefill(request=asked, lease_s=LEASE_S))

    def _choose(self, roles: tuple[str, ...], placed: Placed, tokens: int) -> Member | None:
        assert self._hello is not None
        views = [
            member.view(placed.pages, self._hello.block_size)
            for member in self._members
            if member.alive and member.role in roles
        ]
        index = choose(views, tokens, placed.slack_s(self._clock()))
        return None if index is None else self._members[index]

    def _refuse(self, placed: Placed) -> None:
        """No engine is left for it: 503 if the client has seen nothing, else a failed end."""
        del self._placed[placed.request.id]
        message = "no engine is running; one is being started"
        if placed.begun:
            event: Event = placed.finished(FinishReason.ERROR, self._clock(), message)
        else:
            event = Refused(id=placed.request.id, message=message, status=503, retry_after_s=2)
        self._report((event,))

    def _abort(self, message: Abort) -> None:
        placed = self._placed.get(message.id)
        if placed is None:
            return
        placed.aborted = message.reason
        if placed.decode is not None:
            placed.decode.send(message)
        self._let_go(placed)

    def _explain(self, message: Explain) -> None:
        placed = self._placed.get(message.id)
        if placed is not None and placed.decode is not None:
            if placed.prefill is not None:
                placed.prefill.send(Explain(id=placed.handover_id))
            placed.decode.send(message)

    def _explained(self, member: Member, message: Timeline) -> None:
        """While its prompt is computed elsewhere, that one's answer is the answer."""
        name = message.id.rpartition(HANDOVER)[0] or message.id
        placed, notes = self._placed.get(name), message.notes
        if placed is not None and placed.decode is member:
            if placed.prefill is not None and not notes:
                return
            notes = placed.trail.told(member.index, notes)
        elif placed is not None:
            if notes and self._handed(member, message.id):
                placed.trail.prompt(member.index, notes)
            notes = placed.trail.told(-1, ())
        self._out.put_nowait(Timeline(id=name, notes=notes))

    def _let_go(self, placed: Placed) -> None:
        """Whoever keeps the prompt's pages for this request need not any more."""
        if placed.prefill is not None:
            placed.prefill.drop_prompt(placed)
            placed.prefill.send(Release(id=placed.handover_id))
            placed.prefill = None

    # ------------------------------------------------------------------------------- messages

    async def _keep(self, member: Member) -> None:
        """One engine's life: start it, listen to it, and start it again when it is gone."""
        retry_s = FIRST_RETRY_S
        while not self._stopping:
            try:
                member.port = await member.launcher.start()
                self._tell()
                while True:
                    self._handle(member, await member.port.receive())
                    retry_s = FIRST_RETRY_S if member.alive else retry_s
            except EngineError as error:
                if self._hello is None or self._stopping:
                    self._out.put_nowait(error)  # it never was: a choice that cannot work
                    return
                log.error("engine %d is gone: %s; starting another", member.index, error)
            except Exception:
                log.exception("engine %d said what nobody understands", member.index)
            await self._lost(member)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    async def _lost(self, member: Member) -> None:
        """Move what the engine had, then clear away what is left of it."""
        port = member.lose()
        for placed in list(self._placed.values()):
            if placed.prefill is member:
                placed.prefill = None
                placed.trail.lost(member.index, self._clock())
                self._pages_end(placed)
            if placed.decode is member:
                placed.trail.lost(member.index, self._clock())
                self._move(placed)
        self._tell()
        if self._hello is not None:
            self._report(())  # what it held is held no more, whether or not another one steps
        if port is not None:
            await member.launcher.stop(port)

    def _move(self, placed: Placed) -> None:
        self._let_go(placed)
        placed.decode, placed.scored_here, placed.moved_tokens = None, 0, 0
        placed.stage = ""
        if placed.aborted is not None:
            del self._placed[placed.request.id]
            self._report((placed.finished(placed.aborted, self._clock()),))
            return
        self._transfers = with_move(self._transfers)
        placed.trail.moves(self._clock())
        self._place(placed)

    def _pages_end(self, placed: Placed) -> None:
        """The engine that computed the prompt is gone: what has not come will not."""
        if placed.decode is not None:
            placed.decode.send(PagesReady(id=placed.request.id, first=0, pages=(), last=True))

    def _handle(self, member: Member, message: FromEngine) -> None:
        match message:
            case StepReport():
                member.heard(message)
                seen = [self._seen(member, event) for event in message.events]
                self._report(tuple(event for event in seen if event is not None), message)
            case PagesReady():
                self._pages(member, message)
            case Fetched():
                self._fetched(member, message)
            case Kept():
                member.keeps(message, self._clock())
            case Hello():
                self._welcome(member, message)
            case Snapshot():
                self._out.put_nowait(member.picture(message))
            case Timeline():
                self._explained(member, message)
            case Heartbeat():
                self._out.put_nowait(message)
            case EngineFailed():
                raise EngineError(message.message)

    def _welcome(self, member: Member, hello: Hello) -> None:
        others = {_kind(m.hello) for m in self._members if m.hello is not None}
        if self._hello is not None:
            others.add(_kind(self._hello))
        if others - {_kind(hello)}:
            theirs = ", ".join(sorted(others))
            raise EngineError(f"engine {member.index} is {_kind(hello)}, the others {theirs}")
        member.joined(hello)
        if self._spellings is not None:
            member.send(self._spellings)
        if self._hello is None and all(m.alive for m in self._members):
            hellos = [(m.role, m.hello) for m in self._members if m.hello is not None]
            self._hello = merged_hello(hellos)
            self._out.put_nowait(self._hello)
        self._tell()

    def _pages(self, member: Member, message: PagesReady) -> None:
        placed = self._handed(member, message.id)
        if placed is None or placed.decode is None:
            if message.last:
                member.send(Release(id=message.id))
            return
        placed.stage = FETCH_STAGES[1]
        if message.last:
            member.computed_prompt(placed)
        placed.decode.send(structs.replace(message, id=placed.request.id))

    def _handed(self, member: Member, handover_id: str) -> Placed | None:
        """Whose prompt this member computes under this name; not one that it did before."""
        placed = self._placed.get(handover_id.rpartition(HANDOVER)[0])
        here = placed is not None and placed.prefill is member
        return placed if here and placed and placed.handover_id == handover_id else None

    def _fetched(self, member: Member, fetched: Fetched) -> None:
        placed = self._placed.get(fetched.id)
        if placed is None or placed.decode is not member:
            return
        self._let_go(placed)
        placed.stage = FETCH_STAGES[2]
        assert self._hello is not None
        placed.moved_tokens = fetched.moved_pages * self._hello.block_size
        self._transfers = added(self._transfers, fetched)
        placed.trail.fetched(member.index, fetched, self._hello.block_size)
        self._tell(fetched)

    def _seen(self, member: Member, event: Event) -> Event | None:
        """An event as the client is to see it, and a note of it; None if it is not for a client."""
        placed = self._placed.get(event.id)
        if placed is None or placed.decode is not member:
            computed = self._handed(member, event.id)
            if computed is not None and isinstance(event, Finished):
                computed.trail.prompt(member.index, event.timeline)
            return None
        if isinstance(event, Tokens):
            placed.add(event, self._clock())
            member.computed(placed)
        elif isinstance(event, PromptScores):
            return placed.unseen(event)
        elif isinstance(event, Finished | Refused):
            member.drop(placed)
            self._let_go(placed)
            del self._placed[event.id]
        return placed.corrected(event, member.index) if isinstance(event, Finished) else event

    def _report(self, events: tuple[Event, ...], of: StepReport | None = None) -> None:
        report = of or StepReport()
        self._out.put_nowait(
            structs.replace(
                report,
                events=events,
                load=merged_load(self._members),
                counters=merged_counters(self._members),
            )
        )

    async def _tell_often(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            self._tell()

    def _tell(self, last: Fetched | None = None) -> None:
        if self._hello is None:
            return  # the server knows of no engine before it knows all of them
        states = tuple(member.state(self._clock()) for member in self._members)
        self._out.put_nowait(
            FleetReport(
                engines=states,
                transfers=self._transfers,
                stages=Counter(placed.stage for placed in self._placed.values() if placed.stage),
                last=last,
            )
        )


def _kind(hello: Hello) -> str:
    """What must be equal for engines to go on with each other's requests."""
    return f"{hello.fingerprint} with pages of {hello.block_size} tokens"
