"""What this machine can do at best, measured now: copying memory, and multiplying matrices."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

COPY_BYTES = 128 << 20  # per thread: far beyond any cache
PEAK_SIZE = 1024  # rows, columns and depth of the matrix product


def copy_bandwidth(threads: int, rounds: int = 5) -> float:
    """GB/s, bytes read plus bytes written, best of `rounds`; all threads copy at once."""
    sources = [np.ones(COPY_BYTES // 8) for _ in range(threads)]
    targets = [np.empty_like(source) for source in sources]
    best_s = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds + 1):  # the first one touches the pages
            t0 = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            best_s = min(best_s, time.perf_counter() - t0)
    return 2 * COPY_BYTES * threads / best_s / 1e9


def arithmetic_peak(rounds: int = 5) -> float:
    """GFLOP/s of a large float32 product in numpy's BLAS, best of `rounds`: what is reachable."""
    x = np.ones((PEAK_SIZE, PEAK_SIZE), dtype=np.float32)
    best_s = np.inf
    for _ in range(rounds):
        t0 = time.perf_counter()
        x @ x
        best_s = min(best_s, time.perf_counter() - t0)
    return float(2 * PEAK_SIZE**3 / best_s / 1e9)


def read_bandwidth(threads: int, rounds: int = 5) -> float:
    """GB/s of reading alone (a dot product of an array with itself), best of `rounds`.

    Weights are read and never written: this is the ceiling of a step with one row.
    """
    sources = [np.ones(COPY_BYTES // 4, dtype=np.float32) for _ in range(threads)]
    best_s = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            t0 = time.perf_counter()
            list(pool.map(lambda source: source.dot(source), sources))
            best_s = min(best_s, time.perf_counter() - t0)
    return COPY_BYTES * threads / best_s / 1e9
