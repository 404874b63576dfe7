"""Measurements of several engines over several rounds, their medians, and the table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.processes import Memory
from bench.workloads import Workload


@dataclass(frozen=True, slots=True)
class Measurement:
    """One server's life. `result` is what bench.summary.summarize returns; CPU is the server's own
    over the workload, warm-up included; memory is after the last answer."""

    engine: str
    result: dict[str, Any]
    model_id: str
    ready_s: float
    first_token_s: float  # from the start of the process
    server_cpu_s: float
    memory: Memory


class Comparison:
    """The first engine is ours; the others are peers, of which the better one counts."""

    def __init__(self, engines: Sequence[str], workloads: Sequence[Workload]) -> None:
        self.engines = list(engines)
        self.workloads = list(workloads)
        self.measurements: list[tuple[str, Measurement]] = []

    def add(self, workload: Workload, measurement: Measurement) -> None:
        self.measurements.append((workload.name, measurement))

    @property
    def errors(self) -> int:
        return sum(int(one.result["errors"]) for _, one in self.measurements)

    def of(self, workload: Workload, engine: str) -> list[Measurement]:
        """One per round, in order."""
        return [
            one for name, one in self.measurements if name == workload.name and one.engine == engine
        ]

    def rates(self, workload: Workload, engine: str) -> list[float]:
        """Tokens per second of each round: prompt tokens where the workload is about them."""
        return [one.result[workload.headline] for one in self.of(workload, engine)]

    def best_peer(self, workload: Workload) -> str | None:
        """The peer of the highest median rate; None without peers."""
        if len(self.engines) < 2:
            return None
        return max(self.engines[1:], key=lambda e: statistics.median(self.rates(workload, e)))

    def ratios(self, workload: Workload) -> list[float]:
        """Our rate over the best peer's, round by round."""
        peer = self.best_peer(workload)
        if peer is None:
            return []
        pairs = zip(self.rates(workload, self.engines[0]), self.rates(workload, peer), strict=True)
        return [ours / theirs for ours, theirs in pairs if theirs]

    def ratio(self, workload: Workload) -> float | None:
        """Their median."""
        ratios = self.ratios(workload)
        return statistics.median(ratios) if ratios else None

    def medians(self) -> dict[str, Any]:
        """By workload: the ratio, each round's, the peer that counts, each engine's medians."""
        return {
            workload.name: {
                "rate": workload.headline,
                "ratio": self.ratio(workload),
                "ratios": self.ratios(workload),
                "best_peer": self.best_peer(workload),
                "engines": {name: self._medians(workload, name) for name in self.engines},
            }
            for workload in self.workloads
        }

    def _medians(self, workload: Workload, engine: str) -> dict[str, float | None]:
        lives = self.of(workload, engine)
        timed = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
        return {
            "tok_per_s": statistics.median(self.rates(workload, engine)),
            **{key: middle([life.result[key] for life in lives]) for key in timed},
            "first_token_s": middle([life.first_token_s for life in lives]),
            "server_cpu_s": middle([life.server_cpu_s for life in lives]),
            "rss_mb": middle([life.memory.rss_mb for life in lives]),
            "pss_mb": middle([life.memory.pss_mb for life in lives]),
            "errors": sum(life.result["errors"] for life in lives),
        }


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what was measured; None if nothing was."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def show(comparison: Comparison) -> None:
    """One row per workload and engine, on standard error."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 140)
    table = Table(
        "workload",
        "engine",
        "tok/s",
        "ours / theirs",
        "TTFT p50 / p99",
        "between tokens p50 / p99",
        "start to 1st token",
        "RSS / PSS",
        "errors",
    )
    for name, row in comparison.medians().items():
        for engine, cells in row["engines"].items():
            counted = row["ratio"] is not None and engine == row["best_peer"]
            table.add_row(
                name,
                engine,
                f"{cells['tok_per_s']:.1f}",
                f"{row['ratio']:.2f}x" if counted else "",
                _pair(cells["ttft_p50_ms"], cells["ttft_p99_ms"], "ms"),
                _pair(cells["itl_p50_ms"], cells["itl_p99_ms"], "ms"),
                f"{cells['first_token_s']:.2f} s",
                _pair(cells["rss_mb"], cells["pss_mb"], "MB"),
                f"{cells['errors']}",
            )
    console.print(table)
    if len(comparison.engines) < 2:
        console.print("only toque was measured: no peer was given (--peer or $LLAMA_SERVER)")
    console.print("tok/s: output tokens; prefill: prompt tokens. Medians over the rounds.")


def _pair(first: float | None, second: float | None, unit: str) -> str:
    if first is None or second is None:
        return "-"
    return f"{first:.0f} / {second:.0f} {unit}"
