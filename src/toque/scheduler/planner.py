"""The next step: which tokens of which sequences.

Owns: how long prompts have been held up. Knows: the queue, the rows, pages through the
CacheManager, the policy's order, what a step costs. Does not know: what a page contains, who asked.

In each step the running streams come first, a token each. What the budget leaves is for prompts:
first for those that the policy lets go aside of the order (a share of it, see `Policy.aside`), then
for running and waiting ones in the policy's order, as rows and pages allow. Nobody overtakes
another who waits for pages.
"""

from __future__ import annotations

from heapq import merge
from math import inf
from typing import Any

from toque.memory.manager import CacheManager, Match
from toque.scheduler.cost import StepCost
from toque.scheduler.door import Door
from toque.scheduler.policy import Policy
from toque.scheduler.queue import Queue
from toque.scheduler.rows import Rows
from toque.scheduler.sequence import Sequence, Status
from toque.scheduler.step import Draft, Limits, Totals, needs_history
from toque.types import Chunk, NoteKind, Pooling, RowSetup, StepPlan, WaitReason

SCORED_CHUNK_TOKENS = 64  # of one sequence and step, while it reports prompt logprobs
WINDOW = 64  # of the queue are looked at in a step, beside those that can get a row
PATIENCE_STEPS = 8  # without a prompt token, for the streams' sake; then a page's worth is computed
HEADROOM_PAGES = 4  # that each running sequence must be able to take before one comes back


class Planner:
    def __init__(
        self,
        limits: Limits,
        cache: CacheManager,
        policy: Policy,
        cost: StepCost,
        queue: Queue,
        rows: Rows,
        door: Door,
        totals: Totals,
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._policy = policy
        self._cost = cost
        self._queue = queue
        self._rows = rows
        self._door = door
        self._totals = totals
        self._stalled_steps = 0  # since a prompt got a token, while one was there

    def plan(self, now_s: float) -> StepPlan | None:
        """None when nothing can run, which is only when nothing is there."""
        draft = Draft(self._limits.max_num_batched_tokens, now_s)
        running = sorted(self._rows.running.values(), key=lambda sequence: sequence.key)
        streams = [sequence for sequence in running if sequence.is_decoding]
        for sequence in streams:  # first, so that a long prompt takes only what the budget leaves
            if sequence.status is Status.RUNNING:  # not preempted by an earlier one just now
                self._continue(sequence, draft)
        streams_planned = len(draft.chunks)
        self._plan_prompts([s for s in running if not s.is_decoding], streams, draft)
        if not draft.chunks:
            return None
        held_up = draft.limit_ms < inf and len(draft.chunks) == streams_planned
        wanted = len(self._queue) + len(running) > len(streams)
        self._stalled_steps = self._stalled_steps + 1 if held_up and wanted else 0
        self._totals.steps += 1
        return StepPlan(
            step=self._totals.steps,
            setups=tuple(draft.setups.values()),
            chunks=tuple(draft.chunks.values()),
        )

    def _plan_prompts(self, prompts: list[Sequence], streams: list[Sequence], draft: Draft) -> None:
        draft.limit_ms = self._policy.limit_ms(streams, draft.now_s)
        if self._stalled_steps >= PATIENCE_STEPS:
            draft.limit_ms = inf
            draft.budget_tokens = min(draft.budget_tokens, self._cache.block_size)
        draft.spoken_for_pages = self._spoken_for_pages()
        self._plan_aside(prompts, draft)
        self._plan_in_order(prompts, draft)

    def _plan_aside(self, prompts: list[Sequence], draft: Draft) -> None:
        """Those that the policy lets use a share of the step before the order is followed."""
        line = prompts + self._window(draft)
        room = min(draft.budget_tokens, self._cost.most_tokens(draft.work, 0, draft.limit_ms))
        if len(line) < 2 or sum(sequence.num_expected for sequence in line) <= room:
            return
        share, listed = self._policy.aside(line, draft.now_s)
        granted = int(room * share)
        withheld = draft.budget_tokens - granted
        draft.budget_tokens = granted
        for sequence in listed:
            if draft.budget_tokens == 0 or draft.preempted:
                break
            if sequence.status is Status.RUNNING:
                self._continue(sequence, draft)
            elif self._leaves_enough(sequence, line[0]) and not self._waits_for_page(sequence):
                self._admit(sequence, draft, self._pages_for_head(sequence, line[0]))
        draft.budget_tokens += withheld

    def _window(self, draft: Draft) -> list[Sequence]:
        """The head of the queue, and whoever has waited longest."""
        if draft.preempted or not len(self._queue) or not self._rows.free:
            return []
        head, oldest = self._queue.head(WINDOW), self._queue.oldest
        return head if oldest is None or oldest in head else [*head, oldest]

    def _leaves_enough(self, sequence: Sequence, first: Sequence) -> bool:
        """The last free row is for the first in line, if that one has come earlier and waits."""
        reserved = first.status is Status.WAITING and first.order < sequence.order
        return len(self._rows.free) > reserved

    def _pages_for_head(self, sequence: Sequence, first: Sequence) -> int:
        if first.status is Status.RUNNING or first.order > sequence.order:
            return 0  # they are spoken for, or it has to wait for an older one
        return self._pages_for(len(first.tokens)) + 1

    def _continue(self, sequence: Sequence, draft: Draft) -> None:
        num_tokens = self._chunk_tokens(sequence, draft)
        if num_tokens == 0:
            sequence.diary.wait(draft.why_not, draft.now_s)
            return
        pages = self._cache.grow(sequence.id, sequence.num_computed + num_tokens)
        while pages is None:
            victim = self._policy.victim(self._rows.running.values())
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
        if sequence.num_to_score:
            num_tokens = min(num_tokens, SCORED_CHUNK_TOKENS)
        most = self._cost.most_tokens(draft.work, sequence.num_computed, draft.limit_ms)
        return min(num_tokens, most)

    def _put(
        self, sequence: Sequence, num_tokens: int, pages: tuple[int, ...], draft: Draft
    ) -> None:
        start, end = sequence.num_computed, sequence.num_computed + num_tokens
        known = sequence.last_on_worker and num_tokens == 1
        assert sequence.row is not None
        sequence.chunk_tokens = num_tokens
        chunk = Chunk(
            row=sequence.row,
            start=start,
            num_tokens=num_tokens,
            tokens=() if known else tuple(sequence.tokens[start:end]),
            new_pages=pages,
            sample=end == len(sequence.tokens) and sequence.generates,
            **_targets(sequence, start, end),
            **_pooled(sequence, num_tokens, end),
        )
        draft.put(sequence.id, chunk)

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Give the pages back. The full ones stay in the radix tree until somebody needs them."""
        draft.drop(sequence.id)
        draft.preempted = True
        self._cache.release(sequence.id)
        self._rows.leave(sequence)
        self._totals.preemptions += 1
        sequence.diary.add(
            NoteKind.PREEMPTED, draft.now_s, tokens=sequence.num_computed, reason=WaitReason.PAGES
        )
        sequence.diary.waits = WaitReason.PAGES
        sequence.preemptions += 1
        sequence.lost_tokens = max(sequence.lost_tokens, sequence.num_computed)
        sequence.num_computed = 0
        sequence.hit_tokens = 0
        self._queue.push(sequence)

    def _plan_in_order(self, prompts: list[Sequence], draft: Draft) -> None:
        """Running and waiting prompts as the policy orders them. One that does not fit keeps those
        behind it from starting: who waits longest gets the pages that come free."""
        blocked = False
        waiting = self._queue.head(WINDOW + len(self._rows.free))
        for sequence in list(merge(prompts, waiting, key=lambda sequence: sequence.key)):
            if sequence.id in draft.chunks:
                continue
            if sequence.status is Status.RUNNING:
                self._continue(sequence, draft)
            elif self._waits_for_page(sequence):
                continue
            elif blocked or draft.preempted:
                sequence.diary.wait(WaitReason.BEHIND, draft.now_s)
            else:
                blocked = not self._start(sequence, draft)

    def _start(self, sequence: Sequence, draft: Draft) -> bool:
        """False: neither this one nor any behind it can be started in this step."""
        if not self._rows.free or draft.budget_tokens == 0:
            reason = draft.why_not if self._rows.free else WaitReason.ROWS
            sequence.diary.wait(reason, draft.now_s)
            return False
        return self._admit(sequence, draft)

    def _waits_for_page(self, sequence: Sequence) -> bool:
        """A running sequence is computing its very next page: cooked once."""
        return sequence.waits_for is not None and self._cache.is_pending(sequence.waits_for)

    def _spoken_for_pages(self) -> int:
        """Pages that running sequences will ask for soon: the rest of their prompts, and one each
        to decode into. Admitting into them would only preempt somebody a moment later."""
        total = 0
        for sequence in self._rows.running.values():
            whole = self._pages_for(len(sequence.tokens))
            total += max(0, whole - self._cache.num_pages(sequence.id)) + 1
        return total

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.block_size)

    def _admit(self, sequence: Sequence, draft: Draft, reserved_pages: int = 0) -> bool:
        """Start (or restart) a waiting sequence, beside `reserved_pages` that must stay free. False
        when it does not fit now; true also if it was found to wait for a running one's pages."""
        match = self.match(sequence)
        sequence.waits_for = match.pending
        if match.pending is not None:
            sequence.diary.wait(WaitReason.SHARED_PAGE, draft.now_s)
            return True
        missing_pages = self._pages_for(len(sequence.tokens)) - len(match.pages)
        sequence.num_computed = match.num_tokens
        num_tokens = self._chunk_tokens(sequence, draft)
        why_not = self._why_wait(sequence, match, missing_pages + reserved_pages, draft)
        if num_tokens == 0 or why_not is not None:
            sequence.num_computed = 0
            sequence.diary.wait(why_not or draft.why_not, draft.now_s)
            return False
        evicted_tokens = self._cache.lost_tokens(
            sequence.tokens, sequence.request.cache_salt, match
        )
        self._cache.admit(sequence.id, sequence.tokens, sequence.request.cache_salt, match)
        pages = self._cache.grow(sequence.id, sequence.num_computed + num_tokens)
        assert pages is not None  # missing_pages were available
        self._take_row(sequence, match.pages, draft)
        self._totals.admitted(sequence, match.num_tokens, evicted_tokens, draft.now_s)
        self._put(sequence, num_tokens, pages, draft)
        draft.spoken_for_pages += missing_pages - len(pages) + 1
        return True

    def _why_wait(
        self, sequence: Sequence, match: Match, needed_pages: int, draft: Draft
    ) -> WaitReason | None:
        """Why a sequence that comes next may not be started yet."""
        if sequence.preemptions:  # room to stay a while, or it would soon be preempted again
            needed_pages += HEADROOM_PAGES * len(self._rows.running)
        if not self._cache.fits(match, needed_pages + draft.spoken_for_pages):
            return WaitReason.PAGES
        return None if self._door.may_run(sequence, draft.now_s) else WaitReason.SLO

    def match(self, sequence: Sequence) -> Match:
        """Who wants logprobs of the prompt, or a mean over it, needs all its rows computed, and a
        mean that was preempted begins again: no hit for those."""
        if sequence.num_to_score or sequence.request.pooling is Pooling.MEAN:
            return Match((), 0, None)
        return self._cache.match(sequence.tokens, sequence.request.cache_salt)

    def _take_row(self, sequence: Sequence, pages: tuple[int, ...], draft: Draft) -> None:
        self._queue.remove(sequence)
        hit_tokens = len(pages) * self._cache.block_size
        sequence.diary.add(NoteKind.ADMITTED, draft.now_s, self._totals.steps + 1, hit_tokens)
        row = self._rows.take(sequence)
        draft.setups[sequence.id] = RowSetup(
            row=row,
            sampling=sequence.request.sampling,
            choice=sequence.request.choice,
            num_prompt=sequence.num_prompt,
            pages=pages,
            end_token_ids=tuple(sorted(sequence.stop_ids(self._limits.end_token_ids))),
            history=tuple(sequence.tokens) if needs_history(sequence.request) else (),
            grammar=sequence.request.grammar,
            thinking=sequence.request.thinking,
        )


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
