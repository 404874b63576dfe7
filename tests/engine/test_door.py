"""Who is let in, what the others are told, and what a request's timeline says."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec import structs

from tests.engine.fake import request
from tests.engine.test_simulation import CHAT, step_ms
from toque.build import policy_named
from toque.memory.manager import CacheManager
from toque.scheduler.queue import QueueLimits
from toque.scheduler.sequence import Sequence, Status
from toque.scheduler.slo import BySlo
from toque.sim.engine import Simulation, Sizes
from toque.sim.run import Served
from toque.types import (
    Abort,
    Finished,
    FinishReason,
    Note,
    NoteKind,
    RefusalCause,
    Request,
    Slo,
    ToEngine,
    WaitReason,
)


def simulate(
    sizes: Sizes, policy: str, *arrivals: tuple[float, ToEngine]
) -> tuple[Simulation, dict[str, Served]]:
    served: dict[str, Served] = {}
    keep: Callable[[Served], None] = lambda one: served.update({one.request.id: one})  # noqa: E731
    made = Simulation(sizes, lambda c: policy_named(policy, c), step_ms, iter(arrivals), keep)
    made.run()
    made.scheduler.check()
    return made, served


def come(name: str, at_s: float, prompt: int, output: int, slo: Slo | None = None) -> Request:
    rng = random.Random(name)
    tokens = [rng.randrange(100, 4000) for _ in range(prompt)]
    made = request(name, tokens, output, ignore_eos=True)
    return structs.replace(made, arrived_s=at_s, slo=slo)


# -------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("policy", ["fcfs", "priority", "slo"])
def test_the_queue_holds_so_many_and_the_rest_is_told_when_to_come_again(policy: str) -> None:
    sizes = Sizes(max_num_seqs=2, queue=QueueLimits(max_requests=3))
    crowd = [(0.0, come(f"r{n}", 0.0, 100, 20)) for n in range(9)]
    _, served = simulate(sizes, policy, *crowd)
    refused = [name for name, one in served.items() if one.refused]
    assert refused == ["r5", "r6", "r7", "r8"]  # two rows are free and three may wait
    first = served["r5"].refused
    assert first is not None and first.cause is RefusalCause.QUEUE_REQUESTS
    assert first.status == 429 and (first.retry_after_s or 0) >= 1
    assert "--max-queue-requests" in first.message


def test_prompt_tokens_that_wait_are_bounded_and_one_of_any_length_is_taken() -> None:
    sizes = Sizes(max_num_seqs=1, queue=QueueLimits(max_tokens=500))
    _, served = simulate(
        sizes,
        "fcfs",
        (0.0, come("long", 0.0, 2000, 4)),
        (0.1, come("fits", 0.1, 400, 4)),
        (0.2, come("beyond", 0.2, 200, 4)),
        (0.3, come("small", 0.3, 50, 4)),
    )
    refused = {name: one.refused.cause for name, one in served.items() if one.refused}
    assert refused == {"beyond": RefusalCause.QUEUE_TOKENS}


def test_who_waits_too_long_for_a_first_step_is_told_so() -> None:
    sizes = Sizes(max_num_seqs=1, queue=QueueLimits(timeout_s=2.0))
    _, served = simulate(
        sizes,
        "fcfs",
        (0.0, come("first", 0.0, 100, 400)),
        (0.1, come("second", 0.1, 100, 4)),
        (30.0, come("third", 30.0, 100, 4)),
    )
    refused = served["second"].refused
    assert refused is not None and refused.cause is RefusalCause.QUEUE_TIMEOUT
    assert served["first"].finished and served["third"].finished


def test_a_class_that_says_so_waits_without_its_promise() -> None:
    soft = Slo(name="soft", ttft_s=0.3, downgrade=True)
    hard = structs.replace(soft, name="hard", downgrade=False)
    _, served = simulate(
        Sizes(),
        "slo",
        (0.0, come("long", 0.0, 2000, 8)),
        (0.01, come("soft", 0.01, 1000, 4, soft)),
        (0.02, come("hard", 0.02, 1000, 4, hard)),
    )
    kept, refused = served["soft"].finished, served["hard"].refused
    assert kept is not None and kept.downgraded and not served["soft"].attained
    assert NoteKind.DOWNGRADED in [note.kind for note in kept.timeline]
    assert refused is not None and refused.cause is RefusalCause.SLO
    assert "'hard'" in refused.message


def test_under_another_order_a_class_is_only_a_label() -> None:
    slo = Slo(name="impossible", ttft_s=0.001)
    _, served = simulate(Sizes(), "fcfs", (0.0, come("r", 0.0, 500, 4, slo)))
    assert served["r"].finished and not served["r"].attained


def test_retry_after_is_about_the_time_after_which_it_would_be_taken() -> None:
    """Asked again after that time, the same request is served as promised."""
    sizes, soon, late = Sizes(), Slo(name="soon", ttft_s=4.9), Slo(name="late", ttft_s=6.0)
    # The cost model has seen steps of all kinds before.
    before = [(n * 1.0, come(f"w{n}", n * 1.0, 100 + 150 * n, 8)) for n in range(12)]
    before += [(50.0, come(f"x{n}", 50.0, 1500, 8, soon)) for n in range(2)]

    def asked(at_s: float) -> Served:
        _, served = simulate(sizes, "slo", *before, (at_s, come("late", at_s, 2000, 8, late)))
        return served["late"]

    refused = asked(50.05).refused
    assert refused is not None and refused.retry_after_s is not None
    assert asked(50.05 + 1.2 * refused.retry_after_s).attained
    assert asked(50.05 + 0.2 * refused.retry_after_s).refused is not None


# ------------------------------------------------------------------------------------- victims


def running(order: int, computed: int, slo: Slo | None = None, output: int = 0) -> Sequence:
    sequence = Sequence(come(f"s{order}", 0.0, 100, 50, slo), order)
    sequence.status, sequence.num_computed = Status.RUNNING, computed
    sequence.tokens += [1] * output
    return sequence


def test_a_victim_has_no_promise_or_is_cheap_and_is_never_the_oldest() -> None:
    policy = BySlo(lambda start, tokens: float(tokens))
    oldest, stream = running(0, 10), running(1, 50, CHAT, output=3)
    reading, cheap, dear = running(2, 20, CHAT), running(3, 30), running(4, 90)
    everybody = [oldest, stream, reading, cheap, dear]
    order = []
    while everybody:
        victim = policy.victim(everybody)
        everybody.remove(victim)
        order.append(victim)
    assert order == [cheap, dear, reading, stream, oldest]
    cheap.preemptions = 1  # not again and again: now four times as dear
    assert policy.victim([oldest, cheap, dear]) is dear


# ------------------------------------------------------------------------------------ timelines


def notes_of(served: Served) -> tuple[Note, ...]:
    finished = served.finished
    assert isinstance(finished, Finished)
    notes = finished.timeline
    assert notes[0].kind is NoteKind.QUEUED and notes[0].at_s == served.request.arrived_s
    assert notes[-1].kind is NoteKind.FINISHED and notes[-1].reason == finished.reason
    for before, after in pairwise(notes):
        assert before.at_s <= before.until_s <= after.at_s + 1e-9
    return notes


def test_a_timeline_tells_where_the_time_went() -> None:
    """One row: the second waits for it, finds the first's prompt and is read in two chunks."""
    first = come("first", 0.0, 64, 10)
    second = structs.replace(
        come("second", 0.1, 400, 5), prompt=(*first.prompt, *come("tail", 0, 400, 1).prompt)
    )
    sizes = Sizes(max_num_seqs=1, max_num_batched_tokens=300)
    made, served = simulate(sizes, "fcfs", (0.0, first), (0.1, second))
    notes = notes_of(served["second"])
    kinds = [note.kind for note in notes]
    assert kinds == ["queued", "wait", "wait", "admitted", "chunk", "chunk", "first_token",
                     "decode", "finished"]  # fmt: skip
    # It came in the middle of a step, and then there was no row.
    assert [note.reason for note in notes[1:3]] == [WaitReason.STEP, WaitReason.ROWS]
    assert notes[3].tokens == 64, "found in the cache"
    assert [note.tokens for note in notes[4:6]] == [300, 100]
    decode = notes[7]
    assert (decode.steps, decode.tokens) == (4, 4)
    times = served["second"].finished
    assert times is not None and times.times.first_token_s == notes[6].at_s
    spans = sum(note.until_s - note.at_s for note in notes)
    assert spans == pytest.approx(made.clock.now_s - 0.1, rel=0.01), "no time is unaccounted for"


def test_a_preemption_and_an_abort_are_told_and_the_timeline_is_bounded() -> None:
    sizes = Sizes(max_num_seqs=4, total_pages=16, block_size=4, max_model_len=64)
    crowd = [(0.0, come(f"r{n}", 0.0, 8, 56)) for n in range(4)]
    made, served = simulate(sizes, "fcfs", *crowd, (0.3, Abort(id="r0")))
    assert made.scheduler.counters().preemptions >= 3
    told = [note for one in served.values() for note in notes_of(one)]
    assert sum(note.kind == "preempted" for note in told) > 0
    assert all(len(notes_of(one)) <= 50 for one in served.values())
    aborted = served["r0"].finished
    assert aborted is not None and aborted.reason is FinishReason.ABORT
    waste = made.scheduler.counters()
    assert waste.wasted_aborted_tokens >= 8 + aborted.usage.completion_tokens - 1


def test_waits_have_the_reason_that_holds() -> None:
    """A shared page that is being computed, the step's tokens, a pace that must be kept."""
    shared = come("a", 0.0, 400, 4)
    twin = structs.replace(shared, id="b", sampling=structs.replace(shared.sampling, seed=9))
    sizes = Sizes(max_num_batched_tokens=500)
    _, served = simulate(sizes, "fcfs", (0.0, shared), (0.0, twin))
    assert WaitReason.SHARED_PAGE in {note.reason for note in notes_of(served["b"])}
    pace = Slo(name="pace", itl_s=0.02)
    _, served = simulate(
        Sizes(),
        "slo",
        (0.0, come("stream", 0.0, 20, 100, pace)),
        (0.5, come("other", 0.5, 20, 100, pace)),
        (0.6, come("third", 0.6, 200, 4)),
    )
    assert WaitReason.SLO in {note.reason for note in notes_of(served["third"])}


# ------------------------------------------------------------------------- waste and the picture


def test_what_was_evicted_and_is_asked_again_is_counted_once() -> None:
    cache = CacheManager(total_pages=8, block_size=4)
    tokens, other = list(range(17)), list(range(100, 133))
    for name, text in (("a", tokens), ("b", other)):
        match = cache.match(text, "")
        cache.admit(name, text, "", match)
        assert cache.grow(name, len(text) - 1) is not None
        cache.commit(name, text, len(text) - 1)
        cache.release(name)
    match = cache.match(tokens, "")
    assert match.num_tokens == 0
    assert cache.lost_tokens(tokens, "", match) == 16
    assert cache.lost_tokens(tokens, "", match) == 0
    assert cache.lost_tokens(tokens, "tenant", cache.match(tokens, "tenant")) == 0


def test_the_picture_is_what_is_there() -> None:
    made, _ = simulate(Sizes(total_pages=64), "fcfs", (0.0, come("done", 0.0, 40, 2)))
    for name in ("x", "y"):
        assert made.scheduler.add(come(name, 1.0, 40, 50), 1.0) is None
    plan = made.scheduler.plan(1.0)
    assert plan is not None
    made.scheduler.commit(plan, made.device.run(plan), 1.1)
    shown = made.scheduler.look(1.1)
    load = made.scheduler.load(1.1)
    assert [lane.id for lane in shown.lanes] == ["x", "y"] and shown.waiting == 0
    assert len(shown.pages) == 64
    assert shown.pages.count(0) == load.free_pages and shown.pages.count(1) == load.cached_pages
    assert shown.pages.count(2) + shown.pages.count(3) == load.held_pages
    assert sum(branch.pages for branch in shown.tree) == 2 + 2 + 2  # full pages of each
    assert load.empty_places == 2 * (3 * 16 - 40)
    assert len(made.scheduler.timeline("x").notes) > 1 and not made.scheduler.timeline("?").notes
