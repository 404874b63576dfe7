"""What the page draws, as JSON, made once for all who look and only while somebody does.

Owns: the watchers' beat. Knows: the engine client, metrics, timelines.
Does not know: HTTP, how it is drawn.

The engine is asked for a Snapshot once per beat; a long step delays it, and the numbers that the
server has itself come all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from itertools import groupby
from typing import Any

import msgspec

from toque.serve.failures import Failure
from toque.serve.health import unhealthy
from toque.serve.service import Service
from toque.serve.timelines import CallStory
from toque.types import FleetReport, Lane, Refused, Snapshot

BEAT_S = 0.35
MOST_WATCHERS = 32
MOST_CELLS = 4096  # of the page map; larger pools show several pages in a cell
RECENT_CALLS = 20
OVERLAP_S = 4  # seconds that every beat repeats: who misses one loses nothing
OVERLAP_STEPS = 60
_LETTERS = "fchs"  # of a page: free, cached, held, shared


class Feed:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._watchers = 0
        self._beat: asyncio.Event = asyncio.Event()
        self._latest = b""
        self._task: asyncio.Task[None] | None = None

    @property
    def full(self) -> bool:
        return self._watchers >= MOST_WATCHERS

    async def events(self) -> AsyncGenerator[bytes, None]:
        """JSON documents, the first with all that is remembered; ends when the server drains."""
        self._watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield msgspec.json.encode(self._document(since_unix_s=0, steps=10_000))
            while not self._service.draining:
                await self._beat.wait()
                yield self._latest
        finally:
            self._watchers -= 1

    async def _run(self) -> None:
        while self._watchers:
            if self._service.client.hello is not None:
                await self._service.client.look(BEAT_S)
            now_unix_s = int(time.time())
            document = self._document(now_unix_s - OVERLAP_S, OVERLAP_STEPS)
            self._latest = msgspec.json.encode(document)
            beat, self._beat = self._beat, asyncio.Event()
            beat.set()
            await asyncio.sleep(BEAT_S)

    # ------------------------------------------------------------------------------- documents

    def _document(self, since_unix_s: int, steps: int) -> dict[str, Any]:
        service, client = self._service, self._service.client
        state, reason = self._state()
        hello = client.hello
        return {
            "now": time.time(),
            "state": state,
            "reason": reason,
            "model": None if hello is None else self._model(),
            "load": fields(client.load),
            "open": client.open_requests,
            "silence_s": round(client.silence_s(), 3),
            "predicted_ms": client.predicted_ms,
            "steps": list(client.recent.steps)[-steps:],
            "seconds": client.recent.since(since_unix_s),
            "boards": {index: board(seen) for index, seen in client.snapshots.items()},
            "fleet": None if client.fleet is None else fleet(client.fleet),
            "slo": self._promises(),
            "errors": {cause: n for (cause,), n in service.metrics.counts("errors").items() if n},
            "ended": {why: n for (why,), n in service.metrics.counts("request_success").items()},
            "wasted": {why: n for (why,), n in service.metrics.counts("wasted_tokens").items()},
            "totals": fields(service.metrics.totals),
            "calls": [row for call in client.timelines.last(RECENT_CALLS) for row in rows(call)],
        }

    def _state(self) -> tuple[str, str]:
        service = self._service
        failure: Failure | None = unhealthy(service)
        if failure is not None:
            return failure.code or "failed", failure.message
        failure = service.not_serving()
        return ("ready", "") if failure is None else (failure.code or "failed", failure.message)

    def _model(self) -> dict[str, Any]:
        hello = self._service.client.hello
        assert hello is not None
        names = ("max_model_len", "block_size", "total_pages", "max_num_seqs", "kv_cache_dtype")
        more = ("max_num_batched_tokens", "scheduling_policy", "fingerprint")
        facts = {name: getattr(hello, name) for name in (*names, *more)}
        return {"name": self._service.model_names(hello)[0], **facts}

    def _promises(self) -> list[dict[str, Any]]:
        """One entry per class that is defined or was asked for."""
        hello, metrics = self._service.client.hello, self._service.metrics
        found: dict[str, dict[str, Any]] = {}
        for slo in () if hello is None else hello.slo_classes:
            targets = {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s, "deadline_s": slo.deadline_s}
            found[slo.name] = {"name": slo.name, **targets, "verdicts": {}}
        for (name, word), count in metrics.counts("slo_requests").items():
            if name in found:
                found[name]["verdicts"][word] = count
        for (name, target), count in metrics.counts("slo_misses").items():
            if name in found:
                found[name].setdefault("misses", {})[target] = count
        now_s = time.monotonic()
        return [
            {**entry, "ratio": metrics.attainment.ratio(name, now_s)}
            for name, entry in found.items()
        ]


def fleet(report: FleetReport) -> dict[str, Any]:
    """Several engines: each with what it holds, and what travelled between them."""
    engines = [
        {**fields(engine), "load": fields(engine.load), "kept": fields(engine.kept)}
        for engine in report.engines
    ]
    return {"engines": engines, "transfers": fields(report.transfers)}


def board(snapshot: Snapshot) -> dict[str, Any]:
    """The engine's picture in short: pages as runs of letters, "12h3f"; branches as lists."""
    pages_per_cell = max(1, -(-len(snapshot.pages) // MOST_CELLS))
    return {
        "step": snapshot.step,
        "lanes": [_lane(lane) for lane in snapshot.lanes],
        "waiting": snapshot.waiting,
        "pages_per_cell": pages_per_cell,
        "pages": runs(snapshot.pages, pages_per_cell),
        "shared": snapshot.pages.count(_LETTERS.index("s")),
        "tree": [[b.parent, b.pages, b.holders, int(b.pending)] for b in snapshot.tree],
        "branches": snapshot.branches,
    }


def runs(pages: bytes, pages_per_cell: int) -> str:
    """Run lengths of the cells' states. A cell of several pages shows the most used of them."""
    if pages_per_cell > 1:
        starts = range(0, len(pages), pages_per_cell)
        pages = bytes(max(pages[at : at + pages_per_cell]) for at in starts)
    return "".join(f"{sum(1 for _ in run)}{_LETTERS[state]}" for state, run in groupby(pages))


def _lane(lane: Lane) -> dict[str, Any]:
    told = fields(lane)
    told["age_s"] = round(time.monotonic() - told.pop("arrived_s"), 2)
    return told


def fields(struct: msgspec.Struct) -> dict[str, Any]:
    """All of them: on the wire those with their default value are left out."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def rows(call: CallStory) -> list[dict[str, Any]]:
    """A line per sequence of a call."""
    told = []
    for story in call.stories:
        facts = story.told()
        end = story.end
        told.append(
            {
                "id": facts["id"],
                "call": call.origin.call_id,
                "arrived": call.arrived_unix_s,
                "ended": end is not None,
                "reason": facts.get("finish_reason"),
                "refused": isinstance(end, Refused),
                "prompt": facts["prompt_tokens"],
                "cached": facts.get("cached_tokens"),
                "output": facts.get("completion_tokens"),
                "ttft_ms": facts["ttft_ms"],
                "total_ms": facts.get("total_ms"),
                "slo": facts["slo"],
            }
        )
    return told
