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
from typing import Any

from toque.memory.manager import CacheManager, Match
from toque.scheduler.policy import Policy
from toque.scheduler.sequence import Sequence, Status
from toque.scheduler.step import Draft, Limits, Totals, needs_history
from toque.types import (
    Chunk,
    Counters,
    Event,
    Finished,
    FinishReason,
    Load,
    Pooling,
    PromptScores,
    PromptVector,
    Refused,
    Request,
    RowSetup,
    Sampled,
    StepPlan,
    StepResult,
    Tokens,
)

SCORED_CHUNK_TOKENS = 64  # of one sequence and step, while it reports prompt logprobs


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
        reason = self._limits.why_not(request)
        if request.id in self._sequences:
            reason = "a request with this id is already running"
        if reason is not None:
            return Refused(id=request.id, message=reason)
        sequence = Sequence(request, order=self._arrivals)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)
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
        if not self._limits.chunked_prefill:
            return num_tokens if num_tokens == sequence.num_to_do else 0
        # A scored token costs a row of the head and a softmax over the vocabulary besides.
        return min(num_tokens, SCORED_CHUNK_TOKENS) if sequence.num_to_score else num_tokens

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
            sample=end == len(sequence.tokens) and sequence.generates,
            **_targets(sequence, start, end),
            **_pooled(sequence, num_tokens, end),
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
        match = self._match(sequence)
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
        self._totals.admitted(sequence, match.num_tokens, now_s)
        self._take_row(sequence, match.pages, draft)
        self._put(sequence, num_tokens, pages, draft)
        return missing_pages - len(pages) + 1

    def _match(self, sequence: Sequence) -> Match:
        """Who wants logprobs of the prompt, or a mean over it, needs all its rows computed, and a
        mean that was preempted begins again: no hit for those."""
        if sequence.num_to_score or sequence.request.pooling is Pooling.MEAN:
            return Match((), 0, None)
        return self._cache.match(sequence.tokens, sequence.request.cache_salt)

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
            grammar=sequence.request.grammar,
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
            if chunk.targets:
                assert outcome is not None
                sequence.num_scored += len(chunk.targets)
                events.append(PromptScores(id=sequence.id, logprobs=outcome.scores))
            if chunk.embed:
                assert outcome is not None
                events.append(PromptVector(id=sequence.id, vector=outcome.vector))
            if chunk.sample:
                assert outcome is not None
                events.extend(self._append(sequence, outcome, now_s))
            elif sequence.num_to_do == 0:  # it only wanted its prompt read
                events.append(self._finish(sequence, FinishReason.LENGTH, now_s))
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
        if sampled.complete:  # whatever limit is reached as well: the output is whole
            reason = FinishReason.STOP
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
        return self._totals.counters()

    def check(self) -> None:
        """Prove the books: rows, lists and pages agree. For idle moments and tests."""
        self._cache.check()
        rows = sorted(self._free_rows + list(self._running))
        assert rows == list(range(self._limits.max_num_seqs)), "a row is lost or taken twice"
        listed = {s.id for s in self._waiting} | {s.id for s in self._running.values()}
        assert listed == set(self._sequences), "a sequence is in no list, or in one too many"
        if not self._sequences:
            assert self._cache.held_pages == 0, "pages are held and nobody is here"


def _targets(sequence: Sequence, start: int, end: int) -> dict[str, Any]:
    """The prompt tokens whose logprobs tokens start..end - 1 give and nobody has reported yet."""
    if not sequence.num_to_score:
        return {}
    first = max(start, sequence.num_scored)  # the row of the token before the first target
    last = min(end, sequence.num_prompt - 1)
    return {"targets": tuple(sequence.tokens[first + 1 : last + 1]), "targets_from": first - start}


def _pooled(sequence: Sequence, num_tokens: int, end: int) -> dict[str, Any]:
    """Which of the chunk's states make the vector that the request asks for."""
    pooling = sequence.request.pooling
    if pooling is None:
        return {}
    embed = end == sequence.num_prompt
    return {"pooled": num_tokens if pooling is Pooling.MEAN else int(embed), "embed": embed}
