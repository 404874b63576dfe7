"""Kernel sets behind one contract (`api.py`): `select()` returns the one that a start asks for.

The compiled set is imported only when it is asked for, so that `ref` works without it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from toque.errors import ConfigError
from toque.kernels.api import Ops

__all__ = ["cpu_model", "machine", "physical_cores", "select"]

CPU_FOLDER = Path("/sys/devices/system/cpu")
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def select(name: str, threads: int | None = None) -> Ops:
    """The kernel set `name`: auto (= cpu), cpu or ref. `threads`: None = the physical cores.

    Raises ConfigError for an unknown name, fewer than one thread, or cpu without its extension.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    if name == "ref":
        from toque.kernels.ref import RefOps

        return RefOps()
    if name not in ("auto", "cpu"):
        raise ConfigError(f"unknown kernels {name!r}: choose auto, cpu or ref")
    return compiled(threads or physical_cores())


def compiled(threads: int) -> Ops:
    try:
        from toque.kernels.cpu import CpuOps
    except ImportError as error:
        raise ConfigError(
            f"the compiled kernels cannot be loaded ({error}). Build them with `pip install .` in "
            "toque's checkout (needs g++ 11 or later), or start with --kernels ref (plain numpy)"
        ) from error
    return CpuOps(threads)


def physical_cores() -> int:
    """Cores this process may use: hyper-threads counted once, affinity and CPU quota heeded.

    Two threads on one core share its vector units, and threads beyond a container's quota are
    stopped for the rest of the period: both make matrix products slower, not faster.
    """
    cores = len({siblings(cpu) for cpu in usable_cpus()})
    return max(1, min(cores, quota_cpus(cores)))


def usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def siblings(cpu: int) -> str:
    """A text that is equal for the hyper-threads of one core; unknown topology: each its own."""
    try:
        return (CPU_FOLDER / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def quota_cpus(otherwise: int) -> int:
    """A cgroup's CPU limit, rounded down; `otherwise` where there is none."""
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
        return otherwise if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        return otherwise


def cpu_model() -> str:
    """The name that Linux gives; the architecture where it gives none (ARM)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> str:
    """What a measured speed depends on, apart from the program."""
    return f"{platform.node()}, {cpu_model()}, {len(usable_cpus())} cpus"
