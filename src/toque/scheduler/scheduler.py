"""The scheduler: continuous batching by one rule.

A sequence has `num_computed` and `len(tokens)`; a chunk computes some of the difference. A decode
is a chunk of one token, a prompt one of many, and a sequence that comes back after preemption, or
whose beginning was found in the cache, simply starts elsewhere. (Iteration-level scheduling: Orca,
OSDI'22; chunked prefill: Sarathi-Serve, OSDI'24; preemption by recomputation: PagedAttention,
SOSP'23.)

Owns: every Sequence, the waiting and running lists, the worker's row numbers.
Knows: token counts, pages through the CacheManager, the policy's order.
Does not know: what a page contains, kernels, text, HTTP.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from toque.memory.manager import CacheManager
from toque.scheduler.policy import Policy
from toque.scheduler.sequence import Sequence, Status
from toque.types import (
    Chunk,
    Counters,
    Event,
    Finished,
    FinishReason,
    Load,
    Refused,
    Request,
    RowSetup,
    Sampled,
    StepPlan,
    StepResult,
    TokenId,
    Tokens,
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


@dataclass(slots=True)
class Draft:
    """A step plan in the making, by request id, so that a preemption can take a chunk back."""

    budget_tokens: int
    setups: dict[str, RowSetup] = field(default_factory=dict)
    chunks: dict[str, Chunk] = field(default_factory=dict)
    preempted: bool = False

    def drop(self, request_id: str) -> None:
        self.setups.pop(request_id, None)
        chunk = self.chunks.pop(request_id, None)
        if chunk is not None:
            self.budget_tokens += chunk.num_tokens


@dataclass(slots=True)
class Totals:
    """Mutable twin of `Counters`; prefix_hits + first computations = prompt_tokens admitted."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0


class Scheduler:
    def __init__(self, limits: Limits, cache: CacheManager, policy: Policy) -> None:
        self._limits = limits
        self._cache = cache
        self._policy = policy
        self._sequences: dict[str, Sequence] = {}  # every one that is not finished
        self._waiting: list[Sequence] = []  # sorted by the policy's key
        self._running: dict[int, Sequence] = {}  # by row
        self._free_rows = list(range(limits.max_num_seqs))[::-1]
        self._arrivals = 0
        self._totals = Totals()

    # ------------------------------------------------------------------ what serve asks for

    def add(self, request: Request) -> Refused | None:
        """Queue a request, or say why not. Serve has checked all of it: this is the second lock."""
        reason = self._why_not(request)
        if reason is not None:
            return Refused(id=request.id, message=reason)
        sequence = Sequence(request, order=self._arrivals)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)
        return None

    def _why_not(self, request: Request) -> str | None:
        limits = self._limits
        if request.id in self._sequences:
            return "a request with this id is already running"
        if not request.prompt:
            return "the prompt has no tokens"
        if len(request.prompt) >= limits.max_model_len:
            return (
                f"the prompt has {len(request.prompt)} tokens; with at least one more they do not "
                f"fit the context of {limits.max_model_len}"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < limits.vocab_size:
            return f"a token id of the prompt is outside the vocabulary of {limits.vocab_size}"
        if request.sampling.seed is None:
            return "the request carries no seed"
        if request.sampling.max_tokens is not None and request.sampling.max_tokens < 1:
            return "max_tokens is below 1"
        return None

    def abort(self, request_id: str, reason: FinishReason, now_s: float) -> Finished | None:
        """End a request early. None when it has ended already: the two crossed on the wire."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, reason, now_s)

    def abort_all(self, reason: FinishReason, now_s: float) -> list[Event]:
        return [
            self._finish(sequence, reason, now_s) for sequence in list(self._sequences.values())
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # ------------------------------------------------------------------------------- plan

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step; None when nothing can run, which is only when nothing is there."""
        draft = Draft(self._limits.max_num_batched_tokens)
        for sequence in self._running_order():
            if sequence.status is Status.RUNNING:  # not preempted by an earlier one just now
                self._continue(sequence, draft)
        if not draft.preempted:
            self._admit_waiting(draft, now_s)
        if not draft.chunks:
            assert not self._sequences, "there is work and nothing of it can run"
            return None
        self._totals.steps += 1
        return StepPlan(
            step=self._totals.steps,
            setups=tuple(draft.setups.values()),
            chunks=tuple(draft.chunks.values()),
        )

    def _running_order(self) -> list[Sequence]:
        """Decodes first, so that a long prompt takes only what the budget leaves."""
        running = sorted(self._running.values(), key=self._policy.key)
        return sorted(running, key=lambda sequence: not sequence.is_decoding)

    def _continue(self, sequence: Sequence, draft: Draft) -> None:
        num_tokens = self._chunk_tokens(sequence, draft)
        if num_tokens == 0:
            return
        pages = self._cache.grow(sequence.id, sequence.num_computed + num_tokens)
        while pages is None:
            victim = self._policy.victim(self._running.values())
            self._preempt(victim, draft)
            if victim is sequence:
                return
            pages = self._cache.grow(sequence.id, sequence.num_computed + num_tokens)
        self._put(sequence, num_tokens, pages, draft)

    def _chunk_tokens(self, sequence: Sequence, draft: Draft) -> int:
        """How many tokens to compute now; 0 = not in this step."""
        num_tokens = min(sequence.num_to_do, draft.budget_tokens)
        if num_tokens < sequence.num_to_do and not self._limits.chunked_prefill:
            return 0
        return num_tokens

    def _put(
        self, sequence: Sequence, num_tokens: int, pages: tuple[int, ...], draft: Draft
    ) -> None:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        known = sequence.last_on_worker and num_tokens == 1
        assert sequence.row is not None
        draft.chunks[sequence.id] = Chunk(
            row=sequence.row,
            start=start,
            num_tokens=num_tokens,
            tokens=() if known else tuple(sequence.tokens[start:end]),
            new_pages=pages,
            sample=end == len(sequence.tokens),
        )
        draft.budget_tokens -= num_tokens

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Give the pages back. The full ones stay in the radix tree until somebody needs them."""
        draft.drop(sequence.id)
        draft.preempted = True
        self._cache.release(sequence.id)
        self._leave_row(sequence)
        self._totals.preemptions += 1
        sequence.lost_tokens = max(sequence.lost_tokens, sequence.num_computed)
        sequence.num_computed = 0
        self._enqueue(sequence)

    # -------------------------------------------------------------------------- admission

    def _admit_waiting(self, draft: Draft, now_s: float) -> None:
        spoken_for_pages = self._spoken_for_pages()
        for sequence in tuple(self._waiting):
            if not self._free_rows or draft.budget_tokens == 0:
                return
            if sequence.waits_for is not None and self._cache.is_pending(sequence.waits_for):
                continue  # a running sequence is computing these very pages: cooked once
            needed_pages = self._admit(sequence, draft, spoken_for_pages, now_s)
            if needed_pages is None:
                return  # nobody overtakes: who waits longest gets the pages that come free
            spoken_for_pages += needed_pages

    def _spoken_for_pages(self) -> int:
        """Pages that running sequences will ask for soon: the rest of their prompts, and one each
        to decode into. Admitting into them would only preempt somebody a moment later."""
        total = 0
        for sequence in self._running.values():
            whole = self._pages_for(len(sequence.tokens))
            total += max(0, whole - self._cache.num_pages(sequence.id)) + 1
        return total

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.block_size)

    def _admit(
        self, sequence: Sequence, draft: Draft, spoken_for_pages: int, now_s: float
    ) -> int | None:
        """Start (or restart) a waiting sequence. Returns the pages it will still need, 0 if it was
        found to wait for a running one's pages; None when it does not fit now."""
        salt = sequence.request.cache_salt
        match = self._cache.match(sequence.tokens, salt)
        sequence.waits_for = match.pending
        if match.pending is not None:
            return 0
        missing_pages = self._pages_for(len(sequence.tokens)) - len(match.pages)
        sequence.num_computed = match.num_tokens
        num_tokens = self._chunk_tokens(sequence, draft)
        if num_tokens == 0 or not self._cache.fits(match, missing_pages + spoken_for_pages):
            sequence.num_computed = 0
            return None
        self._cache.admit(sequence.id, sequence.tokens, salt, match)
        pages = self._cache.grow(sequence.id, sequence.num_computed + num_tokens)
        assert pages is not None  # missing_pages were available
        self._count_admission(sequence, match.num_tokens, now_s)
        self._take_row(sequence, match.pages, draft)
        self._put(sequence, num_tokens, pages, draft)
        return missing_pages - len(pages) + 1

    def _count_admission(self, sequence: Sequence, hit_tokens: int, now_s: float) -> None:
        totals = self._totals
        totals.recomputed_tokens += max(0, sequence.lost_tokens - hit_tokens)
        sequence.lost_tokens = 0
        if sequence.admitted_s is not None:
            return  # it comes back: its prompt was counted the first time
        sequence.admitted_s = now_s
        sequence.cached_tokens = hit_tokens
        totals.prompt_tokens += sequence.num_prompt
        totals.prefix_queries += sequence.num_prompt
        totals.prefix_hits += hit_tokens

    # ------------------------------------------------------------------- rows and the queue

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=self._policy.key)

    def _take_row(self, sequence: Sequence, pages: tuple[int, ...], draft: Draft) -> None:
        self._waiting.remove(sequence)
        sequence.status = Status.RUNNING
        sequence.row = self._free_rows.pop()
        sequence.last_on_worker = False
        self._running[sequence.row] = sequence
        draft.setups[sequence.id] = RowSetup(
            row=sequence.row,
            sampling=sequence.request.sampling,
            choice=sequence.request.choice,
            num_prompt=sequence.num_prompt,
            pages=pages,
            end_token_ids=tuple(sorted(sequence.stop_ids(self._limits.end_token_ids))),
            history=tuple(sequence.tokens) if needs_history(sequence.request) else (),
        )

    def _leave_row(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        del self._running[sequence.row]
        self._free_rows.append(sequence.row)
        sequence.row = None

    # ----------------------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Book what a step computed. `result` is of `plan`, the one planned last."""
        sampled = {entry.row: entry for entry in result.sampled}
        events: list[Event] = []
        for chunk in plan.chunks:
            sequence, outcome = self._running[chunk.row], sampled.get(chunk.row)
            if outcome is not None and outcome.error is not None:
                events.append(
                    self._finish(sequence, FinishReason.ERROR, now_s, error=outcome.error)
                )
                continue
            sequence.num_computed += chunk.num_tokens
            self._totals.computed_tokens += chunk.num_tokens
            self._cache.commit(sequence.id, sequence.tokens, sequence.num_computed)
            if chunk.sample:
                assert outcome is not None
                events.extend(self._append(sequence, outcome, now_s))
        return events

    def _append(self, sequence: Sequence, sampled: Sampled, now_s: float) -> list[Event]:
        sequence.tokens.append(sampled.token)
        sequence.last_on_worker = True
        self._totals.generation_tokens += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        limits = self._limits
        reason = sequence.finish_reason(limits.end_token_ids, limits.max_model_len)
        ends = reason is FinishReason.STOP
        events: list[Event] = [
            Tokens(id=sequence.id, ids=(sampled.token,), ends=ends, logprobs=logprobs)
        ]
        if reason is not None:
            events.append(self._finish(sequence, reason, now_s))
        return events

    def _finish(
        self, sequence: Sequence, reason: FinishReason, now_s: float, error: str | None = None
    ) -> Finished:
        if sequence.status is Status.RUNNING:
            self._cache.release(sequence.id)
            self._leave_row(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.id]
        ended_by = sequence.finish_reason(self._limits.end_token_ids, self._limits.max_model_len)
        return Finished(
            id=sequence.id,
            reason=reason,
            usage=sequence.usage(),
            times=sequence.times(now_s),
            stop_token=sequence.tokens[-1] if ended_by is FinishReason.STOP else None,
            error=error,
        )

    # ------------------------------------------------------------------------------ views

    def load(self) -> Load:
        cache = self._cache
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            free_pages=cache.free_pages,
            cached_pages=cache.cached_pages,
            held_pages=cache.held_pages,
            total_pages=cache.total_pages,
        )

    def counters(self) -> Counters:
        totals = self._totals
        return Counters(**{name: getattr(totals, name) for name in Counters.__struct_fields__})

    def check(self) -> None:
        """Prove the books: rows, lists and pages agree. For idle moments and tests."""
        self._cache.check()
        rows = sorted(self._free_rows + list(self._running))
        assert rows == list(range(self._limits.max_num_seqs)), "a row is lost or taken twice"
        listed = {s.id for s in self._waiting} | {s.id for s in self._running.values()}
        assert listed == set(self._sequences), "a sequence is in no list, or in one too many"
        if not self._sequences:
            assert self._cache.held_pages == 0, "pages are held and nobody is here"


def needs_history(request: Request) -> bool:
    """Whether the sampler must know which tokens stand in the sequence already."""
    sampling = request.sampling
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )
