"""`python -m bench.startup MODEL`: from the start of the process to the first token, and memory.

Starts `toque serve` several times, each with one request as soon as it is ready; prints the log's
phases of the last start and one JSON line with medians. The weight cache is as it is found: run it
once before, or with `--toque-args=--no-weight-cache`, to see either.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.compare import first_token, vocabulary
from bench.load import served_model
from bench.machine import describe_machine
from bench.processes import memory
from bench.servers import Server, free_port, toque_recipe
from toque.files.fetch import locate
from toque.kernels import physical_cores


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    path = locate(options.model).path
    starts = [one(options, path) for _ in range(options.rounds)]
    for start in starts:
        print("  ".join(f"{key} {value:.2f}" for key, value in start.items()), file=sys.stderr)
    medians = {key: statistics.median(start[key] for start in starts) for key in starts[0]}
    found = {"bench": "startup", "model": path.name, "rounds": options.rounds}
    print(json.dumps(found | {"medians": medians, "machine": describe_machine()}))
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.startup", description=__doc__)
    out.add_argument("model", nargs="?", default="qwen2.5-coder-0.5b", help="GGUF file or name")
    out.add_argument("--rounds", type=int, default=5, help="[5]")
    out.add_argument("--threads", type=int, help="[the physical cores]")
    out.add_argument("--toque-args", default="", help="further flags of toque serve, in one word")
    out.add_argument("--timeout", type=float, default=300.0, help="seconds per request [300]")
    return out


def one(options: argparse.Namespace, path: Path) -> dict[str, float]:
    """One life of a server: seconds from its process's start, and MB after the first token."""
    port = free_port()
    threads = options.threads or physical_cores()
    recipe = toque_recipe("toque", path, port, threads, shlex.split(options.toque_args))
    with Server(recipe, port) as server:
        model = served_model(server.address)
        token_s = first_token(server, model, vocabulary(path), options.timeout)
        held = memory(server.pid)
        return {
            "ready_s": server.ready_s - server.started_s,
            "first_token_s": token_s - server.started_s,
            "rss_mb": held.rss_mb,
            "pss_mb": held.pss_mb,
            "anonymous_mb": held.anonymous_mb,
        }


if __name__ == "__main__":
    sys.exit(main())
