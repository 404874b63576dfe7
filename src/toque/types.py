"""The values that travel between the boxes. All are frozen: whoever holds one may keep it.

Owns: nothing. Knows: field meanings and units. Does not know: HTTP, kernels, pages' contents.

Those that cross the process boundary (`Request`, `Abort`, `Event`s, `Hello`, `StepReport`) and
those that a recording keeps (`StepPlan`) are msgspec structs: the wire format *is* the type.
Times are seconds of `time.monotonic()`, which on one host is the same clock in every process.
What the engine says of itself (totals, load, timelines) is in `telemetry.py` and exported here too.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from toque.handover import (
    FETCH_STAGES,
    EngineState,
    Fetched,
    FleetReport,
    Kept,
    PageFault,
    PageRef,
    PagesReady,
    Release,
    Source,
    Transfers,
)
from toque.sampling import (
    Grammar,
    GrammarKind,
    Pooling,
    SamplingParams,
    ThinkingBudget,
    TokenId,
)
from toque.spec import ModelSpec, RopeSpec, StoredTensor
from toque.telemetry import (
    Branch,
    Counters,
    Lane,
    Load,
    Note,
    NoteKind,
    PageLife,
    Snapshot,
    StepTimes,
    Timeline,
    WaitReason,
    Wire,
)

if TYPE_CHECKING:
    pass

__all__ = (  # beside what is defined here
    "FETCH_STAGES",
    "Branch",
    "Counters",
    "EngineState",
    "Fetched",
    "FleetReport",
    "Grammar",
    "GrammarKind",
    "Kept",
    "Lane",
    "Load",
    "ModelSpec",
    "Note",
    "NoteKind",
    "PageFault",
    "PageLife",
    "PageRef",
    "PagesReady",
    "Pooling",
    "Release",
    "RopeSpec",
    "SamplingParams",
    "Snapshot",
    "Source",
    "StepTimes",
    "StoredTensor",
    "ThinkingBudget",
    "Timeline",
    "TokenId",
    "Transfers",
    "WaitReason",
)


class FinishReason(StrEnum):
    """Why a request ended. Every accepted request ends with exactly one of them."""

    STOP = "stop"  # an end-of-generation token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client went away or the server is shutting down
    HANDOFF = "handoff"  # its prompt is computed, and another engine goes on; clients never see it
    ERROR = "error"  # this request failed; its neighbours did not


# ------------------------------------------------------------------------------------ requests


class Slo(Wire, frozen=True, kw_only=True):
    """A class of service: what its requests are promised. None = nothing is promised of this."""

    name: str
    ttft_s: float | None = None  # from arrival to the first token
    itl_s: float | None = None  # between two tokens of a request
    deadline_s: float | None = None  # from arrival to the last token
    downgrade: bool = False  # who cannot be served in time waits without a promise, not refused


class Request(Wire, frozen=True, kw_only=True):
    """One sequence to generate: one choice of one prompt. `id` is unique over the server's life.

    Invariant at the engine: 1 <= len(prompt) < max_model_len. With `pooling` the answer is one
    vector of the prompt and no token: `sampling` has max_tokens 0.
    """

    id: str
    prompt: tuple[TokenId, ...]
    sampling: SamplingParams
    arrived_s: float
    choice: int = 0  # which of the n: part of the key of its random numbers
    cache_salt: str = ""  # prompts share cached pages only within one salt
    priority: int = 0  # lower comes first, under the policy `priority`
    pooling: Pooling | None = None
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    slo: Slo | None = None  # its class, whichever the policy: attainment is counted under all
    output: tuple[TokenId, ...] = ()  # tokens that another engine gave before it was lost
    moved_tokens: int = 0  # of its prompt are here because another engine computed them for it


class Abort(Wire, frozen=True, kw_only=True):
    """Stop working on a request. `reason` STOP means that the text side matched a stop string."""

    id: str
    reason: FinishReason = FinishReason.ABORT
    kept_tokens: int | None = None  # of the output are in the answer; the rest was for nothing


class Explain(Wire, frozen=True, kw_only=True):
    """Asks for the `Timeline` of a request that is not finished."""

    id: str


class Look(Wire, frozen=True, kw_only=True):
    """Asks for a `Snapshot`."""

    engine: int = 0  # of several


class Shutdown(Wire, frozen=True, kw_only=True):
    """The engine loop ends; whatever still runs is aborted."""


class Spellings(Wire, frozen=True, kw_only=True):
    """How tokens are spelled. The text side says it once, ahead of the first request with a
    grammar: who asks for none never pays for it."""

    tokens: tuple[bytes, ...]  # by id; empty = no text
    markers: tuple[TokenId, ...]  # control and marker tokens: only a grammar that names them …
    end_token_ids: tuple[TokenId, ...]  # … allows them, and these only where it may end
    shown: tuple[TokenId, ...] = ()  # markers that are text to a reader (`<think>`): free text too


class Prefill(Wire, frozen=True, kw_only=True):
    """Compute the whole pages of this prompt and keep them until Release, or for `lease_s`."""

    request: Request
    lease_s: float


class Fetch(Wire, frozen=True, kw_only=True):
    """Serve this request; its prompt's pages are being computed at `source`. What has not come
    `patience_s` from now is computed here."""

    request: Request
    source: Source
    patience_s: float


ToEngine = (
    Request | Abort | Explain | Look | Shutdown | Spellings | Prefill | Fetch | PagesReady | Release
)

# ------------------------------------------------------------------------------------- events


class Logprob(Wire, frozen=True, kw_only=True):
    """Natural-log probabilities at one position: the chosen token and the best alternatives."""

    chosen: float
    rank: int = 1  # of the chosen one among all tokens; 1 = none is more probable
    top: tuple[tuple[TokenId, float], ...] = ()  # best first, ties to the lower id


class Usage(Wire, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission


class Times(Wire, frozen=True, kw_only=True):
    """Moments in the life of a request; None = it never got there."""

    arrived_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


class Tokens(Wire, frozen=True, kw_only=True):
    """New tokens of a request, in order."""

    id: str
    ids: tuple[TokenId, ...]
    ends: bool = False  # the last id is an end or stop token: it counts, but it is not text
    logprobs: tuple[Logprob, ...] = ()  # one per id where the request asked for them


class PromptScores(Wire, frozen=True, kw_only=True):
    """Logprobs of prompt tokens, in order over all such events, from the second token on. All of
    them come before the request's first `Tokens`."""

    id: str
    logprobs: tuple[Logprob, ...]


class PromptVector(Wire, frozen=True, kw_only=True):
    """The pooled state of a prompt, behind the model's last norm; comes right before `Finished`."""

    id: str
    vector: bytes  # [hidden] little-endian float32, of length 1


class Finished(Wire, frozen=True, kw_only=True):
    """The last event of a request."""

    id: str
    reason: FinishReason
    usage: Usage
    times: Times
    stop_token: TokenId | None = None  # which token ended it, where one did
    error: str | None = None  # for ERROR: a sentence for the client
    downgraded: bool = False  # its class was not kept: it waited without a promise
    timeline: tuple[Note, ...] = ()


class RefusalCause(StrEnum):
    INVALID = "invalid"  # the engine can never run it
    QUEUE_REQUESTS = "queue_requests"  # --max-queue-requests
    QUEUE_TOKENS = "queue_tokens"  # --max-queue-tokens
    QUEUE_TIMEOUT = "queue_timeout"  # --queue-timeout
    SLO = "slo"  # its class cannot be kept


class Refused(Wire, frozen=True, kw_only=True):
    """The only event of a request that the engine did not accept, or not in time."""

    id: str
    message: str
    status: int = 400
    retry_after_s: float | None = None
    cause: RefusalCause = RefusalCause.INVALID


Event = Tokens | PromptScores | PromptVector | Finished | Refused


class StepReport(Wire, frozen=True, kw_only=True):
    """One message per step: what happened and what the engine holds now."""

    events: tuple[Event, ...] = ()
    load: Load = Load()
    counters: Counters = Counters()
    times: StepTimes | None = None  # None: nothing ran (only refusals or aborts to report)
    batch_tokens: int = 0
    batch_sequences: int = 0
    predicted_ms: float = 0.0  # of times.run_ms, by the cost model before the step
    page_lives: tuple[PageLife, ...] = ()  # those that ended, of the pages that are watched


class Heartbeat(Wire, frozen=True, kw_only=True):
    """A step that may take long begins: how long it should take."""

    predicted_ms: float


class Hello(Wire, frozen=True, kw_only=True):
    """The engine is ready: what the text side needs to know about the model and the capacity."""

    model_name: str
    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[TokenId, ...]
    block_size: int
    total_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    fingerprint: str  # model, kernel set and KV dtype: what a repeated answer needs to be equal
    scheduling_policy: str = "fcfs"
    slo_classes: tuple[Slo, ...] = ()  # one named "default" is for requests that name none
    pid: int = 0  # of the engine's process
    startup_s: dict[str, float] = msgspec.field(default_factory=dict)  # phase of the start -> time
    source: Source | None = None  # where its pages can be read by other engines
    role: str = "both"  # of one of several: both, prefill or decode
    model_identity: str = ""  # changes with the weights
    prefill_tokens_per_s: float = 0.0  # as measured at the start


class EngineFailed(Wire, frozen=True, kw_only=True):
    """The engine cannot go on; the process ends after this."""

    message: str


FromEngine = (
    StepReport
    | Heartbeat
    | Timeline
    | Snapshot
    | Hello
    | EngineFailed
    | PagesReady
    | Fetched
    | Kept
    | FleetReport
)

# --------------------------------------------------------------------------------------- plans


class RowSetup(Wire, frozen=True, kw_only=True):
    """A sequence takes a row of the worker's state; sent before its first chunk there."""

    row: int
    sampling: SamplingParams
    choice: int
    num_prompt: int  # tokens; positions from here on are output
    pages: tuple[int, ...]  # what the prefix cache found, in order of position
    end_token_ids: tuple[TokenId, ...]  # banned while fewer than min_tokens are out
    history: tuple[TokenId, ...] = ()  # all tokens so far, only where the sampler needs them
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None


class Chunk(Wire, frozen=True, kw_only=True):
    """`num_tokens` tokens of one row from position `start` on, computed in this step.

    `tokens` is empty for a decode: the worker knows the row's last sampled token.
    """

    row: int
    start: int
    num_tokens: int
    tokens: tuple[TokenId, ...] = ()
    new_pages: tuple[int, ...] = ()  # appended to the row's page table before computing
    sample: bool = False  # the last token's logits choose the next token
    targets: tuple[TokenId, ...] = ()  # prompt tokens whose logprobs are wanted …
    targets_from: int = 0  # … by the logits of the chunk's tokens from this one on
    pooled: int = 0  # the states of so many of its last tokens join the row's vector …
    embed: bool = False  # … which is complete with them


class StepPlan(Wire, frozen=True, kw_only=True):
    """Everything one step does, as a value: workers get it, recordings keep it."""

    step: int
    setups: tuple[RowSetup, ...] = ()
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class Sampled(Wire, frozen=True, kw_only=True):
    """What a row got: a token, or the reason why it failed (its neighbours did not)."""

    row: int
    token: TokenId = -1  # stays so where the chunk only scored
    logprob: Logprob | None = None
    scores: tuple[Logprob, ...] = ()  # one per target of the chunk
    vector: bytes = b""  # of a chunk that embeds, see PromptVector
    error: str | None = None
    complete: bool = False  # the row's grammar allows nothing after this token


class StepResult(Wire, frozen=True, kw_only=True):
    step: int
    sampled: tuple[Sampled, ...] = ()
