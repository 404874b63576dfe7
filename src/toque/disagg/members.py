"""What a fleet remembers: of each engine, and of each request that one of them has.

Owns: an engine's port, its last words, its queue as far as it is known; a request's tokens so far.
Knows: messages. Does not know: who decides what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import structs

from toque.disagg.routing import PrefixIndex, View
from toque.disagg.trail import Trail
from toque.ipc import ServePort
from toque.telemetry import plus
from toque.types import (
    Counters,
    EngineState,
    Finished,
    FinishReason,
    Hello,
    Kept,
    Load,
    PromptScores,
    Request,
    SamplingParams,
    Snapshot,
    StepReport,
    Times,
    ToEngine,
    TokenId,
    Tokens,
    Usage,
)

UNKNOWN_TOKENS_PER_S = 200.0
TELLING_TOKENS = 64  # a queue of fewer says little about how fast the engine is
HANDOVER = "~"  # between a request's id and the number of the hand-over


class Launcher(Protocol):
    """How one engine of the fleet is started, again and again."""

    role: str

    async def start(self) -> ServePort:
        """A port to a new engine, which has said nothing yet. Raises EngineError."""

    async def stop(self, port: ServePort) -> None:
        """Close the port, and make sure that nothing of that engine lives on."""


@dataclass(slots=True, eq=False)
class Placed:
    """A request that has not ended, and what the client has seen of it."""

    request: Request
    pages: list[int] = field(default_factory=list)  # routing.chain of its tokens
    output: list[TokenId] = field(default_factory=list)
    decode: Member | None = None  # who answers
    prefill: Member | None = None  # who computes its prompt, or keeps the pages of it
    handovers: int = 0  # begun so far
    aborted: FinishReason | None = None
    begun: bool = False  # the client has seen something
    first_token_s: float | None = None
    scored: int = 0  # prompt logprobs that the client has
    scored_here: int = 0  # of these, given by the engine that answers now, or again by it
    stage: str = ""  # of handover.FETCH_STAGES, until its first token
    moved_tokens: int = 0  # of the prompt, whose pages came from the engine that computed it
    trail: Trail = field(init=False)

    def __post_init__(self) -> None:
        self.trail = Trail(self.request.arrived_s)

    @property
    def handover_id(self) -> str:
        """What the one that computes its prompt calls it. A request that moves may come to the
        same engine again: what that says of the first hand-over must not end the second."""
        return f"{self.request.id}{HANDOVER}{self.handovers}"

    def add(self, event: Tokens, now_s: float) -> None:
        self.begun = True
        self.stage = ""
        self.output += event.ids
        if self.first_token_s is None:
            self.first_token_s = now_s

    def slack_s(self, now_s: float) -> float | None:
        """What is left until its class wants the first token; None if that is out or not asked."""
        slo = self.request.slo
        if slo is None or slo.ttft_s is None or self.output:
            return None
        return self.request.arrived_s + slo.ttft_s - now_s

    def continued(self) -> Request:
        """The request as another engine goes on with it. Prompt logprobs come before the first
        token: who has seen a token has them all."""
        if not self.output:
            return self.request
        sampling = structs.replace(self.request.sampling, prompt_logprobs=None)
        return structs.replace(self.request, output=tuple(self.output), sampling=sampling)

    def unseen(self, event: PromptScores) -> PromptScores | None:
        """Scores of a prompt that the client has not got from an engine before."""
        known = max(0, self.scored - self.scored_here)
        self.scored_here += len(event.logprobs)
        self.scored = max(self.scored, self.scored_here)
        self.begun = True
        fresh = event.logprobs[known:]
        return structs.replace(event, logprobs=fresh) if fresh else None

    def corrected(self, event: Finished, engine: int) -> Finished:
        """An engine's end with what it cannot know: tokens that were computed for this very
        request elsewhere are no cache hit, and the first token may be another engine's."""
        usage, times = event.usage, event.times
        arrived_s = self.request.arrived_s  # as it was said; it went through two clocks since
        admitted_s = None if times.admitted_s is None else max(arrived_s, times.admitted_s)
        first_s = self.first_token_s or times.first_token_s
        cached = max(0, usage.cached_tokens - self.moved_tokens)
        return structs.replace(
            event,
            usage=structs.replace(usage, cached_tokens=cached),
            times=structs.replace(
                times, arrived_s=arrived_s, admitted_s=admitted_s, first_token_s=first_s
            ),
            timeline=self.trail.told(engine, event.timeline),
        )

    def finished(self, reason: FinishReason, now_s: float, error: str | None = None) -> Finished:
        """An end that no engine is left to give."""
        return Finished(
            id=self.request.id,
            reason=reason,
            usage=Usage(prompt_tokens=len(self.request.prompt), completion_tokens=len(self.output)),
            times=Times(
                arrived_s=self.request.arrived_s,
                first_token_s=self.first_token_s,
                finished_s=now_s,
            ),
            error=error,
            timeline=self.trail.told(-1, ()),
        )


def only_pages(handover_id: str, request: Request, block_size: int) -> Request:
    """The request that computes the full pages of a prompt that leave a token to compute."""
    tokens = request.prompt + request.output
    whole = (len(tokens) - 1) // block_size * block_size
    return Request(
        id=handover_id,
        prompt=tokens[:whole],
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=0),
        arrived_s=request.arrived_s,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


class Member:
    """One engine of a fleet, over all its starts."""

    def __init__(self, index: int, launcher: Launcher) -> None:
        self.index = index
        self.launcher = launcher
        self.role = launcher.role
        self.port: ServePort | None = None
        self.hello: Hello | None = None
        self.load = Load()
        self.restarts = 0
        self._counters = Counters()  # of this start
        self._before = Counters()  # of the starts before
        self._kept = Kept()  # of this start …
        self._kept_at_s = 0.0  # … as it was then
        self._kept_before = Kept()
        self._index = PrefixIndex()
        self._waiting: dict[str, int] = {}  # id -> tokens to compute before its first token
        self._prompts: dict[str, int] = {}  # the same for prompts computed for others
        self._open: set[str] = set()

    @property
    def alive(self) -> bool:
        return self.hello is not None

    @property
    def starting(self) -> bool:
        return self.port is not None and not self.alive

    @property
    def open_requests(self) -> int:
        return len(self._open) + len(self._prompts)

    @property
    def counters(self) -> Counters:
        return plus(self._before, self._counters)

    def kept(self, now_s: float) -> Kept:
        """Over all starts; ages go on while the engine says nothing."""
        now = self._kept
        age_s = now.oldest_lease_s + now_s - self._kept_at_s if now.leases else 0.0
        before = structs.replace(self._kept_before, leases=0, oldest_lease_s=0.0)
        return structs.replace(plus(before, now), oldest_lease_s=age_s)

    def send(self, message: ToEngine) -> None:
        if self.port is not None:
            self.port.send(message)

    def view(self, pages: Sequence[int], block_size: int) -> View:
        return View(
            index=self.index,
            waiting_tokens=sum(self._waiting.values()) + sum(self._prompts.values()),
            running=len(self._open),
            cached_tokens=self._index.matched(pages) * block_size,
            tokens_per_s=self._tokens_per_s(),
        )

    def _tokens_per_s(self) -> float:
        """Of prefill, by its own cost model where a queue shows it."""
        load = self.load
        if load.waiting_tokens >= TELLING_TOKENS and load.backlog_s > 0:
            return load.waiting_tokens / load.backlog_s
        measured = self.hello.prefill_tokens_per_s if self.hello is not None else 0.0
        return measured or UNKNOWN_TOKENS_PER_S

    def missing_tokens(self, placed: Placed, tokens: int, block_size: int) -> int:
        return tokens - self._index.matched(placed.pages) * block_size

    # ---------------------------------------------------------------------------------- requests

    def take(self, placed: Placed, tokens: int) -> None:
        """It answers the request, after computing so many tokens."""
        self._open.add(placed.request.id)
        self._waiting[placed.request.id] = tokens
        self._index.remember(placed.pages)

    def computed(self, placed: Placed) -> None:
        """The request's first token is out."""
        self._waiting.pop(placed.request.id, None)

    def drop(self, placed: Placed) -> None:
        self.computed(placed)
        self._open.discard(placed.request.id)

    def take_prompt(self, placed: Placed, tokens: int) -> None:
        self._prompts[placed.request.id] = tokens
        self._index.remember(placed.pages)

    def computed_prompt(self, placed: Placed) -> None:
        """The prompt is computed: only its pages are kept."""
        if placed.request.id in self._prompts:
            self._prompts[placed.request.id] = 0

    def drop_prompt(self, placed: Placed) -> None:
        self._prompts.pop(placed.request.id, None)

    # -------------------------------------------------------------------------------------- life

    def joined(self, hello: Hello) -> None:
        self.hello = hello
        self.role = hello.role
        self.load = Load(free_pages=hello.total_pages, total_pages=hello.total_pages)

    def heard(self, report: StepReport) -> None:
        self.load = report.load
        counters = report.counters
        if self.role == "prefill":  # the request counts where it is answered
            counters = structs.replace(counters, prompt_tokens=0, prefix_queries=0, prefix_hits=0)
        self._counters = counters

    def keeps(self, kept: Kept, now_s: float) -> None:
        self._kept, self._kept_at_s = kept, now_s

    def state(self, now_s: float) -> EngineState:
        return EngineState(
            index=self.index,
            role=self.role,
            alive=self.alive,
            starting=self.starting,
            restarts=self.restarts,
            open_requests=self.open_requests,
            computed_tokens=self.counters.computed_tokens,
            load=self.load,
            kept=self.kept(now_s),
        )

    def picture(self, snapshot: Snapshot) -> Snapshot:
        """With the engine's number; prompts computed for others go by their requests' names."""
        lanes = snapshot.lanes
        if self.role == "prefill":
            lanes = tuple(
                structs.replace(lane, id=lane.id.rpartition(HANDOVER)[0]) for lane in lanes
            )
        return structs.replace(snapshot, engine=self.index, lanes=lanes)

    def lose(self) -> ServePort | None:
        """The engine is gone; returns the port that led to it."""
        port, self.port, self.hello, self.load = self.port, None, None, Load()
        self._before, self._counters = self.counters, Counters()
        self._kept_before, self._kept = plus(self._kept_before, self._kept), Kept()
        self._index.clear()
        self._waiting.clear()
        self._prompts.clear()
        self._open.clear()
        self.restarts += 1
        return port


def merged_counters(members: Sequence[Member]) -> Counters:
    total = Counters()
    for member in members:
        total = plus(total, member.counters)
    return total


LONGEST = ("queue_age_s", "backlog_s")  # fields of Load that are times: the worst one counts


def merged_load(members: Sequence[Member]) -> Load:
    loads = [member.load for member in members]
    reasons: Counter[str] = Counter()
    for load in loads:
        reasons.update(load.waiting_by_reason)
    total: dict[str, Any] = {"waiting_by_reason": dict(reasons)}
    for name in Load.__struct_fields__:
        if name not in total:
            values = [getattr(load, name) for load in loads]
            total[name] = max(values) if name in LONGEST else sum(values)
    return Load(**total)


def merged_hello(hellos: Sequence[tuple[str, Hello]]) -> Hello:
    """What the engines can do together: any of them may get any request."""
    answering = [hello for role, hello in hellos if role != "prefill"]
    everyone = [hello for _, hello in hellos]
    return structs.replace(
        answering[0],
        max_model_len=min(hello.max_model_len for hello in everyone),
        total_pages=sum(hello.total_pages for hello in everyone),
        max_num_seqs=sum(hello.max_num_seqs for hello in answering),
        source=None,
    )
