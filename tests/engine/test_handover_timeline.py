"""A request's timeline over the engines that had a part of it: where its time went, what failed.

The oracle is what was done to it: each part of the way is held up in turn, and has to say so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.engine.handover import Answer, Faults, Hall, Model, request
from toque.disagg.transport import Bytes, Peer
from toque.types import PageRef, Request

HELD_S = 0.3
PARTS = ["queued_at_prefill", "prefill", "transfer", "queued_at_decode", "first_step", "report"]


@pytest.fixture(scope="module")
def model(tiny_config: Path) -> Model:
    return Model(tiny_config)


def long_request(name: str = "long") -> Request:
    return structs.replace(request(0), id=name, prompt=tuple(3 + i % 250 for i in range(200)))


def short_request(number: int) -> Request:
    """Not worth a journey."""
    tokens = tuple(3 + (i + 11 * number) % 250 for i in range(20))
    return structs.replace(request(number), id=f"s{number}", prompt=tokens)


def told(hall: Hall, name: str) -> dict[str, Any]:
    call = hall.client.timelines.find(name, None)
    assert call is not None
    (sequence,) = call.told()["sequences"]
    return dict(sequence)


async def hold_prefill(hall: Hall, asked: Request) -> Answer:
    hall.prefill.frozen = True
    asking = asyncio.create_task(hall.ask(asked))
    await asyncio.sleep(HELD_S)
    hall.prefill.frozen = False
    return await asking


async def slow_prefill(hall: Hall, asked: Request) -> Answer:
    hall.prefill.pause_s = HELD_S / 2  # between two of its four chunks
    return await hall.ask(asked)


async def slow_link(hall: Hall, asked: Request) -> Answer:
    def pull(n: int, peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
        time.sleep(HELD_S)
        peer.pull(refs, out, end_s)

    hall.faults.pull = pull
    return await hall.ask(asked)


async def full_decode(hall: Hall, asked: Request) -> Answer:
    """All its rows are taken by requests that came before."""
    hall.decoders[0].pause_s = HELD_S / 6
    others = [asyncio.create_task(hall.ask(short_request(number))) for number in range(16)]
    await hall.until("they run", lambda: len(hall.seen.decoding) == 16)
    answer = await hall.ask(asked)
    await asyncio.gather(*others)
    return answer


@pytest.mark.parametrize(
    ("hold", "part"),
    [
        (hold_prefill, "queued_at_prefill"),
        (slow_prefill, "prefill"),
        (slow_link, "transfer"),
        (full_decode, "queued_at_decode"),
    ],
)
def test_ob10_the_parts_of_the_time_to_the_first_token_add_up_to_it(
    model: Model, hold: Callable[..., Any], part: str
) -> None:
    hall = Hall(model, "shm")

    async def scenario() -> None:
        asked = structs.replace(long_request(), arrived_s=time.monotonic())
        answer = await hold(hall, asked)
        assert answer.whole and answer.first_s is not None
        sequence = told(hall, "long")
        parts = sequence["handover_ms"]
        assert list(parts) == PARTS and min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(sequence["ttft_ms"], abs=0.01)
        assert sequence["ttft_ms"] <= 1e3 * (answer.first_s - asked.arrived_s)
        assert parts[part] >= 1e3 * HELD_S * 0.6, parts
        await hall.at_rest()

    hall.play(scenario)


def test_who_did_what_and_what_travelled(model: Model) -> None:
    hall = Hall(model, "tcp")

    async def scenario() -> None:
        await hall.ask(long_request())
        sequence = told(hall, "long")
        events = sequence["events"]
        assert [e["at_ms"] for e in events] == sorted(e["at_ms"] for e in events)
        done = [(event["kind"], event["engine"]) for event in events]
        assert [kind for kind, engine in done if engine == 0][-2:] == ["chunk", "finished"]
        assert {"fetched", "admitted", "chunk", "first_token", "decode", "finished"} <= {
            kind for kind, engine in done if engine == 1
        }
        computed = [e["tokens"] for e in events if e["kind"] == "chunk"]
        assert sum(computed) == 200  # each token once, wherever
        assert [e["reason"] for e in events if e["kind"] == "finished"] == ["handoff", "length"]
        (fetched,) = (event for event in events if event["kind"] == "fetched")
        assert fetched["moved_pages"] == 12 and fetched["tokens"] == 192
        assert fetched["moved_bytes"] == 12 * 16 * 384 and fetched["reason"] == "tcp"
        assert "missing_pages" not in fetched and "corrupt_pages" not in fetched
        await hall.ask(structs.replace(long_request("again"), arrived_s=time.monotonic()))
        again = told(hall, "again")
        assert "handover_ms" not in again  # its beginning is where it is answered

    hall.play(scenario)


def test_what_did_not_verify_is_told(model: Model) -> None:
    def pull(number: int, peer: Peer, refs: Sequence[PageRef], out: Bytes, end_s: float) -> None:
        peer.pull(refs, out, end_s)
        out[:, 5] ^= 1

    hall = Hall(model, "shm", Faults(pull=pull))

    async def scenario() -> None:
        await hall.ask(long_request())
        events = told(hall, "long")["events"]
        (fetched,) = (event for event in events if event["kind"] == "fetched")
        assert fetched["missing_pages"] == 12 and fetched["corrupt_pages"] >= 12
        assert "moved_pages" not in fetched
        computed = sum(e["tokens"] for e in events if e["kind"] == "chunk" and e["engine"] == 1)
        assert computed == 200

    hall.play(scenario)


def test_an_engine_that_was_lost_is_told(model: Model) -> None:
    """And what the others did before and after; also while it is still open."""
    hall = Hall(model, "shm", decoders=2)

    async def scenario() -> None:
        hall.decoders[0].pause_s = 0.01
        asking = asyncio.create_task(hall.ask(long_request()))
        await hall.until(
            "it decodes", lambda: hall.seen.decoding and not hall.fleet._placed["long"].prefill
        )
        await hall.client.explain(["long"], 10.0)
        sequence = told(hall, "long")
        assert sequence["state"] == "open"
        kinds = {(event["kind"], event["engine"]) for event in sequence["events"]}
        assert {("chunk", 0), ("fetched", 1), ("first_token", 1)} <= kinds
        hall.decoders[0].kill()
        assert (await asking).whole
        events = told(hall, "long")["events"]
        (lost,) = (event for event in events if event["kind"] == "engine_lost")
        assert lost["engine"] == 1
        after = [e for e in events if e["engine"] == 2]
        assert after and all(event["at_ms"] >= lost["at_ms"] for event in after)
        assert {"admitted", "decode", "finished"} <= {event["kind"] for event in after}
        await hall.at_rest()

    hall.play(scenario)


def test_a_prompt_that_is_being_computed_tells_how_far_it_is(model: Model) -> None:
    hall = Hall(model, "shm")

    async def scenario() -> None:
        hall.prefill.pause_s = 0.05
        asking = asyncio.create_task(hall.ask(long_request()))
        await hall.until("a page is there", lambda: hall.seen.first_page)
        await hall.client.explain(["long"], 10.0)
        await hall.client.explain(["long"], 10.0)  # what the first one brought is known by now
        events = told(hall, "long")["events"]
        assert {("admitted", 0), ("chunk", 0)} <= {(e["kind"], e["engine"]) for e in events}
        await asking

    hall.play(scenario)
