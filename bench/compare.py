"""`python -m bench.compare MODEL`: toque and llama-server in turn on the same file.

Every measurement starts a fresh server, so nothing is cached and each gets its best flags for the
workload. The engines alternate over several rounds, because the machine's speed drifts: a ratio is
the median of the rounds' own ratios. Without a peer only toque is measured, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.client import Reply, complete, request_body
from bench.comparison import Comparison, Measurement, show
from bench.load import WARM_UP, drive, run_loop, served_model
from bench.machine import describe_machine
from bench.processes import cpu_seconds, memory
from bench.servers import Recipe, Server, free_port, llama_recipe, toque_recipe
from bench.workloads import WORKLOADS, Workload, make_prompts
from toque.files.fetch import locate
from toque.files.gguf import read_gguf
from toque.kernels import physical_cores

TOQUE = "toque"


@dataclass(frozen=True, slots=True)
class Engine:
    """One side of the comparison. `binary` is None for toque."""

    name: str
    model: Path
    threads: int
    binary: Path | None = None
    extra: tuple[str, ...] = ()

    def recipe(self, port: int, workload: Workload) -> Recipe:
        if self.binary is None:
            return toque_recipe(self.name, self.model, port, self.threads, self.extra)
        return llama_recipe(self.name, self.binary, self.model, port, self.threads, workload)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if any request failed."""
    options = parser().parse_args(arguments)
    # SIGTERM (of `timeout`, say) must run the `with` blocks that end the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    engines = the_engines(options)
    vocab_size = vocabulary(engines[0].model)
    names = options.workload or list(WORKLOADS)
    workloads = [WORKLOADS[name].shortened(options.requests) for name in names]
    comparison = Comparison([engine.name for engine in engines], workloads)
    for round_number in range(options.rounds):
        for workload in workloads:
            # The other one first in every second round: neither has always the warmer machine.
            for engine in engines[:: -1 if round_number % 2 else 1]:
                measured = measure(engine, workload, round_number, vocab_size, options.timeout)
                comparison.add(workload, measured)
                progress(round_number, workload, measured)
    show(comparison)
    print(json.dumps(report(options, engines, vocab_size, comparison)))
    return int(comparison.errors > 0)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    out.add_argument("model", nargs="?", default="qwen2.5-coder-0.5b", help="GGUF file or name")
    out.add_argument(
        "--peer",
        nargs="*",
        type=Path,
        default=[Path(os.environ["LLAMA_SERVER"])] if os.environ.get("LLAMA_SERVER") else [],
        help="llama-server; several builds (with OpenMP, without): the better one counts "
        "[$LLAMA_SERVER]",
    )
    out.add_argument(
        "--peer-model", help="another GGUF file for the peer: its fastest format [the same file]"
    )
    out.add_argument("--workload", nargs="+", choices=list(WORKLOADS), help="[all]")
    out.add_argument("--rounds", type=int, default=3, help="[3]")
    out.add_argument("--requests", type=int, help="instead of each workload's own number")
    out.add_argument("--threads", type=int, help="of every engine [the physical cores]")
    out.add_argument("--toque-args", default="", help="further flags of toque serve, in one word")
    out.add_argument("--timeout", type=float, default=900.0, help="seconds per request [900]")
    return out


def the_engines(options: argparse.Namespace) -> list[Engine]:
    """toque first. Raises FileNotFoundError for a peer that is not there."""
    threads = options.threads or physical_cores()
    model = locate(options.model).path
    peer_model = locate(options.peer_model).path if options.peer_model else model
    engines = [Engine(TOQUE, model, threads, extra=tuple(shlex.split(options.toque_args)))]
    for binary, name in zip(options.peer, peer_names(options.peer), strict=True):
        if not binary.is_file():
            raise FileNotFoundError(f"there is no llama-server at {binary}")
        engines.append(Engine(name, peer_model, threads, binary))
    return engines


def peer_names(binaries: Sequence[Path]) -> list[str]:
    """Several builds are told apart by their folders, or by number where those are alike."""
    if len(binaries) == 1:
        return ["llama-server"]
    folders = [next(p.name for p in binary.parents if p.name != "bin") for binary in binaries]
    if len(set(folders)) < len(folders):
        folders = [str(number + 1) for number in range(len(binaries))]
    return [f"llama-server {folder}" for folder in folders]


def vocabulary(model: Path) -> int:
    """Tokens of a GGUF file: the bound of the prompts' ids."""
    return len(read_gguf(model).metadata["tokenizer.ggml.tokens"])


def measure(
    engine: Engine, workload: Workload, seed: int, vocab_size: int, timeout_s: float
) -> Measurement:
    """One server, from its start to its end."""
    port = free_port()
    with Server(engine.recipe(port, workload), port) as server:
        model = served_model(server.address)
        first_token_s = first_token(server, model, vocab_size, timeout_s) - server.started_s
        before_s = cpu_seconds(server.pid)
        result = drive(server.address, model, workload, seed, vocab_size, timeout_s)
        return Measurement(
            engine=engine.name,
            result=result,
            model_id=Path(model).name,
            ready_s=server.ready_s - server.started_s,
            first_token_s=first_token_s,
            server_cpu_s=cpu_seconds(server.pid) - before_s,
            memory=memory(server.pid),
        )


def first_token(server: Server, model: str, vocab_size: int, timeout_s: float) -> float:
    """When the first token of the server's life arrived. Raises RuntimeError if none did."""
    prompt = make_prompts(WARM_UP, 1, vocab_size)[0]
    body = request_body(model, prompt, 1, 0)
    reply: Reply = run_loop(complete(server.address, body, timeout_s))
    if reply.first_s is None or reply.error is not None:
        raise RuntimeError(f"{server.recipe.name} did not answer: {reply.error}")
    return reply.first_s


def progress(round_number: int, workload: Workload, measured: Measurement) -> None:
    rate = measured.result[workload.headline]
    print(
        f"round {round_number + 1}: {workload.name:8} {measured.engine:24} {rate:8.1f} tok/s",
        file=sys.stderr,
    )


def report(
    options: argparse.Namespace, engines: list[Engine], vocab_size: int, comparison: Comparison
) -> dict[str, Any]:
    return {
        "bench": "compare",
        "rounds": options.rounds,
        "vocab_size": vocab_size,
        "engines": {
            engine.name: {
                "model": engine.model.name,
                "command": command(engine, comparison.workloads[0]),
            }
            for engine in engines
        },
        "workloads": {workload.name: asdict(workload) for workload in comparison.workloads},
        "medians": comparison.medians(),
        "measurements": [
            {"workload": name, **asdict(one)} for name, one in comparison.measurements
        ],
        "machine": describe_machine(),
    }


def command(engine: Engine, workload: Workload) -> str:
    """How it was started, without this machine's folders."""
    model = str(engine.model)
    argv = engine.recipe(0, workload).argv
    return shlex.join(
        [Path(argv[0]).name, *(part.replace(model, engine.model.name) for part in argv[1:])]
    )


if __name__ == "__main__":
    sys.exit(main())
