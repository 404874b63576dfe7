"""`python -m bench.prefixes`: what the prefix cache finds of what could be found, and saves.

Three workloads as in the RadixAttention paper (arXiv:2312.07104): chats of several turns, many
questions after one of a few long instructions, and trees of thought that branch. They run on the
real scheduler and cache in virtual time, once with a pool that is roomy and once with one that is
not, against the cache switched off. The optimum is computed offline: every prompt's longest
beginning, in whole pages, that any earlier prompt or answer had, as if nothing were ever given up.

The last line says how much of the held KV memory holds no token, beside the floor that pages of
this size have, (block size - 1) / 2 places per sequence.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.goodput import COST, step_ms
from bench.machine import describe_machine
from toque.build import policy_named
from toque.sim.device import token_at
from toque.sim.engine import Simulation, Sizes
from toque.sim.run import Served
from toque.types import Request, SamplingParams

BLOCK = 16
VOCAB = 32_000
ROOMY_PAGES, SCARCE_PAGES = 60_000, 600
Prompt = tuple[int, ...]


@dataclass
class Load:
    """Requests that follow each other: `after(served tokens)` gives what comes next."""

    name: str
    first: list[tuple[float, Prompt, int]]  # when, prompt, output tokens
    after: Callable[[str, Prompt, Prompt], list[tuple[str, Prompt, int]]]


@dataclass
class Optimum:
    """The hits of a cache that never forgets and knows every request that came before."""

    pages: set[int] = field(default_factory=set)  # hashes of paths
    hit_tokens: int = 0
    asked_tokens: int = 0

    def ask(self, prompt: Prompt) -> None:
        """One token must be computed, so that there is something to sample from."""
        self.asked_tokens += len(prompt)
        for path in paths(prompt[:-1]):
            if path not in self.pages:
                break
            self.hit_tokens += BLOCK
        self.learn(prompt)  # who comes while it is computed may wait for it

    def learn(self, tokens: Prompt) -> None:
        self.pages.update(paths(tokens))


def paths(tokens: Prompt) -> list[int]:
    found, path = [], 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        path = hash((path, tokens[start : start + BLOCK]))
        found.append(path)
    return found


def words(rng: random.Random, count: int) -> Prompt:
    return tuple(rng.randrange(100, VOCAB) for _ in range(count))


def chats(seed: int, scale: float) -> Load:
    """Users with a short system message in common who say something five times."""
    rng = random.Random(seed)
    system = words(rng, 96)
    users = int(60 * scale)
    first = [
        (rng.uniform(0, 4.0 * users), (*system, *words(rng, rng.randint(20, 120))), 80)
        for _ in range(users)
    ]
    turns: dict[str, int] = {}

    def after(name: str, prompt: Prompt, answer: Prompt) -> list[tuple[str, Prompt, int]]:
        user = name.split("/")[0]
        turns[user] = turns.get(user, 1) + 1
        if turns[user] > 5:
            return []
        return [(f"{user}/{turns[user]}", (*prompt, *answer, *words(rng, 60)), 80)]

    return Load("chats", first, after)


def few_shot(seed: int, scale: float) -> Load:
    """Questions after one of four sets of worked examples."""
    rng = random.Random(seed)
    examples = [words(rng, 1000) for _ in range(4)]
    total = int(240 * scale)
    first = [
        (rng.uniform(0, 0.6 * total), (*rng.choice(examples), *words(rng, 40)), 16)
        for _ in range(total)
    ]
    return Load("few-shot", first, lambda name, prompt, answer: [])


def trees(seed: int, scale: float) -> Load:
    """Problems whose thoughts branch: three ways, three levels deep."""
    rng = random.Random(seed)
    total = max(2, int(10 * scale))
    first = [(rng.uniform(0, 40.0 * total), words(rng, 300), 48) for _ in range(total)]

    def after(name: str, prompt: Prompt, answer: Prompt) -> list[tuple[str, Prompt, int]]:
        if name.count("/") >= 3:
            return []
        thought = (*prompt, *answer)
        return [(f"{name}/{way}", (*thought, *words(rng, 12)), 48) for way in range(3)]

    return Load("trees", first, after)


@dataclass
class Run:
    hit_tokens: int
    asked_tokens: int
    optimum_tokens: int
    wall_s: float
    evicted_tokens: int
    empty_share: float  # of the held places
    floor_share: float
    mean_tokens: float  # per running sequence


def run(make: Callable[[int, float], Load], seed: int, scale: float, pages: int) -> Run:
    """`pages` 0: without a cache, in the roomy pool."""
    load, optimum = make(seed, scale), Optimum()
    order = sorted(range(len(load.first)), key=lambda number: load.first[number][0])
    prompts: dict[str, tuple[Prompt, int]] = {}
    serial = iter(range(1, 1_000_000))

    def request(name: str, prompt: Prompt, output: int, at_s: float) -> Request:
        number = next(serial)
        prompts[name] = (prompt, number)
        sampling = SamplingParams(seed=number, max_tokens=output, ignore_eos=True)
        return Request(id=name, prompt=prompt, sampling=sampling, arrived_s=at_s)

    def first() -> Any:
        for number in order:
            at_s, prompt, output = load.first[number]
            made = request(f"r{number}", prompt, output, at_s)
            optimum.ask(prompt)
            yield at_s, made

    def ended(served: Served) -> None:
        name = served.request.id
        prompt, number = prompts.pop(name)
        answer = tuple(token_at(number, len(prompt) + n, VOCAB) for n in range(served.tokens))
        optimum.learn((*prompt, *answer[:-1]))  # the last one is never computed
        now_s = made.clock.now_s
        for follower, text, output in load.after(name, prompt, answer):
            optimum.ask(text)
            made.port.send_at(now_s + 1.0, request(follower, text, output, now_s + 1.0))

    sizes = Sizes(
        max_num_batched_tokens=352,
        total_pages=pages or ROOMY_PAGES,
        block_size=BLOCK,
        vocab_size=VOCAB,
        prefix_caching=pages > 0,
        prefill_tokens_per_s=1e3 / COST[1],
    )
    made = Simulation(sizes, lambda cost: policy_named("fcfs", cost), step_ms, first(), ended)
    empty = places = running = computed = 0
    while not made.port.over or made.scheduler.has_work:
        made.core.step(0.0 if made.scheduler.has_work else 1.0)
        now = made.port.report.load
        empty += now.empty_places
        places += now.held_pages * BLOCK
        running += now.running
        computed += now.held_pages * BLOCK - now.empty_places
    counters = made.scheduler.counters()
    return Run(
        hit_tokens=counters.prefix_hits,
        asked_tokens=counters.prefix_queries,
        optimum_tokens=optimum.hit_tokens,
        wall_s=made.device.busy_s,
        evicted_tokens=counters.wasted_evicted_tokens,
        empty_share=empty / max(1, places),
        floor_share=running * (BLOCK - 1) / 2 / max(1, places),
        mean_tokens=computed / max(1, running),
    )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.prefixes", description=__doc__)
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--scale", type=float, default=1.0, help="of the number of requests [1]")
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    rows = []
    for make in (chats, few_shot, trees):
        cold = run(make, options.seed, options.scale, 0)
        for pool, pages in (("roomy", ROOMY_PAGES), ("scarce", SCARCE_PAGES)):
            got = run(make, options.seed, options.scale, pages)
            rows.append(
                {
                    "workload": make.__name__,
                    "pool": pool,
                    "hit_rate": got.hit_tokens / got.asked_tokens,
                    "of_optimum": got.hit_tokens / max(1, got.optimum_tokens),
                    "device_time_saved": cold.wall_s / got.wall_s,
                    "evicted_and_asked_again_tokens": got.evicted_tokens,
                    "kv_empty_share": got.empty_share,
                    "kv_empty_floor": got.floor_share,
                    "mean_tokens": got.mean_tokens,
                }
            )
            show(rows[-1])
    print(json.dumps({"bench": "prefixes", "rows": rows, "machine": describe_machine()}))
    return 0


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['workload']:9} {row['pool']:7} hits {row['hit_rate']:5.1%}, "
        f"{row['of_optimum']:6.1%} of the optimum; device {row['device_time_saved']:.2f}x; "
        f"evicted and asked again {row['evicted_and_asked_again_tokens']} tokens; KV places "
        f"without a token {row['kv_empty_share']:.2%} (floor {row['kv_empty_floor']:.2%}, length "
        f"{row['mean_tokens']:.0f})",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
