"""`toque bench naive`: why not a plain loop? The same requests one at a time and by the engine.

All requests arrive at once. Three servers answer them in one run: a loop over the engine's own
model and kernels that takes one request after the other, transformers' generate doing the same
(where it is installed), and the engine. The second table shows why they differ: a decode step
reads every weight once, whatever the number of sequences in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toque import __version__
from toque.bench.machine import arithmetic_peak, copy_bandwidth
from toque.build import Engine
from toque.errors import ConfigError, EngineError
from toque.kernels import physical_cores
from toque.llm import LLM
from toque.options import EngineOptions
from toque.types import (
    Chunk,
    Finished,
    Refused,
    Request,
    RowSetup,
    SamplingParams,
    StepPlan,
    StepReport,
    Tokens,
)
from toque.worker.program import Program
from toque.worker.state import DeviceState
from toque.worker.worker import Worker

BATCHES = (1, 4, 16, 32)
PEER_NEEDS = ("torch", "transformers", "gguf", "accelerate")
CONTEXT_TOKENS = 64  # of each sequence in the table of batches


@dataclass(frozen=True, slots=True)
class Served:
    """How a set of requests went. Seconds from the common arrival."""

    first_token_s: list[float]
    total_s: float
    tokens: list[list[int]]

    def row(self) -> dict[str, float]:
        generated = sum(map(len, self.tokens))
        return {
            "requests_per_s": len(self.tokens) / self.total_s,
            "tokens_per_s": generated / self.total_s,
            "ttft_p50_s": float(np.percentile(self.first_token_s, 50)),
            "ttft_p99_s": float(np.percentile(self.first_token_s, 99)),
        }


def main(arguments: argparse.Namespace, options: EngineOptions) -> int:
    """Run, print both tables, end with one JSON line."""
    options = dataclasses.replace(
        options, max_num_seqs=options.max_num_seqs or max(32, arguments.requests)
    )
    llm = LLM(arguments.model, **dataclasses.asdict(options))
    check_length(llm, arguments.prompt_tokens + arguments.output_tokens)
    prompts = make_prompts(llm, arguments.requests, arguments.prompt_tokens)
    servers: dict[str, Callable[[], Served]] = {
        "one at a time": lambda: one_at_a_time(llm.engine, prompts, arguments.output_tokens),
        "toque": lambda: engine(llm, prompts, arguments.output_tokens),
    }
    peer = transformers_loop(arguments.model, prompts, arguments.output_tokens)
    if peer is not None:
        servers["transformers"] = peer
    results = {name: run() for name, run in servers.items()}
    equal = results["one at a time"].tokens == results["toque"].tokens
    rows = {name: served.row() for name, served in results.items()}
    machine = {
        "copy_gb_per_s": copy_bandwidth(options.threads or physical_cores()),
        "peak_gflops": arithmetic_peak(),
    }
    batches = [decode_step(llm.engine, size, machine) for size in BATCHES]
    balance = balance_rows(llm.engine, machine)
    show(rows, batches, machine, balance, equal)
    print(
        json.dumps(
            {
                "bench": "naive",
                "toque": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "cpus": os.cpu_count(),
                "kernels": llm.engine.hello.fingerprint,
                "requests": arguments.requests,
                "prompt_tokens": arguments.prompt_tokens,
                "output_tokens": arguments.output_tokens,
                "servers": rows,
                "same_tokens": equal,
                "machine": machine,
                "balance_rows": balance,
                "batches": batches,
            }
        )
    )
    return 0


def check_length(llm: LLM, length: int) -> None:
    context = llm.engine.config.max_model_len
    if length > context:
        raise ConfigError(
            f"{length} tokens per request do not fit the context of {context}: "
            f"lower --prompt-tokens or --output-tokens"
        )


def make_prompts(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Random tokens, a fixed seed: nothing is shared, so the prefix cache has no part in this."""
    vocab = llm.tokenizer.vocab_size
    numbers = np.random.default_rng(0).integers(1000, vocab - 1000, size=(count, length))
    return [[int(token) for token in row] for row in numbers]


def one_at_a_time(engine: Engine, prompts: Sequence[Sequence[int]], num_output: int) -> Served:
    """The loop that everyone writes first: a prompt, then a token and a token and a token."""
    config = engine.config
    pages = -(-(len(prompts[0]) + num_output) // config.block_size)
    worker = Worker(Program(engine.model), scratch_state(engine, rows=1, pages_per_row=pages))
    first_token_s, answers = [], []
    t0 = time.perf_counter()
    for prompt in prompts:
        tokens: list[int] = []
        plan = StepPlan(
            step=0,
            setups=(greedy_row(0, len(prompt), tuple(range(pages))),),
            chunks=(
                Chunk(row=0, start=0, num_tokens=len(prompt), tokens=tuple(prompt), sample=True),
            ),
        )
        while len(tokens) < num_output:
            sampled = worker.run(plan).sampled[0]
            if sampled.error is not None:
                raise EngineError(sampled.error)
            tokens.append(sampled.token)
            if len(tokens) == 1:
                first_token_s.append(time.perf_counter() - t0)
            start = len(prompt) + len(tokens) - 1
            plan = StepPlan(step=0, chunks=(Chunk(row=0, start=start, num_tokens=1, sample=True),))
        answers.append(tokens)
    return Served(first_token_s, time.perf_counter() - t0, answers)


def engine(llm: LLM, prompts: Sequence[Sequence[int]], num_output: int) -> Served:
    """All at once through the very engine that serves."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, seed=0)
    channel = llm._channel
    first_token_s: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    t0 = time.perf_counter()
    for number, prompt in enumerate(prompts):
        request = Request(
            id=f"bench-{number}", prompt=tuple(prompt), sampling=sampling, arrived_s=0.0
        )
        tokens[request.id] = []
        channel.send(request)
    while sum(map(len, tokens.values())) < num_output * len(prompts):
        llm.engine.core.step()
        now_s = time.perf_counter() - t0
        for message in channel.drain():
            for event in message.events if isinstance(message, StepReport) else ():
                if isinstance(event, Tokens):
                    first_token_s.setdefault(event.id, now_s)
                    tokens[event.id].extend(event.ids)
                elif isinstance(event, Refused) or (
                    isinstance(event, Finished) and len(tokens[event.id]) < num_output
                ):
                    raise EngineError(f"a request of the benchmark ended early: {event}")
    return Served(list(first_token_s.values()), time.perf_counter() - t0, list(tokens.values()))


def transformers_loop(
    model: str, prompts: Sequence[Sequence[int]], num_output: int
) -> Callable[[], Served] | None:
    """transformers' generate on the same file; None where torch or transformers is not here."""
    missing = [name for name in PEER_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"transformers is left out: {', '.join(missing)} not installed", file=sys.stderr)
        return None
    import torch
    from transformers import AutoModelForCausalLM

    from toque.files.fetch import locate

    path = locate(model).path
    place: dict[str, Any] = (
        {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        if path.is_file()
        else {"pretrained_model_name_or_path": path}
    )
    peer: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)

    def run() -> Served:
        first_token_s, answers = [], []
        t0 = time.perf_counter()
        for prompt in prompts:
            marks = _FirstToken()
            ids = torch.tensor([list(prompt)])
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                do_sample=False,
                streamer=marks,
            )
            first_token_s.append(marks.first_s - t0)
            answers.append(out[0, len(prompt) :].tolist())
        return Served(first_token_s, time.perf_counter() - t0, answers)

    return run


class _FirstToken:
    """transformers calls `put` with the prompt and then with each token."""

    def __init__(self) -> None:
        self._calls = 0
        self.first_s = 0.0

    def put(self, _: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_s = time.perf_counter()

    def end(self) -> None: ...


# ----------------------------------------------------------------------------------- the why


def decode_step(engine: Engine, size: int, machine: dict[str, float]) -> dict[str, float]:
    """One token for `size` sequences at once, median of some steps: what it reads and computes."""
    block = engine.config.block_size
    pages = -(-(CONTEXT_TOKENS + 16) // block)
    worker = Worker(Program(engine.model), scratch_state(engine, rows=size, pages_per_row=pages))
    setups = tuple(
        greedy_row(row, CONTEXT_TOKENS, tuple(range(row * pages, (row + 1) * pages)))
        for row in range(size)
    )
    tokens = tuple(range(100, 100 + CONTEXT_TOKENS))
    prompts = tuple(
        Chunk(row=row, start=0, num_tokens=CONTEXT_TOKENS, tokens=tokens, sample=True)
        for row in range(size)
    )
    worker.run(StepPlan(step=0, setups=setups, chunks=prompts))
    seconds = []
    for step in range(7):
        start = CONTEXT_TOKENS + step
        chunks = tuple(
            Chunk(row=row, start=start, num_tokens=1, sample=True) for row in range(size)
        )
        t0 = time.perf_counter()
        worker.run(StepPlan(step=step, chunks=chunks))
        seconds.append(time.perf_counter() - t0)
    step_s = float(np.median(seconds))
    weight_bytes = engine.model.weight_bytes
    gflops = 2 * engine.model.weight_count * size / step_s / 1e9
    return {
        "sequences": size,
        "step_ms": step_s * 1e3,
        "tokens_per_s": size / step_s,
        "weight_mb_per_token": weight_bytes / size / 1e6,
        "weight_gb_per_s": weight_bytes / step_s / 1e9,
        "share_of_copy": weight_bytes / step_s / 1e9 / machine["copy_gb_per_s"],
        "gflops": gflops,
        "share_of_peak": gflops / machine["peak_gflops"],
    }


def balance_rows(engine: Engine, machine: dict[str, float]) -> float:
    """Rows per pass over the weights at which arithmetic takes as long as reading them."""
    read_s_per_byte = 1 / machine["copy_gb_per_s"]
    weights_per_byte = engine.model.weight_count / engine.model.weight_bytes
    compute_s_per_byte_and_row = 2 * weights_per_byte / machine["peak_gflops"]
    return read_s_per_byte / compute_s_per_byte_and_row


def scratch_state(engine: Engine, rows: int, pages_per_row: int) -> DeviceState:
    """Rows and pages of our own, beside the engine's."""
    model, config = engine.model, engine.config
    ops = model.ops
    kv = ops.kv_pages(
        model.kv_specs(config.kv_cache_dtype), rows * pages_per_row, config.block_size
    )
    return DeviceState(rows, pages_per_row, kv, ops.sampler(rows))


def greedy_row(row: int, num_prompt: int, pages: tuple[int, ...]) -> RowSetup:
    sampling = SamplingParams(temperature=0.0, seed=0)
    return RowSetup(
        row=row, sampling=sampling, choice=0, num_prompt=num_prompt, pages=pages, end_token_ids=()
    )


def show(
    rows: dict[str, dict[str, float]],
    batches: list[dict[str, float]],
    machine: dict[str, float],
    balance: float,
    equal: bool,
) -> None:
    """The two tables, on standard error: standard output keeps the JSON line for scripts."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr)
    base = rows["one at a time"]["tokens_per_s"]
    table = Table("server", "requests/s", "tokens/s", "ratio", "TTFT p50", "TTFT p99")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['requests_per_s']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / base:.2f}x",
            f"{row['ttft_p50_s']:.2f} s",
            f"{row['ttft_p99_s']:.2f} s",
        )
    console.print(table)
    console.print(f"the loop's tokens and the engine's are {'equal' if equal else 'NOT equal'}")
    why = Table("sequences", "step", "tokens/s", "weights/token", "read", "of copy", "of peak")
    for batch in batches:
        why.add_row(
            f"{batch['sequences']}",
            f"{batch['step_ms']:.1f} ms",
            f"{batch['tokens_per_s']:.1f}",
            f"{batch['weight_mb_per_token']:.0f} MB",
            f"{batch['weight_gb_per_s']:.1f} GB/s",
            f"{batch['share_of_copy']:.0%}",
            f"{batch['share_of_peak']:.0%}",
        )
    console.print(why)
    console.print(
        f"this machine copies {machine['copy_gb_per_s']:.1f} GB/s and multiplies at "
        f"{machine['peak_gflops']:.0f} GFLOP/s: from {balance:.0f} sequences per step on, "
        f"arithmetic takes over from reading weights"
    )
