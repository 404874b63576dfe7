"""`python -m bench.load URL`: drive any OpenAI-compatible server with fixed, repeatable requests.

A closed loop of clients, token-id prompts from a seed, greedy, end tokens ignored, streamed. One
JSON line per workload on standard output, a table on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from bench.client import Address, Reply, complete, get_json, parse_url, request_body
from bench.machine import describe_machine
from bench.summary import Run, summarize
from bench.workloads import DEFAULT_VOCAB_SIZE, WORKLOADS, Workload, make_prompts

T = TypeVar("T")

WARM_UP = Workload("warm-up", requests=1, clients=1, prompt_tokens=16, output_tokens=4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if any request failed."""
    options = parser().parse_args(arguments)
    address = parse_url(options.url)
    model = options.model or served_model(address)
    failed = False
    for name in options.workload or WORKLOADS:
        workload = WORKLOADS[name].shortened(options.requests)
        result = drive(address, model, workload, options.seed, options.vocab_size, options.timeout)
        failed |= bool(result["errors"])
        show(name, result)
        print(
            json.dumps(
                {
                    "bench": "load",
                    "url": address.url,
                    "model": model,
                    "seed": options.seed,
                    "vocab_size": options.vocab_size,
                    "workload": asdict(workload),
                    "result": result,
                    "machine": describe_machine(),
                }
            ),
            flush=True,
        )
    return int(failed)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    out.add_argument("url", help="e.g. http://127.0.0.1:8000")
    out.add_argument("--workload", nargs="+", choices=list(WORKLOADS), help="[all]")
    out.add_argument("--model", help="name in the request [the first of /v1/models]")
    out.add_argument("--requests", type=int, help="instead of the workload's own number")
    out.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the prompts; a server that has seen them has them in its prefix cache [0]",
    )
    out.add_argument(
        "--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="bound of the token ids [32000]"
    )
    out.add_argument("--timeout", type=float, default=900.0, help="seconds per request [900]")
    return out


def served_model(address: Address) -> str:
    """The id of the first model of /v1/models. Raises OSError, ValueError: not such a server."""
    return str(get_json(f"{address.url}/models")["data"][0]["id"])


def drive(
    address: Address, model: str, workload: Workload, seed: int, vocab_size: int, timeout_s: float
) -> dict[str, Any]:
    """Warm up with one short request of other tokens, then measure; see `summarize`."""
    prompts = make_prompts(workload, seed, vocab_size)
    bodies = [request_body(model, prompt, workload.output_tokens, seed) for prompt in prompts]
    warm = request_body(model, make_prompts(WARM_UP, seed, vocab_size)[0], 4, seed)
    run_loop(complete(address, warm, timeout_s))
    cpu_s, t0 = time.process_time(), time.perf_counter()
    replies = run_loop(closed_loop(address, bodies, workload.clients, timeout_s))
    wall_s, cpu_s = time.perf_counter() - t0, time.process_time() - cpu_s
    return summarize(Run(workload, replies, wall_s, cpu_s))


async def closed_loop(
    address: Address, bodies: Sequence[bytes], clients: int, timeout_s: float
) -> list[Reply]:
    """Replies in the order of the requests."""
    replies: list[Reply | None] = [None] * len(bodies)
    waiting = iter(range(len(bodies)))

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            replies[number] = await complete(address, bodies[number], timeout_s)

    await asyncio.gather(*(client(waiting) for _ in range(clients)))
    return [reply for reply in replies if reply is not None]


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """On uvloop where it is installed: half the client's CPU time."""
    factory = None
    if importlib.util.find_spec("uvloop"):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def show(name: str, result: dict[str, Any]) -> None:
    def ms(key: str) -> str:
        return "-" if result[key] is None else f"{result[key]:.0f}"

    parts = (
        f"{name:8} out {result['out_tok_per_s']:7.1f} tok/s",
        f"prompt {result['prompt_tok_per_s']:7.1f} tok/s",
        f"TTFT p50/p99 {ms('ttft_p50_ms')}/{ms('ttft_p99_ms')} ms",
        f"between tokens p50/p99 {ms('itl_p50_ms')}/{ms('itl_p99_ms')} ms",
        f"errors {result['errors']}/{result['requests']}",
        f"client CPU {result['client_cpu_s'] / result['wall_s']:.1%}",
    )
    print("  ".join(parts), file=sys.stderr)
    for message in result["error_messages"]:
        print(f"         {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
