"""The scheduler and the cache under a virtual engine: whatever happens, the tokens are the same."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import END, VOCAB, PageExecutor, expected_tokens, request
from toque.build import policy_named
from toque.errors import NOT_NUMBERS
from toque.memory.manager import CacheManager
from toque.scheduler.cost import StepCost
from toque.scheduler.scheduler import Scheduler
from toque.scheduler.step import Draft, Limits
from toque.types import (
    Finished,
    FinishReason,
    Request,
    Slo,
    Tokens,
    WaitReason,
)


@dataclass
class Sizes:
    rows: int = 4
    step_tokens: int = 16
    model_len: int = 48
    pages: int = 64
    block: int = 4
    chunked: bool = True
    caching: bool = True
    policy: str = "fcfs"


class Engine:
    """Scheduler + executor without a channel; collects what each request got."""

    def __init__(self, sizes: Sizes, policy: str | None = None) -> None:
        self.sizes = sizes
        self.now_s = 0.0
        self.cache = CacheManager(sizes.pages, sizes.block, sizes.caching)
        limits = Limits(
            sizes.rows, sizes.step_tokens, sizes.model_len, VOCAB, sizes.chunked, frozenset({END})
        )
        cost = StepCost(1000.0)
        self.scheduler = Scheduler(
            limits, self.cache, policy_named(policy or sizes.policy, cost), cost
        )
        self.executor = PageExecutor(sizes.block)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Finished] = {}

    def add(self, wanted: Request) -> None:
        assert self.scheduler.add(wanted, self.now_s) is None
        self.tokens[wanted.id] = []

    def step(self) -> None:
        assert not self.scheduler.turn_away(self.now_s)
        plan = self.scheduler.plan(self.now_s)
        self.now_s += 0.01
        if plan is None:
            return
        assert plan.num_tokens <= self.sizes.step_tokens
        assert len({chunk.row for chunk in plan.chunks}) == len(plan.chunks) <= self.sizes.rows
        for event in self.scheduler.commit(plan, self.executor.run(plan), self.now_s):
            if isinstance(event, Tokens):
                self.tokens[event.id] += event.ids
            elif isinstance(event, Finished):
                assert event.id not in self.finished, "a request finished twice"
                self.finished[event.id] = event
        self.scheduler.check()

    def abort(self, name: str) -> None:
        finished = self.scheduler.abort(name, FinishReason.ABORT, self.now_s)
        if finished is not None:
            self.finished[name] = finished
        self.scheduler.check()

    def drain(self, limit_steps: int = 5000) -> None:
        for _ in range(limit_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


sizes = st.builds(
    Sizes,
    rows=st.integers(1, 4),
    step_tokens=st.sampled_from([4, 7, 16, 48]),
    model_len=st.just(32),
    pages=st.integers(8, 30),
    block=st.just(4),
    chunked=st.booleans(),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority", "slo"]),
).filter(lambda s: s.chunked or s.step_tokens >= s.model_len)

# Prompts that share beginnings often: a few stems, cut anywhere, with a short tail.
prompts = st.builds(
    lambda stem, length, tail: ([stem] * length + tail)[:31] or [1],
    st.integers(1, 2),
    st.integers(0, 28),
    st.lists(st.integers(1, 3), max_size=4),
)
# What the order and the sizes of chunks depend on; nobody is turned away.
CLASSES = (
    None,
    Slo(name="chat", ttft_s=0.05, itl_s=0.012, downgrade=True),
    Slo(name="calm", itl_s=0.03, downgrade=True),
    Slo(name="batch", deadline_s=0.5, downgrade=True),
)
# (steps before it arrives, prompt, max_tokens, seed, abort after so many steps or never)
arrivals = st.lists(
    st.tuples(
        st.integers(0, 4),
        prompts,
        st.integers(1, 20),
        st.integers(0, 2),
        st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(sizes, arrivals)
def test_tokens_do_not_depend_on_batching_chunking_caching_or_preemption(
    sizes: Sizes, arrivals: list[tuple[int, list[int], int, int, int | None]]
) -> None:
    engine = Engine(sizes)
    requests: dict[str, Request] = {}
    aborts: dict[int, list[str]] = {}
    now = 0
    for number, (pause, prompt, max_tokens, seed, abort_after) in enumerate(arrivals):
        for _ in range(pause):
            for name in aborts.pop(now, []):
                engine.abort(name)
            engine.step()
            now += 1
        wanted = msgspec.structs.replace(
            request(f"r{number}", prompt, max_tokens, seed),
            priority=seed,
            slo=CLASSES[(number + seed) % len(CLASSES)],
            arrived_s=engine.now_s,
        )
        requests[wanted.id] = wanted
        engine.add(wanted)
        if abort_after is not None:
            aborts.setdefault(now + abort_after, []).append(wanted.id)
    while aborts:
        for name in aborts.pop(now, []):
            engine.abort(name)
        engine.step()
        now += 1
    engine.drain()

    assert set(engine.finished) == set(requests)
    for name, wanted in requests.items():
        expected = expected_tokens(wanted, sizes.model_len)
        if engine.finished[name].reason is FinishReason.ABORT:
            assert engine.tokens[name] == expected[: len(engine.tokens[name])]
        else:
            assert engine.tokens[name] == expected
        assert engine.finished[name].usage.completion_tokens == len(engine.tokens[name])
    load, counters = engine.scheduler.load(0.0), engine.scheduler.counters()
    assert load.held_pages == load.running == load.waiting == 0
    assert counters.generation_tokens == sum(map(len, engine.tokens.values()))
    assert load.empty_places == load.waiting_tokens == 0 and load.queue_age_s == 0.0
    assert (
        counters.computed_tokens
        <= sum(len(r.prompt) + len(engine.tokens[name]) for name, r in requests.items())
        + counters.recomputed_tokens
    )
    if not sizes.caching:
        assert load.free_pages == load.total_pages


def test_a_waiting_sequence_shares_what_a_running_one_is_computing() -> None:
    """In-flight sharing: of eight equal prompts that arrive together one is computed."""
    engine = Engine(Sizes(rows=8, step_tokens=64, model_len=48))
    prompt = [1] * 33
    for number in range(8):
        engine.add(request(f"r{number}", prompt, max_tokens=4, seed=number))
    engine.drain()
    counters = engine.scheduler.counters()
    # The first computes 33 prompt tokens, each other one the single token behind the shared pages.
    assert counters.prefix_hits == 7 * 32
    assert sum(f.usage.cached_tokens for f in engine.finished.values()) == 7 * 32


def steps_to_first_token(engine: Engine, name: str) -> int:
    for steps in range(1, 1000):
        engine.step()
        if engine.tokens[name]:
            return steps
    raise AssertionError(f"{name} gets no token")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_short_prompt_is_not_stuck_behind_a_long_one(policy: str) -> None:
    """Half of a step's prompt tokens are for prompts shorter than the first in line: a short one is
    answered within a few steps, and the long one is at most twice as slow."""
    sizes = Sizes(step_tokens=16, model_len=1700, pages=150, block=16)
    alone = Engine(sizes, policy)
    alone.add(request("long", [3] * 1600, max_tokens=1, ignore_eos=True))
    steps_alone = steps_to_first_token(alone, "long")

    engine = Engine(sizes, policy)
    engine.add(request("long", [3] * 1600, max_tokens=1, ignore_eos=True))
    engine.step()
    total, number = 1, 0
    while not engine.tokens["long"]:  # a new short one as soon as the last is answered
        number += 1
        name = f"short{number}"
        engine.add(request(name, [4 + number % 50] * 20, max_tokens=1, ignore_eos=True))
        steps = steps_to_first_token(engine, name)
        assert steps <= 3
        total += steps
    assert number > 30
    assert steps_alone == 100
    assert total <= 2 * steps_alone + 3


def test_a_queue_of_long_prompts_does_not_hide_a_short_one_and_keeps_its_rows() -> None:
    """With every row wanted, short prompts that keep coming do not take the one that the first in
    line waits for."""
    engine = Engine(Sizes(rows=2, step_tokens=16, model_len=200, pages=200))
    for number in range(4):
        long = [10 + number] * 160
        engine.add(request(f"long{number}", long, max_tokens=4, ignore_eos=True))
    for number in range(60):
        engine.add(request(f"short{number}", [20, number], max_tokens=2, ignore_eos=True))
        engine.step()
    engine.drain()
    longs = [name for name in engine.finished if name.startswith("long")]
    assert longs == [f"long{number}" for number in range(4)]
    assert list(engine.finished).index("long3") < 50


def test_decodes_are_not_stopped_by_a_long_prompt() -> None:
    """While a prompt of many chunks is computed, a running sequence gets a token in every step."""
    engine = Engine(Sizes(step_tokens=8, model_len=48))
    engine.add(request("short", [1, 2], max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add(request("long", [3] * 40, max_tokens=1, ignore_eos=True))
    while "long" not in engine.finished:
        before = len(engine.tokens["short"])
        engine.step()
        assert len(engine.tokens["short"]) == before + 1


def test_first_come_first_served() -> None:
    """With one row, answers come in the order of arrival."""
    engine = Engine(Sizes(rows=1))
    for number in range(6):
        engine.add(request(f"r{number}", [number + 1] * 3))
    engine.drain()
    assert list(engine.finished) == [f"r{number}" for number in range(6)]


def test_preemption_takes_the_latest_comer_and_it_comes_back() -> None:
    engine = Engine(Sizes(pages=12, model_len=48, caching=True))
    engine.add(request("old", [1] * 4, max_tokens=40, ignore_eos=True))
    engine.add(request("young", [2] * 4, max_tokens=40, ignore_eos=True))
    engine.drain()
    counters = engine.scheduler.counters()
    assert counters.preemptions > 0
    assert list(engine.finished) == ["old", "young"]
    assert counters.prompt_tokens == 8, "a sequence that comes back is not counted again"


def test_a_sequence_that_comes_back_sends_its_tokens_again() -> None:
    """Its new row does not know the last token, even where the first chunk is one token long."""
    engine = Engine(Sizes(rows=2, step_tokens=2, model_len=40, caching=False))
    old = request("old", [1], max_tokens=39, ignore_eos=True)
    young = request("young", [2], max_tokens=20, ignore_eos=True)
    engine.add(old)
    engine.add(young)
    for _ in range(6):
        engine.step()
    engine.scheduler._planner._preempt(engine.scheduler._sequences["young"], Draft(2))
    engine.drain()
    assert engine.tokens["old"] == expected_tokens(old, 40)
    assert engine.tokens["young"] == expected_tokens(young, 40)


def test_who_is_behind_others_waits_for_them_and_not_for_a_step() -> None:
    """With one row: the first in line waits for it, all others for those before them, however long
    the line is; a step's end is what whoever comes during one waits for, and no longer."""
    engine = Engine(Sizes(rows=1))
    for number in range(200):
        engine.add(request(f"r{number}", [1, 2, 3], max_tokens=3))
    for _ in range(2):
        engine.step()
    waiting = engine.scheduler.load(0.0).waiting_by_reason
    assert waiting == {WaitReason.ROWS: 1, WaitReason.BEHIND: 198}
    for number in (1, 2, 63, 64, 65, 199):
        notes = engine.scheduler.timeline(f"r{number}").notes
        assert all(note.reason != WaitReason.STEP or note.until_s == note.at_s for note in notes)


def test_what_another_engine_computed_for_a_request_is_no_hit() -> None:
    """Its pages are in the tree as any others are: only the request says whose work they were."""
    found = []
    for moved_tokens in (0, 4, 1000):
        engine = Engine(Sizes())
        engine.add(request("first", list(range(20))))
        engine.drain()
        before = engine.scheduler.counters()
        second = request("second", list(range(20)))
        engine.add(msgspec.structs.replace(second, moved_tokens=moved_tokens))
        engine.drain()
        now = engine.scheduler.counters()
        found.append((now.prefix_hits - before.prefix_hits, now.moved_tokens))
    hits = found[0][0]
    assert hits > 4 and found == [(hits, 0), (hits - 4, 4), (0, hits)]


@pytest.mark.parametrize("error", ["boom", NOT_NUMBERS])
def test_a_failing_row_ends_alone(error: str) -> None:
    """An error of one row is that request's last event; the others' tokens do not change."""
    engine = Engine(Sizes())
    good, bad = request("good", [1, 2, 3]), request("bad", [9, 9, 9])
    engine.add(good)
    engine.add(bad)
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    result = engine.executor.run(plan)
    bad_row = plan.chunks[1].row
    broken = [
        msgspec.structs.replace(s, error=error) if s.row == bad_row else s for s in result.sampled
    ]
    events = engine.scheduler.commit(plan, msgspec.structs.replace(result, sampled=broken), 0.0)
    failed = [event for event in events if isinstance(event, Finished)]
    assert [(e.id, e.reason, e.error) for e in failed] == [("bad", FinishReason.ERROR, error)]
    assert engine.scheduler.counters().corrupted == (error == NOT_NUMBERS)
    engine.tokens["good"] = [t for e in events if isinstance(e, Tokens) for t in e.ids]
    engine.drain()
    assert engine.tokens["good"] == expected_tokens(good, 48)


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        (request("a", []), "no tokens"),
        (request("a", [1] * 48), "context of 48"),
        (request("a", [VOCAB]), "vocabulary"),
        (request("a", [-1]), "vocabulary"),
        (request("a", [1], max_tokens=-1), "max_tokens"),
    ],
)
def test_what_serve_should_have_refused_is_refused_by_name(wanted: Request, complaint: str) -> None:
    engine = Engine(Sizes())
    refused = engine.scheduler.add(wanted, 0.0)
    assert refused is not None
    assert complaint in refused.message
    assert not engine.scheduler.has_work


def test_min_tokens_and_stop_token_ids() -> None:
    """A stop token counts as output, names itself, and does nothing before min_tokens."""
    engine = Engine(Sizes())
    free = request("free", [5, 6], max_tokens=20, ignore_eos=True)
    wanted = expected_tokens(free, 48)
    stop = wanted[3]
    first = wanted.index(stop)
    engine.add(request("stop", [5, 6], max_tokens=20, ignore_eos=True, stop_token_ids=(stop,)))
    engine.drain()
    assert engine.tokens["stop"] == wanted[: first + 1]
    assert engine.finished["stop"].stop_token == stop
    assert engine.finished["stop"].reason is FinishReason.STOP


# ------------------------------------------------------------------------------- priorities


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=12))
def test_priority_orders_the_queue_and_equal_ones_keep_their_turn(priorities: list[int]) -> None:
    engine = Engine(Sizes(rows=1), "priority")
    for number, priority in enumerate(priorities):
        wanted = request(f"r{number}", [3] * 5, max_tokens=2, ignore_eos=True)
        engine.add(msgspec.structs.replace(wanted, priority=priority))
    while engine.scheduler.has_work:
        engine.step()
    in_order = sorted(range(len(priorities)), key=lambda n: (priorities[n], n))
    assert list(engine.finished) == [f"r{n}" for n in in_order]


def test_the_least_urgent_gives_its_pages_back() -> None:
    engine = Engine(Sizes(rows=3, pages=12, caching=False), "priority")
    for number, priority in enumerate((5, 1, 9)):
        wanted = request(f"r{number}", [number + 1] * 8, max_tokens=30, ignore_eos=True)
        engine.add(msgspec.structs.replace(wanted, priority=priority))
    while engine.scheduler.has_work:
        engine.step()
    assert list(engine.finished) == ["r1", "r0", "r2"]
    assert engine.scheduler.counters().preemptions > 0
