"""What a step is planned within: limits, the plan in the making, and the totals of all steps.

Owns: the numbers of one scheduler. Knows: requests and chunks. Does not know: order, pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import msgspec

from toque.scheduler.cost import Work
from toque.scheduler.queue import NO_LIMITS, QueueLimits
from toque.scheduler.sequence import Sequence
from toque.types import (
    Chunk,
    Counters,
    FinishReason,
    RefusalCause,
    Request,
    RowSetup,
    SamplingParams,
    TokenId,
    WaitReason,
)

RANGES = (
    ("max_tokens", 0, inf),
    ("min_tokens", 0, inf),
    ("temperature", 0, 1e6),
    ("top_k", 0, inf),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("logprobs", 0, inf),
    ("prompt_logprobs", 0, inf),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that bound a step and a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    chunked_prefill: bool
    end_token_ids: frozenset[TokenId]
    queue: QueueLimits = NO_LIMITS

    def why_not(self, request: Request) -> str | None:
        """Why the engine can never run this request. Serve has checked all of it already."""
        prompt, sampling = request.prompt, request.sampling
        if not prompt:
            return "the prompt has no tokens"
        if len(prompt) + len(request.output) >= self.max_model_len:
            return (
                f"the prompt has {len(prompt) + len(request.output)} tokens; with at least one "
                f"more they do not fit the context of {self.max_model_len}"
            )
        named = (
            *sampling.allowed_token_ids,
            *sampling.logit_bias,
            *sampling.stop_token_ids,
            *(token for word in sampling.bad_words for token in word),
        )
        for ids, what in (
            (prompt + request.output, "the prompt"),
            (named, "the sampling parameters"),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                return f"a token id of {what} is outside the vocabulary of {self.vocab_size}"
        if sampling.seed is None:
            return "the request carries no seed"
        if request.pooling and (sampling.max_tokens != 0 or sampling.prompt_logprobs is not None):
            return "a request for a vector asks for nothing else"
        return out_of_range(sampling)


def out_of_range(sampling: SamplingParams) -> str | None:
    """Numbers that have no meaning, whoever sent them; serve's own limits are narrower."""
    for name, low, high in RANGES:
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:
            return f"{name} is {value}; it must be between {low:g} and {high:g}"
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        return "top_p and repetition_penalty must be above 0"
    return None


@dataclass(slots=True)
class Draft:
    """A step plan in the making, by request id, so that a preemption can take a chunk back."""

    budget_tokens: int
    now_s: float = 0.0
    limit_ms: float = inf  # how long the step may take
    spoken_for_pages: int = 0  # running sequences will ask for them soon
    work: Work = field(default_factory=Work)
    setups: dict[str, RowSetup] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    preempted: bool = False

    @property
    def why_not(self) -> WaitReason:
        """Why whoever comes next gets nothing of it."""
        return WaitReason.SLO if self.budget_tokens and self.limit_ms < inf else WaitReason.BUDGET

    def put(self, request_id: str, chunk: Chunk) -> None:
        self.chunks[request_id] = chunk
        self.budget_tokens -= chunk.num_tokens
        self.work.add_chunk(chunk)

    def drop(self, request_id: str) -> None:
        self.setups.pop(request_id, None)
        chunk = self.chunks.pop(request_id, None)
        if chunk is not None:
            self.budget_tokens += chunk.num_tokens
            self.work.add_chunk(chunk, sign=-1)


@dataclass(slots=True)
class Totals:
    """Mutable twin of `Counters`; prefix_hits + moved_tokens + first computations = prompt_tokens
    admitted."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    moved_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    wasted_aborted_tokens: int = 0
    wasted_stopped_tokens: int = 0
    wasted_evicted_tokens: int = 0
    wasted_failed_tokens: int = 0
    refused_invalid: int = 0
    refused_queue_requests: int = 0
    refused_queue_tokens: int = 0
    refused_queue_timeout: int = 0
    refused_slo: int = 0
    downgraded: int = 0
    corrupted: int = 0

    def admitted(
        self, sequence: Sequence, hit_tokens: int, evicted_tokens: int, now_s: float
    ) -> None:
        """Count an admission, in the sequence too; a prompt counts the first time only."""
        again_tokens = max(0, sequence.lost_tokens - hit_tokens)
        self.recomputed_tokens += again_tokens
        sequence.spent_tokens -= again_tokens  # they will be computed, and count once
        sequence.lost_tokens = 0
        if sequence.admitted_s is not None:
            return
        sequence.admitted_s = now_s
        sequence.cached_tokens = hit_tokens
        self.prompt_tokens += sequence.num_prompt
        self.prefix_queries += sequence.num_prompt
        moved_tokens = min(hit_tokens, sequence.request.moved_tokens)
        self.moved_tokens += moved_tokens
        self.prefix_hits += hit_tokens - moved_tokens
        self.wasted_evicted_tokens += evicted_tokens

    def ended(self, sequence: Sequence, reason: FinishReason, kept_tokens: int | None) -> None:
        """Count what was computed for nothing; what a preemption cost is counted already."""
        if reason is FinishReason.ABORT:
            self.wasted_aborted_tokens += sequence.spent_tokens
        elif reason is FinishReason.ERROR:
            self.wasted_failed_tokens += sequence.spent_tokens
        elif kept_tokens is not None:
            self.wasted_stopped_tokens += max(0, sequence.num_output - kept_tokens)

    def refused(self, cause: RefusalCause) -> None:
        name = f"refused_{cause}"
        setattr(self, name, getattr(self, name) + 1)

    def counters(self) -> Counters:
        return msgspec.convert(self, Counters, from_attributes=True)


def needs_history(request: Request) -> bool:
    """Whether the sampler must know which tokens stand in the sequence already."""
    sampling = request.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or any(len(word) > 1 for word in sampling.bad_words)
        or request.grammar is not None
        or request.thinking is not None
    )
