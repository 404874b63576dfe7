"""`python -m bench.goodput`: requests per second that were served as promised, by order of service.

The load is mixed: chats, and documents of 2,000 tokens that are read before one answer comes. The
capacity is what first come, first served completes of that mix when it is never idle. Then requests
come at random times at shares of that capacity, the same ones for every engine, and those count
that got their first token and their pace as promised (`toque.slo.attained`).

`virtual` (default) runs the scheduler on a clock that is set, with step times of a given cost
model: minutes of load in seconds. `real` starts servers and drives them over HTTP, 3 minutes each.

What is promised is set by what the engine does for one request alone: chats get ten times the
unloaded time to the first token and between tokens, documents four times and twenty times.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.machine import describe_machine
from toque.build import policy_named
from toque.scheduler.cost import Work
from toque.sim.engine import Simulation, Sizes
from toque.sim.run import Served
from toque.sim.workload import Kind, arrivals
from toque.types import Request, Slo

CHAT = Kind("chat", 0.85, (32, 160), (32, 128))
DOCUMENT = Kind("document", 0.15, (1800, 2200), (32, 128))
FIRST_TIMES = {"chat": 10.0, "document": 4.0}  # of the unloaded time to the first token
BETWEEN_TIMES = {"chat": 10.0, "document": 20.0}  # of the unloaded time between tokens
LOADS = (0.5, 0.8, 1.0, 1.2)
SMALL_STEP = 64
# ms: constant, per token, per pair, per token of context, per output. SmolLM2-135M on two cores.
COST = (6.0, 1.4, 0.0001, 0.001, 1.9)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request, as its client saw it."""

    kind: str
    met: bool
    refused: bool
    first_after_s: float | None
    gaps_s: Sequence[float]


# How one engine serves a stream of requests: (kinds, requests per second, seconds) -> outcomes.
Serve = Callable[[Sequence[Kind], float, float], list[Outcome]]


def promised(
    kinds: Sequence[Kind], alone: Callable[[Kind], tuple[float, float]], pace: float
) -> list[Kind]:
    """`alone`: seconds to the first token and between tokens, with nobody else there."""
    made = []
    for kind in kinds:
        first_s, between_s = alone(kind)
        slo = Slo(
            name=kind.name,
            ttft_s=round(first_s * FIRST_TIMES[kind.name], 3),
            itl_s=round(between_s * BETWEEN_TIMES[kind.name] * pace, 3),
        )
        made.append(replace(kind, slo=slo))
    return made


def row(name: str, load: float, outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    chats = [outcome for outcome in outcomes if outcome.kind == "chat"]
    firsts = [o.first_after_s for o in chats if o.first_after_s is not None]
    gaps = [gap for outcome in chats for gap in outcome.gaps_s]
    return {
        "engine": name,
        "load": load,
        "requests": len(outcomes),
        "met_per_s": sum(outcome.met for outcome in outcomes) / seconds,
        "met_share": sum(outcome.met for outcome in outcomes) / max(1, len(outcomes)),
        "refused": sum(outcome.refused for outcome in outcomes),
        "chat_ttft_p50_ms": percentile_ms(firsts, 50),
        "chat_ttft_p99_ms": percentile_ms(firsts, 99),
        "chat_itl_p99_ms": percentile_ms(gaps, 99),
    }


def percentile_ms(values_s: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values_s, percent)) * 1e3 if len(values_s) else None


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A table on standard error; each engine against the first one at the same load."""
    for each in rows:
        base = next(r for r in rows if r["load"] == each["load"])
        ratio = each["met_per_s"] / base["met_per_s"] if base["met_per_s"] else float("nan")
        first = each["chat_ttft_p50_ms"], each["chat_ttft_p99_ms"], each["chat_itl_p99_ms"]
        p50, p99, between = (f"{v:.0f}" if v is not None else "-" for v in first)
        print(
            f"load {each['load']:.1f}  {each['engine']:14} {each['requests']:5} requests  "
            f"met {each['met_per_s']:6.3f}/s ({each['met_share']:4.0%})  {ratio:6.2f}x  "
            f"refused {each['refused']:4}  chat TTFT p50/p99 {p50}/{p99} ms, gap p99 {between} ms",
            file=sys.stderr,
        )


# ------------------------------------------------------------------------------------ virtual


def step_ms(work: Work) -> float:
    constant, tokens, pairs, context, outputs = COST
    return (
        constant
        + tokens * work.tokens
        + pairs * work.pairs
        + context * work.context
        + outputs * work.outputs
    )


def simulated(policy: str, step_tokens: int, seed: int) -> Serve:
    """The real scheduler; its cost model learns from the steps as it would from a device's."""

    def serve(kinds: Sequence[Kind], per_s: float, seconds: float) -> list[Outcome]:
        served: list[Served] = []
        sizes = Sizes(max_num_batched_tokens=step_tokens, prefill_tokens_per_s=1e3 / COST[1])
        made = Simulation(
            sizes,
            lambda cost: policy_named(policy, cost),
            step_ms,
            arrivals(kinds, per_s, seconds, seed, sizes.vocab_size),
            served.append,
        )
        made.run()
        return [_outcome(each) for each in served]

    return serve


def _outcome(served: Served) -> Outcome:
    return Outcome(
        kind=kind_of(served.request),
        met=served.attained,
        refused=served.refused is not None,
        first_after_s=served.first_after_s,
        gaps_s=served.gaps_s,
    )


def kind_of(request: Request) -> str:
    return request.id.partition("-")[0]


def virtual(options: argparse.Namespace) -> dict[str, Any]:
    def alone(kind: Kind) -> tuple[float, float]:
        length = sum(kind.prompt_tokens) / 2
        reading = Work(tokens=int(length), pairs=int(length**2 / 2), context=int(length), outputs=1)
        one = Work(tokens=1, pairs=int(length), context=int(length), outputs=1)
        return step_ms(reading) / 1e3, step_ms(one) / 1e3

    kinds = promised((CHAT, DOCUMENT), alone, options.pace)
    half_second = int(0.5e3 / COST[1]) // 16 * 16
    capacity_per_s = simulated_capacity(kinds, half_second, options.seed)
    engines = {
        "fcfs": ("fcfs", half_second),
        "fcfs, small": ("fcfs", SMALL_STEP),
        "slo": ("slo", half_second),
    }
    rows = []
    for load in options.loads:
        for name, (policy, step_tokens) in engines.items():
            outcomes: list[Outcome] = []
            for seed in range(options.seed, options.seed + options.repeat):
                serve = simulated(policy, step_tokens, seed)
                outcomes += serve(kinds, load * capacity_per_s, options.seconds)
            rows.append(row(name, load, outcomes, options.seconds * options.repeat))
    return report(kinds, capacity_per_s, rows)


def simulated_capacity(kinds: Sequence[Kind], step_tokens: int, seed: int) -> float:
    """Requests per second while there are always more than can run."""
    served: list[Served] = []
    sizes = Sizes(max_num_batched_tokens=step_tokens, prefill_tokens_per_s=1e3 / COST[1])
    stream = arrivals(kinds, 100.0, 3.0, seed, sizes.vocab_size)
    made = Simulation(
        sizes, lambda cost: policy_named("fcfs", cost), step_ms, stream, served.append
    )
    made.run()
    return len(served) / made.clock.now_s


def report(
    kinds: Sequence[Kind], capacity_per_s: float, rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "bench": "goodput",
        "promises": {
            k.name: {"ttft_s": k.slo.ttft_s, "itl_s": k.slo.itl_s} for k in kinds if k.slo
        },
        "capacity_per_s": capacity_per_s,
        "rows": list(rows),
        "machine": describe_machine(),
    }


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.goodput", description=__doc__)
    out.add_argument("mode", nargs="?", choices=("virtual", "real"), default="virtual")
    out.add_argument("--loads", nargs="+", type=float, default=list(LOADS), help="of the capacity")
    out.add_argument("--seconds", type=float, default=180.0, help="of arrivals per load [180]")
    out.add_argument("--repeat", type=int, default=3, help="virtual: seeds per load [3]")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument(
        "--pace", type=float, default=1.0, help="longer targets between tokens, by so much [1]"
    )
    out.add_argument("--model", default="smollm2", help="real: GGUF file or name [smollm2]")
    out.add_argument(
        "--crowd", type=int, default=48, help="real: requests that measure the capacity [48]"
    )
    out.add_argument("--peer", help="real: a llama-server to measure too")
    out.add_argument("--threads", type=int, help="real: of each server [physical cores]")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.mode == "real":
        from bench.goodput_http import real

        found = real(options)
    else:
        found = virtual(options)
    promises = ", ".join(
        f"{name} {p['ttft_s']:.2f} s / {p['itl_s'] * 1e3:.0f} ms"
        for name, p in found["promises"].items()
    )
    print(
        f"capacity {found['capacity_per_s']:.2f} requests/s; promised: {promises}", file=sys.stderr
    )
    show(found["rows"])
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
