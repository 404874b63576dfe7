"""The scheduler: continuous batching by one rule.

A sequence has `num_computed` and `len(tokens)`; a chunk computes some of the difference. A decode
is a chunk of one token, a prompt one of many, and a sequence that comes back after preemption, or
whose beginning was found in the cache, simply starts elsewhere. (Iteration-level scheduling: Orca,
OSDI'22; chunked prefill: Sarathi-Serve, OSDI'24; preemption by recomputation: PagedAttention,
SOSP'23.)

Owns: every Sequence from its arrival to its end; the queue, the rows, the planner, the totals.
Knows: what a step computed, which tokens end a sequence.
Does not know: the order (policy.py), how a step is planned (planner.py), kernels, text, HTTP.
"""

from __future__ import annotations

from toque.errors import NOT_NUMBERS
from toque.memory.manager import CacheManager
from toque.scheduler.cost import StepCost
from toque.scheduler.door import Door
from toque.scheduler.look import load_of, snapshot
from toque.scheduler.planner import WINDOW, Planner
from toque.scheduler.policy import Policy
from toque.scheduler.queue import Queue
from toque.scheduler.rows import Rows
from toque.scheduler.sequence import Sequence, Status
from toque.scheduler.step import Limits, Totals
from toque.types import (
    Counters,
    Event,
    Finished,
    FinishReason,
    Load,
    NoteKind,
    PageLife,
    PromptScores,
    PromptVector,
    Refused,
    Request,
    Sampled,
    Snapshot,
    StepPlan,
    StepResult,
    Timeline,
    Tokens,
    WaitReason,
)


class Scheduler:
    def __init__(self, limits: Limits, cache: CacheManager, policy: Policy, cost: StepCost) -> None:
        self._limits = limits
        self._cache = cache
        self._sequences: dict[str, Sequence] = {}  # every one that is not finished
        self._queue = Queue(policy, limits.queue)
        self._rows = Rows(limits.max_num_seqs)
        self._door = Door(limits, policy, cost, self._queue, self._rows)
        self._totals = Totals()
        self._planner = Planner(
            limits, cache, policy, cost, self._queue, self._rows, self._door, self._totals
        )
        self._arrivals = 0
        self._planned_s = 0.0

    # ------------------------------------------------------------------ what serve asks for

    def add(self, request: Request, now_s: float) -> Refused | None:
        """Queue a request, or say why not. Serve has checked all of it: this is the second lock."""
        sequence = Sequence(request, order=self._arrivals)
        refused = self._door.why_not(request, taken=request.id in self._sequences)
        if refused is None:
            sequence.hit_tokens = self._planner.match(sequence).num_tokens
            refused = self._door.late(sequence, now_s)
        if refused is not None:
            self._totals.refused(refused.cause)
            return refused
        self._totals.downgraded += sequence.downgraded
        self._arrivals += 1
        self._sequences[request.id] = sequence
        if len(self._queue) >= WINDOW:  # no plan looks that far back
            sequence.diary.wait(WaitReason.BEHIND, now_s)
        self._queue.push(sequence)
        return None

    def abort(
        self, request_id: str, reason: FinishReason, now_s: float, kept_tokens: int | None = None
    ) -> Finished | None:
        """End a request early. None when it has ended already: the two crossed on the wire."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        return self._finish(sequence, reason, now_s, kept_tokens=kept_tokens)

    def abort_all(self, reason: FinishReason, now_s: float) -> list[Event]:
        return [
            self._finish(sequence, reason, now_s) for sequence in list(self._sequences.values())
        ]

    def turn_away(self, now_s: float) -> list[Event]:
        """Those that have waited too long for their first step, or can no longer be served as they
        were promised. Called before each plan."""
        refusals: list[Event] = []
        for sequence in self._queue.timed_out(now_s):
            refusals.append(self._refuse(self._door.timed_out(sequence, now_s)))
        for sequence in self._door.hopeless(now_s):
            was_downgraded = sequence.downgraded
            refused = self._door.late(sequence, now_s)
            if refused is not None:
                refusals.append(self._refuse(refused))
            elif sequence.downgraded and not was_downgraded:
                self._totals.downgraded += 1
                self._queue.reorder(sequence)
        return refusals

    def _refuse(self, refused: Refused) -> Refused:
        sequence = self._sequences.pop(refused.id)
        self._queue.remove(sequence)
        sequence.status = Status.FINISHED
        self._totals.refused(refused.cause)
        return refused

    @property
    def cache(self) -> CacheManager:
        """For those that bring pages or keep them, in the engine's own thread."""
        return self._cache

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # ------------------------------------------------------------------------------- plan

    def plan(self, now_s: float) -> StepPlan | None:
        """The next step; None when nothing can run: nothing is there, or all of it waits for pages
        that a guest of the cache brings or holds."""
        self._planned_s = now_s
        plan = self._planner.plan(now_s)
        stuck = plan is None and self._sequences and not self._cache.guests
        assert not stuck, "there is work and nothing of it can run"
        return plan

    # ----------------------------------------------------------------------------- commit

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Event]:
        """Book what a step computed. `result` is of `plan`, the one planned last."""
        sampled = {entry.row: entry for entry in result.sampled}
        events: list[Event] = []
        for chunk in plan.chunks:
            sequence, outcome = self._rows.running[chunk.row], sampled.get(chunk.row)
            if outcome is not None and outcome.error is not None:
                self._totals.corrupted += outcome.error == NOT_NUMBERS
                events.append(
                    self._finish(sequence, FinishReason.ERROR, now_s, error=outcome.error)
                )
                continue
            kind = NoteKind.DECODE if sequence.is_decoding else NoteKind.CHUNK
            sequence.diary.computed(kind, self._planned_s, now_s, plan.step, chunk.num_tokens)
            sequence.num_computed += chunk.num_tokens
            sequence.spent_tokens += chunk.num_tokens
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
            sequence.diary.add(NoteKind.FIRST_TOKEN, now_s, self._totals.steps)
            self._door.forecast.came(sequence, now_s)
        sequence.last_token_s = now_s
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
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        error: str | None = None,
        kept_tokens: int | None = None,
    ) -> Finished:
        if sequence.status is Status.RUNNING:
            self._cache.release(sequence.id)
            self._rows.leave(sequence)
        else:
            self._queue.remove(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.id]
        self._totals.ended(sequence, reason, kept_tokens)
        self._door.forecast.finished(sequence)
        sequence.diary.add(NoteKind.FINISHED, now_s, self._totals.steps, reason=reason)
        ended_by = sequence.finish_reason(self._limits.end_token_ids, self._limits.max_model_len)
        return Finished(
            id=sequence.id,
            reason=reason,
            usage=sequence.usage(),
            times=sequence.times(now_s),
            stop_token=sequence.tokens[-1] if ended_by is FinishReason.STOP else None,
            error=error,
            downgraded=sequence.downgraded,
            timeline=sequence.diary.notes(),
        )

    # ------------------------------------------------------------------------------ views

    def load(self, now_s: float) -> Load:
        ms_per_token = self._door.ms_per_queued_token()
        return load_of(self._rows.running.values(), self._queue, self._cache, ms_per_token, now_s)

    def page_lives(self) -> tuple[PageLife, ...]:
        """Each is told once."""
        return () if self._cache.watch is None else self._cache.watch.take()

    def timeline(self, request_id: str) -> Timeline:
        sequence = self._sequences.get(request_id)
        return Timeline(id=request_id, notes=sequence.diary.notes() if sequence else ())

    def look(self, now_s: float) -> Snapshot:
        running = self._rows.running.values()
        return snapshot(self._totals.steps, running, self._queue, self._cache, now_s)

    def counters(self) -> Counters:
        return self._totals.counters()

    def check(self) -> None:
        """Prove the books: rows, lists and pages agree. For idle moments and tests."""
        self._cache.check()
        self._rows.check()
        listed = {s.id for s in self._queue} | {s.id for s in self._rows.running.values()}
        assert listed == set(self._sequences), "a sequence is in no list, or in one too many"
        if not self._sequences and not self._cache.guests:
            assert self._cache.held_pages == 0, "pages are held and nobody is here"
