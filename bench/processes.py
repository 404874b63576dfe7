"""What a process and its children take: memory and CPU time, from Linux's /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """Sums over the processes of a server, MB (1e6 bytes).

    `rss`: resident, pages that two processes share counted in each. `pss`: those divided among
    their users. `anonymous`: without the files that are mapped, whose pages the kernel may drop.
    """

    rss_mb: float
    pss_mb: float
    anonymous_mb: float


def tree(pid: int) -> list[int]:
    """A process and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for member in found:  # grows while it is walked
        found.extend(children.get(member, []))
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            fields = _stat(int(folder.name))
            if fields:
                yield int(folder.name), int(fields[1])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        # The name in parentheses may itself hold spaces and parentheses.
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_seconds(pid: int) -> float:
    """User and system time of a process tree."""
    ticks = sum(int(f[11]) + int(f[12]) for f in map(_stat, tree(pid)) if f)
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> Memory:
    """Of a process tree, now."""
    sums = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    for member in tree(pid):
        for key, kilobytes in _rollup(member):
            if key in sums:
                sums[key] += kilobytes
    return Memory(*(sums[key] * 1024 / 1e6 for key in ("Rss", "Pss", "Anonymous")))


def _rollup(pid: int) -> Iterator[tuple[str, int]]:
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return
    for line in lines[1:]:
        key, _, value = line.partition(":")
        yield key, int(value.split()[0])
