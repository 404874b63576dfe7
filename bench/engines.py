"""`python -m bench.engines`: what several engines behind one server are good for, on one machine.

interference: a few streams run while prompts of 2,000 tokens arrive. Together, one engine with all
threads chunks them between its decodes; apart, `--prefill 1 --decode 1` with half the threads each.
The figure is the gap between two tokens of the running streams.

routing: chats of several turns, each with all that was said as its prompt. `--data-parallel-size 2`
places them by `disagg/routing.py`; against it two servers of one engine each, taken in turn by the
client, as a plain load balancer does. The figures are the share of prompt tokens that the prefix
cache had, beside the most that it could have, and how evenly the work fell on the two.

Fresh servers for every round, engines in alternating order, medians; one JSON line at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.client import Address, Reply, complete, request_body
from bench.load import run_loop, served_model
from bench.machine import describe_machine
from bench.servers import Server, free_port, toque_recipe
from bench.summary import percentile_ms
from toque.files.fetch import locate
from toque.kernels import physical_cores

TIMEOUT_S = 600.0
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 4, 32, 1200
LONG_TOKENS, LONG_EVERY_S = 2000, 5.0
CHATS, TURNS, CLIENTS = 24, 5, 8
OPENING, SAID, ANSWER_TOKENS = 256, 96, 16  # tokens: of the first prompt, more per turn, answered
VOCAB = range(1000, 30_000)

ENGINE_WORK = "toque_engine_computed_tokens_total"
Row = dict[str, Any]  # figures by name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("what", choices=("interference", "routing"))
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3, help="of each way [3]")
    options = parser.parse_args(arguments)
    path = locate(options.model).path
    ways = INTERFERENCE if options.what == "interference" else ROUTING
    rows: dict[str, list[Row]] = {name: [] for name in ways}
    for number in range(options.rounds):
        order = list(ways) if number % 2 == 0 else list(reversed(ways))
        for name in order:
            rows[name].append(ways[name](path, number))
            print(name, json.dumps(rows[name][-1]), file=sys.stderr, flush=True)
    medians = {
        name: {key: statistics.median(row[key] for row in of) for key in of[0]}
        for name, of in rows.items()
    }
    for name, row in medians.items():
        print(f"{name:>16}", *(f"{key} {value:.3g}" for key, value in row.items()), sep="  ")
    print(json.dumps({"bench": "engines", "what": options.what, "model": options.model,
                      "rounds": options.rounds, "medians": medians,
                      "machine": describe_machine()}))  # fmt: skip
    return 0


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.choice(VOCAB) for _ in range(count)]


# -------------------------------------------------------------------------------- interference


def interference(flags: Sequence[str]) -> Callable[[Path, int], Row]:
    def run(path: Path, seed: int) -> Row:
        port = free_port()
        threads = physical_cores() // (2 if flags else 1) or 1
        with Server(toque_recipe("toque", path, port, threads, flags), port) as server:
            model = served_model(server.address)
            streams, long = run_loop(disturbed(server.address, model, random.Random(seed)))
        gaps_s = [gap for reply in streams for gap in np.diff(reply.token_s)]
        first_s = [reply.first_s - reply.sent_s for reply in long if reply.first_s is not None]
        return {
            "itl_p50_ms": percentile_ms(gaps_s, 50),
            "itl_p99_ms": percentile_ms(gaps_s, 99),
            "itl_max_ms": percentile_ms(gaps_s, 100),
            "long_ttft_p50_ms": percentile_ms(first_s, 50),
            "long_prompts": len(first_s),
        }

    return run


async def disturbed(
    address: Address, model: str, rng: random.Random
) -> tuple[list[Reply], list[Reply]]:
    """The streams, and the long prompts that came while they ran."""

    def body(prompt: int, output: int) -> bytes:
        return request_body(model, tokens(rng, prompt), output, 0)

    await complete(address, body(16, 4), TIMEOUT_S)
    streams = asyncio.gather(
        *(complete(address, body(STREAM_PROMPT, STREAM_TOKENS), TIMEOUT_S) for _ in range(STREAMS))
    )
    long: list[asyncio.Task[Reply]] = []
    while not streams.done():
        await asyncio.wait((streams,), timeout=LONG_EVERY_S)
        if not streams.done():
            sending = complete(address, body(LONG_TOKENS, 2), TIMEOUT_S)
            long.append(asyncio.create_task(sending))
    return checked(await streams), checked(await asyncio.gather(*long))


def checked(replies: Sequence[Reply]) -> list[Reply]:
    for reply in replies:
        if reply.error is not None:
            raise RuntimeError(f"a request failed: {reply.error}")
    return list(replies)


INTERFERENCE = {
    "together": interference(()),
    "apart": interference(("--prefill", "1", "--decode", "1")),
}


# ------------------------------------------------------------------------------------- routing


def routing(servers: int, flags: Sequence[str]) -> Callable[[Path, int], Row]:
    def run(path: Path, seed: int) -> Row:
        threads = max(1, physical_cores() // 2)
        with ExitStack() as stack:
            running = []
            for _ in range(servers):
                port = free_port()
                recipe = toque_recipe("toque", path, port, threads, flags)
                running.append(stack.enter_context(Server(recipe, port)))
            addresses = [server.address for server in running]
            began_s = time.perf_counter()
            replies = run_loop(chats(addresses, random.Random(seed)))
            wall_s = time.perf_counter() - began_s
            counted = [scraped(address) for address in addresses]
        first_s = [reply.first_s - reply.sent_s for reply in replies if reply.first_s is not None]
        asked = summed(counted, "toque_prefix_cache_queries_total")
        found = summed(counted, "toque_prefix_cache_hits_total")
        work = [value for page in counted for value in work_of(page)]
        return {
            "hit_rate": found / asked,
            "of_optimum": found / optimum_tokens(),
            "most_of_work": max(work) / sum(work),
            "wall_s": wall_s,
            "ttft_p50_ms": percentile_ms(first_s, 50),
            "ttft_p99_ms": percentile_ms(first_s, 99),
        }

    return run


def optimum_tokens(block: int = 16) -> int:
    """Every turn finds the whole pages of the turn before it."""
    lengths = [OPENING + turn * SAID for turn in range(TURNS)]
    return CHATS * sum(length // block * block for length in lengths[:-1])


async def chats(addresses: Sequence[Address], rng: random.Random) -> list[Reply]:
    """CLIENTS chats at a time. Requests go to the addresses in turn, whoever they are from."""
    model = served_model(addresses[0])
    waiting = [tokens(rng, OPENING) for _ in range(CHATS)]
    said = [[tokens(rng, SAID) for _ in range(TURNS)] for _ in range(CHATS)]
    replies: list[Reply] = []
    sent = 0

    async def client() -> None:
        nonlocal sent
        while waiting:
            prompt = waiting.pop()
            turns = said.pop()
            for turn in turns:
                address = addresses[sent % len(addresses)]
                sent += 1
                body = request_body(model, prompt, ANSWER_TOKENS, 0)
                replies.append(await complete(address, body, TIMEOUT_S))
                prompt = prompt + turn

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return checked(replies)


def scraped(address: Address) -> dict[str, float]:
    """/metrics, by name with labels."""
    url = f"http://{address.host}:{address.port}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def summed(pages: Sequence[dict[str, float]], name: str) -> float:
    return sum(value for page in pages for key, value in page.items() if key.split("{")[0] == name)


def work_of(page: dict[str, float]) -> list[float]:
    """Tokens computed by each engine of a server."""
    several = [value for key, value in page.items() if key.startswith(ENGINE_WORK)]
    return several or [summed([page], "toque_computed_tokens_total")]


ROUTING = {
    "router": routing(1, ("--data-parallel-size", "2")),
    "round robin": routing(2, ()),
}

if __name__ == "__main__":
    sys.exit(main())
