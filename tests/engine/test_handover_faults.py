"""Whatever goes wrong between two engines: no wrong token, no hang, no page lost, and it is seen.

The oracle is one engine alone. Each row of the table is a fault, put in over each transport while
20 requests are on their way (500 in `make test-long`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.engine.handover import PATIENT_S, Answer, Faults, Hall, Model, request
from toque.disagg.transport import Bytes, Peer, TransferError
from toque.types import PageRef, PagesReady

TRANSPORTS = ("shm", "tcp")
TOGETHER = 20
SIZES = [TOGETHER, pytest.param(500, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def model(tiny_config: Path) -> Model:
    return Model(tiny_config)


@pytest.fixture(scope="module")
def expected(model: Model) -> Callable[[int], dict[str, list[int]]]:
    known: dict[str, list[int]] = {}

    def answers(count: int) -> dict[str, list[int]]:
        missing = [request(n) for n in range(count) if f"r{n}" not in known]
        known.update(model.answers(missing))
        return known

    return answers


async def ask_all(hall: Hall, count: int) -> dict[str, Answer]:
    """TOGETHER at a time."""
    answers: dict[str, Answer] = {}
    gate = asyncio.Semaphore(TOGETHER)

    async def one(number: int) -> None:
        async with gate:
            asked = request(number)
            answers[asked.id] = await asyncio.wait_for(hall.ask(asked), PATIENT_S)

    await asyncio.gather(*(one(number) for number in range(count)))
    return answers


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
    model: Model,
    expected: Callable[[int], dict[str, list[int]]],
    case: Case,
    transport: str,
    count: int,
) -> None:
    announce = getattr(Post(), case.announce) if case.announce else None
    faults = Faults(case.pull, announce, case.lose_releases)
    hall = Hall(model, transport, faults)

    async def scenario() -> None:
        answers = await ask_all(hall, count)
        right = expected(count)
        assert all(answer.whole for answer in answers.values())
        assert {name: answer.tokens for name, answer in answers.items()} == {
            name: right[name] for name in answers
        }
        await hall.at_rest()
        await seen(hall, case.shows)

    hall.play(scenario, PATIENCE_S=case.patience_s, LEASE_S=case.lease_s)
