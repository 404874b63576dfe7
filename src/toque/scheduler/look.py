"""What the scheduler and the cache look like from outside: the load after a step, the dashboard's
picture.

Owns: nothing. Knows: sequences, the queue, the cache's counts. Does not know: who looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from toque.memory.manager import CacheManager
from toque.scheduler.queue import Queue
from toque.scheduler.sequence import Sequence, Status
from toque.types import Branch, Lane, Load, Snapshot, WaitReason

SHOWN_WAITING = 64
SHOWN_BRANCHES = 512
REASONS_SEEN = 64  # of the queue: who is further back waits for those before


def load_of(
    running: Collection[Sequence],
    queue: Queue,
    cache: CacheManager,
    ms_per_token: float,
    now_s: float,
) -> Load:
    oldest = queue.oldest
    return Load(
        running=len(running),
        waiting=len(queue),
        free_pages=cache.free_pages,
        cached_pages=cache.cached_pages,
        held_pages=cache.held_pages,
        total_pages=cache.total_pages,
        empty_places=sum(empty_places(sequence, cache) for sequence in running),
        waiting_tokens=queue.tokens,
        queue_age_s=0.0 if oldest is None else max(0.0, now_s - oldest.request.arrived_s),
        backlog_s=queue.tokens * ms_per_token / 1e3,
        waiting_by_reason=_reasons(queue),
    )


def empty_places(sequence: Sequence, cache: CacheManager) -> int:
    """Token places of its pages that hold no token; shared pages are full."""
    return cache.num_pages(sequence.id) * cache.block_size - sequence.num_computed


def _reasons(queue: Queue) -> dict[str, int]:
    if not len(queue):
        return {}
    seen = Counter(str(sequence.diary.waits) for sequence in queue.head(REASONS_SEEN))
    seen[str(WaitReason.BEHIND)] += max(0, len(queue) - REASONS_SEEN)
    return {reason: count for reason, count in seen.items() if count}


def snapshot(
    step: int, running: Iterable[Sequence], queue: Queue, cache: CacheManager, now_s: float
) -> Snapshot:
    """O(total pages + nodes of the tree): for a person who looks, not for every step."""
    lanes = [lane(sequence, cache, now_s) for sequence in running]
    lanes.sort(key=lambda shown: shown.row)
    lanes += [lane(sequence, cache, now_s) for sequence in queue.head(SHOWN_WAITING)]
    runs = cache.runs()
    tree = tuple(
        Branch(parent=parent, pages=pages, holders=holders, pending=pending)
        for parent, pages, holders, pending in runs[:SHOWN_BRANCHES]
    )
    return Snapshot(
        step=step,
        lanes=tuple(lanes),
        waiting=len(queue),
        pages=cache.page_states(),
        tree=tree,
        branches=len(runs),
    )


def lane(sequence: Sequence, cache: CacheManager, now_s: float) -> Lane:
    runs = sequence.status is Status.RUNNING
    return Lane(
        id=sequence.id,
        row=-1 if sequence.row is None else sequence.row,
        prompt_tokens=sequence.num_prompt,
        computed_tokens=sequence.num_computed,
        output_tokens=sequence.num_output,
        cached_tokens=sequence.cached_tokens,
        chunk_tokens=sequence.chunk_tokens if runs else 0,
        pages=cache.num_pages(sequence.id) if runs else 0,
        arrived_s=sequence.request.arrived_s,
        slo=sequence.request.slo.name if sequence.request.slo else "",
        slack_ms=slack_ms(sequence, now_s),
        waits="" if runs else str(sequence.diary.waits),
    )


def slack_ms(sequence: Sequence, now_s: float) -> float | None:
    """Until its next promise is due; below zero, it is broken. None without one."""
    slo = sequence.slo
    if slo is None:
        return None
    due_s: list[float] = []
    if slo.ttft_s is not None and sequence.first_token_s is None:
        due_s.append(sequence.request.arrived_s + slo.ttft_s)
    if slo.itl_s is not None and sequence.last_token_s is not None:
        due_s.append(sequence.last_token_s + slo.itl_s)
    if slo.deadline_s is not None:
        due_s.append(sequence.request.arrived_s + slo.deadline_s)
    return (min(due_s) - now_s) * 1e3 if due_s else None
