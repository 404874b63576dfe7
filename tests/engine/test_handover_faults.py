"""Whatever goes wrong between two engines: no wrong token, no hang, no page lost, and it is seen.

The oracle is one engine alone. Each row of the table is a fault, put in over each transport while
20 requests are on their way (500 in `make test-long`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.engine.handover import PATIENT_S, Answer, Faults, Hall, Model, TestEngine, request
from toque.disagg.transport import Bytes, Peer, TransferError
from toque.types import PageRef, PagesReady

TRANSPORTS = ("shm", "tcp")
TOGETHER = 20
Expected = Callable[[int], dict[str, list[int]]]
SIZES = [TOGETHER, pytest.param(500, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def model(tiny_config: Path) -> Model:
    return Model(tiny_config)


@pytest.fixture(scope="module")
def expected(model: Model) -> Expected:
    known: dict[str, list[int]] = {}

    def answers(count: int) -> dict[str, list[int]]:
        missing = [request(n) for n in range(count) if f"r{n}" not in known]
        known.update(model.answers(missing))
        return known

    return answers


async def ask_all(
    hall: Hall, count: int, leave: Callable[[str], bool] = lambda name: False
) -> dict[str, Answer]:
    """TOGETHER at a time. `leave`: whether the client of this request leaves now."""
    answers: dict[str, Answer] = {}
    gate = asyncio.Semaphore(TOGETHER)

    async def one(number: int) -> None:
        async with gate:
            asked = request(number)
            answers[asked.id] = await asyncio.wait_for(
                hall.ask(asked, lambda: leave(asked.id)), PATIENT_S
            )

    await asyncio.gather(*(one(number) for number in range(count)))
    return answers


def check(answers: dict[str, Answer], right: dict[str, list[int]]) -> None:
    """Not a wrong token in what came, be it all or the beginning."""
    assert {name: answer.tokens for name, answer in answers.items()} == {
        name: right[name][: None if answer.whole else len(answer.tokens)]
        for name, answer in answers.items()
    }


async def seen(hall: Hall, metrics: Sequence[str]) -> None:
    for name in metrics:
        await hall.until(f"{name} is counted", lambda name=name: hall.metric(name) > 0)


# ----------------------------------------------------------------------------------- transports


def sometimes(fault: Callable[..., None]) -> Callable[..., None]:
    """Every second pull has it."""

    def pull(number: int, peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
        if number % 2:
            fault(peer, refs, out, end_s)
        else:
            peer.pull(refs, out, end_s)

    return pull


def always(fault: Callable[..., None]) -> Callable[..., None]:
    return lambda number, peer, refs, out, end_s: fault(peer, refs, out, end_s)


def corrupt(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    """One bit of one page."""
    peer.pull(refs, out, end_s)
    out[len(out) // 2, 77] ^= 16


def torn(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    """The second half of the last page did not come."""
    peer.pull(refs, out, end_s)
    out[-1, out.shape[1] // 2 :] = 0


def another(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    """Each page is whole and real, but in the place of another."""
    peer.pull(refs, out, end_s)
    out[:] = np.roll(out, 1, axis=0) if len(out) > 1 else np.roll(out, 8)


def stale(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    """The page has been used again since."""
    peer.pull([structs.replace(ref, epoch=ref.epoch + 1) for ref in refs], out, end_s)


def lost(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    """Half of it has come when the connection ends."""
    peer.pull(refs[: len(refs) // 2], out[: len(refs) // 2], end_s)
    raise TransferError("the peer closed the connection")


def broken(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    raise RuntimeError("a fault of the transport itself")


def late(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    """It comes, whole and right, when nobody waits for it any more."""
    peer.pull(refs, out, end_s)
    time.sleep(max(0.0, end_s - time.monotonic()) + 0.05)


def slow(peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
    for ref, row in zip(refs, out, strict=True):
        time.sleep(0.003)
        peer.pull([ref], row[None], end_s)


# -------------------------------------------------------------------------------- announcements


class Post:
    """Keeps announcements back, doubles them, loses them."""

    def __init__(self) -> None:
        self.held: list[PagesReady] = []

    def twice(self, number: int, message: PagesReady) -> list[PagesReady]:
        return [message, message]

    def late(self, number: int, message: PagesReady) -> list[PagesReady]:
        """Each comes after the ones that follow it: the last of a request first."""
        self.held.append(message)
        if not message.last:
            return []
        of_it = [held for held in self.held if held.id == message.id]
        self.held = [held for held in self.held if held.id != message.id]
        return of_it[::-1]

    def only_last(self, number: int, message: PagesReady) -> list[PagesReady]:
        return [message] if message.last else []

    def never_last(self, number: int, message: PagesReady) -> list[PagesReady]:
        return [] if message.last else [message]

    def of_others(self, number: int, message: PagesReady) -> list[PagesReady]:
        """A name that is right, with pages that another request was told of."""
        before, self.held = self.held, [message]
        pages = before[0].pages if before else ()
        return [structs.replace(message, pages=(*pages, *message.pages)[: len(message.pages)])]


@dataclass(frozen=True)
class Case:
    name: str
    pull: Callable[..., None] | None = None
    announce: str = ""  # a method of Post
    lose_releases: bool = False
    shows: tuple[str, ...] = ()  # metrics that are not 0 afterwards
    patience_s: float = 100.0
    lease_s: float = 100.0


FAILED = "kv_transfer_failed_pages_total"
CASES = [
    Case("nothing", shows=("kv_transfer_pages_total{fate=moved}", "kv_transfer_bytes_total",
                           "kv_transfer_seconds_count", "engine_leases_ended_total{end=released}")),
    Case("corrupt", sometimes(corrupt), shows=(f"{FAILED}{{cause=corrupt}}",)),
    Case("always corrupt", always(corrupt), shows=("kv_transfer_pages_total{fate=missing}",)),
    Case("torn", sometimes(torn), shows=(f"{FAILED}{{cause=corrupt}}",)),
    Case("another", sometimes(another), shows=(f"{FAILED}{{cause=corrupt}}",)),
    Case("stale", sometimes(stale), shows=(f"{FAILED}{{cause=stale}}",)),
    Case("lost", sometimes(lost), shows=(f"{FAILED}{{cause=lost}}",)),
    Case("broken", sometimes(broken), shows=(f"{FAILED}{{cause=lost}}",)),
    Case("slow", always(slow), shows=("kv_transfer_seconds_sum",)),
    Case("late", always(late), patience_s=0.2,
         shows=(f"{FAILED}{{cause=late}}", "kv_transfer_timeouts_total",
                "kv_transfer_discarded_pages_total")),
    Case("slower than the deadline", always(slow), patience_s=0.02,
         shows=("kv_transfer_timeouts_total", "kv_transfer_pages_total{fate=missing}")),
    Case("announced twice", announce="twice", shows=("kv_transfer_pages_total{fate=moved}",)),
    Case("announced late", announce="late", shows=("kv_transfer_pages_total{fate=moved}",)),
    Case("announced last", announce="only_last", shows=("kv_transfer_pages_total{fate=moved}",)),
    Case("end not announced", announce="never_last", patience_s=0.3,
         shows=("kv_transfer_pages_total{fate=moved}",)),
    Case("announced for another", announce="of_others", shows=(f"{FAILED}{{cause=corrupt}}",)),
    Case("lease without reader", lose_releases=True, lease_s=0.2,
         shows=("engine_leases_ended_total{end=expired}",)),
    Case("lease over before the pages came", always(slow), lease_s=0.0,
         shows=("engine_leases_ended_total{end=expired}",)),
]  # fmt: skip


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_bad_link(
    model: Model, expected: Expected, case: Case, transport: str, count: int
) -> None:
    announce = getattr(Post(), case.announce) if case.announce else None
    faults = Faults(case.pull, announce, case.lose_releases)
    hall = Hall(model, transport, faults)

    async def scenario() -> None:
        answers = await ask_all(hall, count)
        assert all(answer.whole for answer in answers.values())
        check(answers, expected(count))
        await hall.at_rest()
        await seen(hall, case.shows)

    hall.play(scenario, PATIENCE_S=case.patience_s, LEASE_S=case.lease_s)


# ------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("phase", ["queued", "fetching", "first_page", "last_page", "decoding"])
def test_clients_that_leave(
    model: Model, expected: Expected, phase: str, transport: str, count: int
) -> None:
    """Two of three, as soon as their request has come so far; the others are served."""
    hall = Hall(model, transport, Faults(pull=always(slow)))

    def leave(name: str) -> bool:
        return int(name[1:]) % 3 > 0 and (phase == "queued" or name in getattr(hall.seen, phase))

    async def scenario() -> None:
        answers = await ask_all(hall, count, leave)
        left = {name for name, answer in answers.items() if answer.end is None}
        assert len(left) > count // 4
        assert all(answer.whole for name, answer in answers.items() if name not in left)
        check(answers, expected(count))
        await hall.at_rest()
        await seen(hall, ["request_success_total{finished_reason=abort}"])

    hall.play(scenario)


# ------------------------------------------------------------------------------ engines that leave


async def _kill(hall: Hall, engine: TestEngine) -> None:
    engine.kill()


async def _freeze(hall: Hall, engine: TestEngine) -> None:
    """Until it is taken for dead."""
    engine.frozen = True
    await asyncio.sleep(0.2)
    engine.kill()


async def _nap(hall: Hall, engine: TestEngine) -> None:
    """Stopped, and on its way again before anybody gives it up."""
    engine.frozen = True
    await asyncio.sleep(0.2)
    engine.frozen = False


async def _slow_down(hall: Hall, engine: TestEngine) -> None:
    engine.pause_s = 0.01


MOMENTS: dict[str, Callable[[Hall], bool]] = {
    "before": lambda hall: True,
    "during": lambda hall: len(hall.seen.first_page) >= 3,
    "after": lambda hall: len(hall.seen.decoding) >= 3,
}
RESTARTED = {"prefill": "engine_restarts_total{role=prefill}",
             "decode": "engine_restarts_total{role=decode}"}  # fmt: skip


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("fate", [_kill, _freeze, _nap, _slow_down])
def test_an_engine_that_leaves(
    model: Model,
    expected: Expected,
    fate: Callable[[Hall, TestEngine], Awaitable[None]],
    side: str,
    moment: str,
    transport: str,
    count: int,
) -> None:
    """Prompts are computed where they are needed; who was answered goes on at the other engine."""
    hall = Hall(model, transport, Faults(pull=always(slow)), decoders=2)
    engine = hall.prefill if side == "prefill" else hall.decoders[0]

    async def strike() -> None:
        await hall.until(moment, lambda: MOMENTS[moment](hall))
        await fate(hall, engine)

    async def scenario() -> None:
        striking = asyncio.create_task(strike())
        await asyncio.sleep(0)  # "before" is now
        answers = await ask_all(hall, count)
        await striking
        assert all(answer.whole for answer in answers.values())
        check(answers, expected(count))
        await hall.at_rest()
        if fate in (_kill, _freeze):
            await seen(hall, [RESTARTED[side]])
            if side == "decode" and moment != "before":
                await seen(hall, ["moved_requests_total"])
        else:
            await seen(hall, ["kv_transfer_pages_total{fate=moved}"])

    hall.play(scenario)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nobody_is_left_to_decode(model: Model, expected: Expected, transport: str) -> None:
    """503, or an error after the first tokens, which are right; and all goes on afterwards."""
    hall = Hall(model, transport, Faults(pull=always(slow)))

    async def scenario() -> None:
        asking = asyncio.create_task(ask_all(hall, TOGETHER))
        await hall.until("three decode", lambda: MOMENTS["after"](hall))
        hall.decoders[0].kill()
        answers = await asking
        assert all(answer.whole or answer.unserved for answer in answers.values())
        assert any(answer.unserved for answer in answers.values())
        check(answers, expected(TOGETHER))
        await hall.at_rest()
        await seen(hall, [RESTARTED["decode"], "request_success_total{finished_reason=error}"])
        again = await ask_all(hall, TOGETHER)
        assert all(answer.whole for answer in again.values())
        check(again, expected(TOGETHER))
        await hall.at_rest()

    hall.play(scenario)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_moves_is_handed_over_again(model: Model, expected: Expected, transport: str) -> None:
    """By the same engine that was computing its prompt for the one that was lost: the end of the
    first hand-over is not taken for the end of the second."""
    hall = Hall(model, transport, decoders=2)

    async def scenario() -> None:
        hall.prefill.pause_s = 0.01
        asking = asyncio.create_task(ask_all(hall, TOGETHER))
        await hall.until("all are placed", lambda: len(hall.seen.fetching) >= TOGETHER // 2)
        prompts = {placed.request.id for placed in hall.fleet._placed.values()
                   if placed.decode is hall.fleet._members[1] and placed.prefill}  # fmt: skip
        hall.decoders[0].kill()
        answers = await asking
        assert len(prompts) >= 3
        assert all(answer.whole for answer in answers.values())
        check(answers, expected(TOGETHER))
        await hall.at_rest()
        assert hall.metric("moved_requests_total") >= len(prompts)
        assert hall.metric("kv_transfer_pages_total{fate=missing}") == 0

    hall.play(scenario)
