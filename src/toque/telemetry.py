"""What the engine says of itself: totals, loads, timelines, and a picture for the dashboard.

Owns: nothing. Knows: field meanings and units. Does not know: requests' contents, who looks.

These travel beside the values of `types.py`, which exports them too: import them from there.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec


class Wire(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that crosses the process boundary or is recorded."""


class NoteKind(StrEnum):
    """What a line of a timeline tells."""

    QUEUED = "queued"  # the engine took it
    WAIT = "wait"  # nothing of it was computed; `reason` is a WaitReason
    ADMITTED = "admitted"  # it got a row; `tokens` were found in the prefix cache
    CHUNK = "chunk"  # `tokens` of its prompt were computed
    DECODE = "decode"  # `steps` steps in a row gave it a token each
    PREEMPTED = "preempted"  # it lost its pages; `tokens` had been computed
    FIRST_TOKEN = "first_token"
    DOWNGRADED = "downgraded"  # its class could not be kept: no promise from here on
    FETCHED = "fetched"  # its prompt's pages came from another engine, by transport `reason`
    ENGINE_LOST = "engine_lost"  # the engine that had a part of it is gone; it goes on elsewhere
    FINISHED = "finished"  # `reason` is a FinishReason
    MORE = "more"  # what happened after the timeline was full, in one line


class WaitReason(StrEnum):
    """Why nothing of a request was computed in a step."""

    STEP = "step"  # it came while a step was running
    ROWS = "rows"  # as many sequences run as may (--max-num-seqs)
    PAGES = "pages"  # too few KV pages are free
    BUDGET = "budget"  # others took the step's tokens
    BEHIND = "behind"  # others come first and do not fit yet
    SHARED_PAGE = "shared_page"  # a running sequence is computing its next page
    SLO = "slo"  # the step was kept short for the running streams' inter-token targets


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A line of a timeline. On the wire: a list, to be short."""

    kind: NoteKind
    at_s: float
    until_s: float  # the same as at_s for what takes no time
    step: int = 0  # the first one; 0 = none
    steps: int = 0
    tokens: int = 0
    reason: str = ""
    engine: int = -1  # index of who did it; -1: there is one engine
    counts: dict[str, int] = msgspec.field(default_factory=dict)  # of FETCHED: pages by fate, bytes


class Counters(Wire, frozen=True, kw_only=True):
    """Totals since the engine's start, in tokens unless named otherwise; they never decrease."""

    steps: int = 0
    prompt_tokens: int = 0  # of admitted requests, counted once per request
    computed_tokens: int = 0  # run through the model, recomputation included
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # found there; what another engine computed for this request is no hit
    moved_tokens: int = 0  # of prompts: computed by another engine for this request
    preemptions: int = 0  # events
    recomputed_tokens: int = 0  # had been computed before a preemption and were again
    # Tokens computed for nothing, by cause; those of preemptions are `recomputed_tokens`.
    wasted_aborted_tokens: int = 0  # for requests whose client went away
    wasted_stopped_tokens: int = 0  # generated beyond a stop string
    wasted_evicted_tokens: int = 0  # of prompts: had been in the prefix cache, and were given up
    wasted_failed_tokens: int = 0  # for requests that ended with an error
    # Requests that were turned away, by RefusalCause.
    refused_invalid: int = 0
    refused_queue_requests: int = 0
    refused_queue_tokens: int = 0
    refused_queue_timeout: int = 0
    refused_slo: int = 0
    downgraded: int = 0  # requests that wait without their class's promise
    corrupted: int = 0  # requests whose logits were not numbers


Totals = TypeVar("Totals", bound=Wire)


def plus(a: Totals, b: Totals) -> Totals:
    names = a.__struct_fields__
    return type(a)(**{name: getattr(a, name) + getattr(b, name) for name in names})


def minus(a: Totals, b: Totals) -> Totals:
    """What was counted since `b`."""
    names = a.__struct_fields__
    return type(a)(**{name: getattr(a, name) - getattr(b, name) for name in names})


class Load(Wire, frozen=True, kw_only=True):
    """What the engine holds at the end of a step. free + cached + held = total pages, always."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    cached_pages: int = 0  # in the radix tree, held by nobody: evictable
    held_pages: int = 0
    total_pages: int = 0
    empty_places: int = 0  # token places of held pages that hold no token: internal fragmentation
    waiting_tokens: int = 0  # to be computed for those in the queue, as far as they are known
    queue_age_s: float = 0.0  # how long the oldest one in the queue has been there
    backlog_s: float = 0.0  # predicted time until the queue's prompts are computed
    waiting_by_reason: dict[str, int] = msgspec.field(
        default_factory=dict
    )  # WaitReason -> sequences in the queue


class StepTimes(Wire, frozen=True, kw_only=True):
    """Where one step's time went, milliseconds."""

    plan_ms: float = 0.0
    run_ms: float = 0.0
    commit_ms: float = 0.0


class PageLife(msgspec.Struct, frozen=True, array_like=True):
    """What became of a KV page from its allocation to its eviction. On the wire: a list."""

    lifetime_s: float
    idle_s: float  # since its last access, or its allocation where there was none
    gaps_s: tuple[float, ...] = ()  # between its last accesses, one request's to the next one's


class Timeline(Wire, frozen=True, kw_only=True):
    """The answer to `Explain`; no notes: no such request is open."""

    id: str
    notes: tuple[Note, ...] = ()


class Lane(Wire, frozen=True, kw_only=True):
    """One sequence at one moment."""

    id: str
    row: int = -1  # -1: it waits
    prompt_tokens: int
    computed_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    chunk_tokens: int = 0  # in the last step
    pages: int = 0
    arrived_s: float
    slo: str = ""  # name of its class
    slack_ms: float | None = None  # until it must be served to keep its class; None = no class
    waits: str = ""  # WaitReason


class Branch(Wire, frozen=True, kw_only=True):
    """A run of pages of the radix tree without a fork. Children name their parent's place."""

    parent: int = -1  # place in Snapshot.tree; -1 = a root
    pages: int
    holders: int = 0  # of its last page
    pending: bool = False  # being computed


class Snapshot(Wire, frozen=True, kw_only=True):
    """The answer to `Look`: what the dashboard draws."""

    step: int
    lanes: tuple[Lane, ...] = ()  # running ones by row, then the head of the queue
    waiting: int = 0  # all in the queue, shown or not
    pages: bytes = b""  # one per page: 0 free, 1 cached, 2 held, 3 shared
    tree: tuple[Branch, ...] = ()  # parents first; as much as is shown
    branches: int = 0  # all of them
    engine: int = 0  # whose it is, where there are several
