"""`python -m bench.ops`: each op's rate on the default model's shapes, and how near the machine's
ceiling that is.

G/s: 1e9 multiplications and additions per second. GB/s: weights (or KV) read per second, in the
kernel set's own form. The ceilings are measured in the same run: reading memory, a float32 matrix
product in numpy's BLAS, and the instruction that integer products are made of. An op is judged by
the ceiling that binds it, the one that it comes nearer to.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.machine import describe_machine
from bench.op_cases import Case, Cases
from bench.timing import Stopwatch, Timed
from toque.bench.machine import arithmetic_peak, copy_bandwidth, read_bandwidth
from toque.kernels import physical_cores, select
from toque.kernels.api import Ops
from toque.kernels.cpu import CpuOps
from toque.kernels.ref.dequantize import KINDS
from toque.options import EngineOptions

DEFAULT_ROWS = (1, 4, 16, 64, 512)
CEILING_ROUNDS = 20
INTEGER_ROUNDS = 10_000


@dataclass(frozen=True, slots=True)
class Ceilings:
    read_gb_per_s: float
    copy_gb_per_s: float
    fp32_gflops: float
    integer_g_per_s: float | None = None  # of 16-bit products; only compiled kernels have one

    @property
    def bandwidth_gb_per_s(self) -> float:
        return max(self.read_gb_per_s, self.copy_gb_per_s)

    def better(self, other: Ceilings) -> Ceilings:
        """The higher of each: what else runs on the machine can only lower them."""
        return Ceilings(
            max(self.read_gb_per_s, other.read_gb_per_s),
            max(self.copy_gb_per_s, other.copy_gb_per_s),
            max(self.fp32_gflops, other.fp32_gflops),
            max(self.integer_g_per_s or 0, other.integer_g_per_s or 0) or None,
        )


def measure_ceilings(ops: Ops, threads: int) -> Ceilings:
    return Ceilings(
        read_bandwidth(threads, CEILING_ROUNDS),
        copy_bandwidth(threads, CEILING_ROUNDS),
        arithmetic_peak(CEILING_ROUNDS),
        integer_peak(ops) if isinstance(ops, CpuOps) else None,
    )


def integer_peak(ops: CpuOps) -> float:
    """Of the instruction that multiplies rounded inputs with integer weights, best of many."""
    best = 0.0
    for _ in range(CEILING_ROUNDS):
        t0 = time.perf_counter()
        best = max(best, ops.backend.multiply_adds(INTEGER_ROUNDS) / (time.perf_counter() - t0))
    return best / 1e9


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    threads = options.threads or physical_cores()
    ops = select(options.kernels, threads)
    cases = Cases(ops, np.random.default_rng(0), options.kinds, options.kv_cache_dtype)
    watch = Stopwatch(options.clock, threads, options.seconds)
    before = measure_ceilings(ops, threads)
    timed = list(measured(cases, watch, options))
    ceilings = before.better(measure_ceilings(ops, threads))
    rows = [rates(case, seconds, ceilings) for case, seconds in timed]
    show(f"{ops.name}, {threads} threads, {options.clock} time", rows, ceilings)
    print(
        json.dumps(
            {
                "bench": "ops",
                "kernels": ops.name,
                "threads": threads,
                "clock": options.clock,
                "ceilings": asdict(ceilings),
                "ops": rows,
                "machine": describe_machine(),
            }
        )
    )
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.ops", description=__doc__)
    out.add_argument("--kernels", default="auto", help="auto (cpu), cpu or ref [auto]")
    out.add_argument("--threads", type=int, help="[the physical cores]")
    out.add_argument("--rows", type=int, nargs="+", default=DEFAULT_ROWS, help="M [1 4 16 64 512]")
    out.add_argument("--only", help="only ops whose name holds this text")
    out.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), help="of the weights [the default file's own]"
    )
    out.add_argument("--kv-cache-dtype", nargs="+", default=kv_dtypes(), help="[all there are]")
    out.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: CPU time of the process per thread, steadier beside other processes [wall]",
    )
    out.add_argument("--seconds", type=float, default=0.3, help="how long each op repeats [0.3]")
    return out


def kv_dtypes() -> list[str]:
    """What --kv-cache-dtype of the server offers, but for other names of the same."""
    choices = EngineOptions.__dataclass_fields__["kv_cache_dtype"].metadata["choices"]
    return [choice for choice in choices if choice not in ("auto", "fp8")]


def measured(
    cases: Cases, watch: Stopwatch, options: argparse.Namespace
) -> Iterator[tuple[Case, Timed]]:
    """A line on standard error for each: the whole takes minutes. The cases come back without
    their calls, so that the weights are let go before the next ones are made."""
    for case in cases.all(options.rows):
        if options.only is None or options.only in case.op:
            timed = watch.time(case.calls)
            line = f"{case.op} {case.kind} M={case.rows}: {timed.median_s * 1e6:.0f} us"
            print(line, file=sys.stderr)
            yield replace(case, calls=()), timed


def rates(case: Case, timed: Timed, ceilings: Ceilings) -> dict[str, Any]:
    """Of the median. `share_of_bandwidth` counts everything that the op must move."""
    g_per_s = case.operations / timed.median_s / 1e9
    moved_gb_per_s = case.moved_bytes / timed.median_s / 1e9
    return {
        "op": case.op,
        "kind": case.kind,
        "rows": case.rows,
        "shape": case.shape,
        "median_us": timed.median_s * 1e6,
        "best_us": timed.best_s * 1e6,
        "calls": timed.calls,
        "g_per_s": g_per_s,
        "weight_gb_per_s": case.weight_bytes / timed.median_s / 1e9,
        "share_of_bandwidth": moved_gb_per_s / ceilings.bandwidth_gb_per_s,
        "share_of_fp32_peak": g_per_s / ceilings.fp32_gflops,
        "share_of_integer_peak": share(g_per_s, ceilings.integer_g_per_s),
    }


def share(part: float, whole: float | None) -> float | None:
    return None if whole is None else part / whole


def show(title: str, rows: Sequence[dict[str, Any]], ceilings: Ceilings) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 140)
    columns = (
        "op",
        "weights",
        "M",
        "shape",
        "median",
        "best",
        "G/s",
        "GB/s",
        "of memory",
        "of fp32",
        "of int16",
    )
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(
            row["op"],
            row["kind"],
            f"{row['rows']}",
            row["shape"],
            f"{row['median_us']:.0f} us",
            f"{row['best_us']:.0f} us",
            f"{row['g_per_s']:.1f}",
            f"{row['weight_gb_per_s']:.1f}",
            f"{row['share_of_bandwidth']:.0%}",
            f"{row['share_of_fp32_peak']:.0%}",
            f"{row['share_of_integer_peak'] or 0:.0%}",
        )
    console.print(table)
    console.print(
        f"this machine reads {ceilings.read_gb_per_s:.1f} GB/s, copies "
        f"{ceilings.copy_gb_per_s:.1f} GB/s and multiplies at {ceilings.fp32_gflops:.0f} G/s in "
        "float32 (numpy's BLAS): the better of before and after"
    )
    console.print(
        f"16-bit integers at {ceilings.integer_g_per_s or 0:.0f} G/s, with nothing but the "
        "instruction that products with packed weights are made of"
    )


if __name__ == "__main__":
    sys.exit(main())
