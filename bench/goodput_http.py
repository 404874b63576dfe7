"""The real half of `bench.goodput`: servers on this machine, requests over HTTP at random times.

Every run starts a fresh server. Capacity and promises are measured once, on toque with first come,
first served; then each engine gets the same requests at the same moments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.client import Address, Reply, complete, request_body
from bench.compare import vocabulary
from bench.goodput import CHAT, DOCUMENT, Outcome, kind_of, promised, report, row
from bench.load import run_loop, served_model
from bench.servers import Recipe, Server, free_port, llama_recipe, toque_recipe
from bench.workloads import Workload
from toque.files.fetch import locate
from toque.kernels import physical_cores
from toque.sim.workload import Kind, arrivals, drawn
from toque.slo import attained
from toque.types import Request

TIMEOUT_S = 900.0
ALONE_REQUESTS = 3  # of each kind; the quickest counts
SLOTS = 16  # of the peer

Timed = tuple[float, Request]


def real(options: argparse.Namespace) -> dict[str, Any]:
    path = locate(options.model).path
    threads = options.threads or physical_cores()
    vocab_size = vocabulary(path)

    def toque(policy: str, kinds: Sequence[Kind]) -> tuple[Recipe, int]:
        port = free_port()
        flags = ["--scheduling-policy", policy, "--max-model-len", "4096"]
        for kind in kinds:
            if kind.slo is not None:
                flags += ["--slo", written(kind)]
        return toque_recipe(policy, path, port, threads, flags), port

    kinds, capacity_per_s = calibrated(toque("fcfs", ()), options, vocab_size)
    say(f"capacity {capacity_per_s:.2f} requests/s; {', '.join(written(kind) for kind in kinds)}")
    rows = []
    for load in options.loads:
        stream = list(
            arrivals(kinds, load * capacity_per_s, options.seconds, options.seed, vocab_size)
        )
        for name in ("fcfs", "slo", *(("llama-server",) if options.peer else ())):
            recipe, port = (
                peer(Path(options.peer), path, threads)
                if name == "llama-server"
                else toque(name, kinds)
            )
            with Server(recipe, port) as server:
                outcomes = driven(server.address, stream, classes=name != "llama-server")
            rows.append(row(name, load, outcomes, options.seconds))
            say(json.dumps(rows[-1]))
    return report(kinds, capacity_per_s, rows)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def written(kind: Kind) -> str:
    assert kind.slo is not None and kind.slo.ttft_s and kind.slo.itl_s
    return f"{kind.name}:ttft={kind.slo.ttft_s * 1e3:.0f}ms,itl={kind.slo.itl_s * 1e3:.0f}ms"


def peer(binary: Path, model: Path, threads: int) -> tuple[Recipe, int]:
    port = free_port()
    longest = Workload("goodput", 1, SLOTS, DOCUMENT.prompt_tokens[1], DOCUMENT.output_tokens[1])
    return llama_recipe("llama-server", binary, model, port, threads, longest), port


def calibrated(
    made: tuple[Recipe, int], options: argparse.Namespace, vocab_size: int
) -> tuple[list[Kind], float]:
    """Kinds with their promises, and requests per second at saturation: of a crowd that comes at
    once, the last of which leave the machine partly idle."""
    recipe, port = made
    rng = random.Random(options.seed)
    with Server(recipe, port) as server:
        address = server.address

        def alone(kind: Kind) -> tuple[float, float]:
            replies = []
            for number in range(ALONE_REQUESTS):
                request = drawn(kind, 900_000 + number, 0.0, rng, vocab_size)
                replies += replied(address, [(0.0, request)], classes=False)
            firsts = [reply.first_s - reply.sent_s for reply in replies if reply.first_s]
            gaps = [float(np.median(np.diff(reply.token_s))) for reply in replies]
            return min(firsts), min(gaps)

        kinds = promised((CHAT, DOCUMENT), alone, options.pace)
        crowd = drawn_at_once(kinds, options.crowd, options.seed, vocab_size)
        replies = replied(address, crowd, classes=False)
    wall_s = max(reply.end_s for reply in replies) - min(reply.sent_s for reply in replies)
    return kinds, sum(reply.error is None for reply in replies) / wall_s


def drawn_at_once(kinds: Sequence[Kind], total: int, seed: int, vocab_size: int) -> list[Timed]:
    stream: Iterator[Timed] = arrivals(kinds, 1.0, 1e9, seed + 1, vocab_size)
    return [(0.0, request) for _, request in (next(stream) for _ in range(total))]


def driven(address: Address, stream: Sequence[Timed], classes: bool) -> list[Outcome]:
    warm = drawn(CHAT, 999_999, 0.0, random.Random(0), 4096)
    replied(address, [(0.0, warm)], classes=False)
    replies = replied(address, stream, classes)
    return [judged(request, reply) for (_, request), reply in zip(stream, replies, strict=True)]


def judged(request: Request, reply: Reply) -> Outcome:
    gaps_s = [float(gap) for gap in np.diff(reply.token_s)]
    first_after_s = None if reply.first_s is None else reply.first_s - reply.sent_s
    refused = (reply.error or "").startswith("status 429")
    if reply.error is not None and not refused:
        say(f"{request.id}: {reply.error}")
    slo = request.slo
    assert slo is not None
    met = reply.error is None and attained(slo, first_after_s, gaps_s, reply.end_s - reply.sent_s)
    return Outcome(kind_of(request), met, refused, first_after_s, gaps_s)


def replied(address: Address, stream: Sequence[Timed], classes: bool) -> list[Reply]:
    """Each request at its time, whatever became of the others. In their order."""
    model = served_model(address)

    async def one(at_s: float, request: Request) -> Reply:
        await asyncio.sleep(at_s)
        return await complete(address, body_of(model, request, classes), TIMEOUT_S)

    async def all_of_them() -> list[Reply]:
        return list(await asyncio.gather(*(one(at_s, request) for at_s, request in stream)))

    return run_loop(all_of_them())


def body_of(model: str, request: Request, classes: bool) -> bytes:
    sampling = request.sampling
    body = request_body(model, request.prompt, sampling.max_tokens or 1, sampling.seed or 0)
    if not classes or request.slo is None:
        return body
    return msgspec.json.encode({**msgspec.json.decode(body), "slo": request.slo.name})
