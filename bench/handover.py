"""`python -m bench.handover`: how fast pages travel between two engine processes, and a prompt.

One process owns a KV pool with the page size of a real model (SmolLM2-135M in float16 unless told
otherwise) and serves it over each transport; this one reads it. Two figures for each:

- GB/s of `pull`, alone and with the checksum of every page, in batches as the importer pulls them,
  one thread;
- milliseconds per 1,000 tokens of a hand-over: for the engine that computed them, which makes the
  checksums, and for the one that takes them, from the order to fetch until they are in its prefix
  tree (threads, checksums, copies and all; nothing is computed meanwhile).
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from bench.machine import describe_machine
from toque.disagg.importer import BATCH_PAGES, Importer
from toque.disagg.names import page_names
from toque.disagg.order import Sharing
from toque.disagg.sharing import SharedEngine
from toque.disagg.transport import verified
from toque.memory.manager import CacheManager
from toque.types import Fetch, PageRef, PagesReady, Request, SamplingParams, Source

BLOCK = 16
FAR_S = 600.0


class Pool(msgspec.Struct, frozen=True):
    """What the other process is told to serve, on one line of its standard input."""

    secret: bytes
    transport: str
    layer_bytes: tuple[int, ...]
    pages: int


class Served(msgspec.Struct, frozen=True):
    """Its answer."""

    source: Source
    refs: tuple[PageRef, ...]
    reference_s: float  # for all of them


def prompt(pages: int) -> tuple[int, ...]:
    """Of so many full pages, and a token to compute."""
    return tuple((7 * place) % 32_000 for place in range(pages * BLOCK + 1))


def engine(pool: Pool, pages: int) -> SharedEngine:
    sharing = Sharing(secret=pool.secret, transport=pool.transport)
    return SharedEngine(sharing, pool.layer_bytes, pages, "bench")


def serve() -> None:
    """The process that has the pages, until its input ends."""
    pool = msgspec.json.decode(sys.stdin.buffer.readline(), type=Pool)
    here = engine(pool, pool.pages)
    random = np.random.default_rng(1)
    for layer in here.pool.layers:
        layer[:] = random.integers(0, 256, layer.shape, dtype=np.uint8)
    names = page_names(prompt(pool.pages), "", BLOCK)
    began_s = time.perf_counter()
    refs = tuple(here.pool.reference(page, name) for page, name in enumerate(names))
    took_s = time.perf_counter() - began_s
    sys.stdout.buffer.write(msgspec.json.encode(Served(here.source, refs, took_s)) + b"\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


def pull_s(reader: SharedEngine, served: Served, check: bool) -> float:
    """Every page once."""
    names = page_names(prompt(len(served.refs)), "", BLOCK)
    data = np.empty((BATCH_PAGES, served.source.page_bytes), dtype=np.uint8)
    peer = reader.connect(served.source)
    began_s = time.perf_counter()
    for begin in range(0, len(served.refs), BATCH_PAGES):
        refs = served.refs[begin : begin + BATCH_PAGES]
        rows = data[: len(refs)]
        peer.pull(refs, rows, time.monotonic() + FAR_S)
        assert not check or all(verified(refs, rows, names[begin : begin + BATCH_PAGES]))
    took_s = time.perf_counter() - began_s
    peer.close()
    return took_s


def handover_s(reader: SharedEngine, served: Served) -> float:
    """All pages as one prompt's, into an empty prefix tree."""
    pages = len(served.refs)
    cache = CacheManager(pages + 1, BLOCK, epochs=reader.pool.epochs)
    importer = Importer(cache, reader.pool, reader.connect)
    asked = Request(id="r", prompt=prompt(pages), sampling=SamplingParams(), arrived_s=0.0)
    began_s = time.perf_counter()
    importer.begin(Fetch(request=asked, source=served.source, patience_s=FAR_S))
    importer.poll()
    importer.ready(PagesReady(id="r", first=0, pages=served.refs, last=True))
    told = importer.poll()[1]
    while not told:
        time.sleep(0.0002)
        told = importer.poll()[1]
    took_s = time.perf_counter() - began_s
    importer.close()
    assert told[0].moved_pages == pages, told[0]
    return took_s


def measure(pool: Pool, rounds: int) -> dict[str, Any]:
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.handover", "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(pool) + b"\n")
        child.stdin.flush()
        served = msgspec.json.decode(child.stdout.readline(), type=Served)
        reader = engine(pool, pool.pages + 1)
        for layer in reader.pool.layers:
            layer[:] = 0  # its memory is there
        total_bytes = pool.pages * served.source.page_bytes
        thousands = pool.pages * BLOCK / 1000

        def best_and_median(taken_s: Sequence[float]) -> tuple[float, float]:
            return min(taken_s), statistics.median(taken_s)

        plain_s = best_and_median([pull_s(reader, served, False) for _ in range(rounds)])
        checked_s = best_and_median([pull_s(reader, served, True) for _ in range(rounds)])
        moved_s = best_and_median([handover_s(reader, served) for _ in range(rounds)])
    finally:
        child.stdin.close()
        child.wait(30)
    return {
        "transport": pool.transport,
        "page_bytes": served.source.page_bytes,
        "pages": pool.pages,
        "pull_gb_per_s": [round(total_bytes / s / 1e9, 2) for s in plain_s],
        "verified_gb_per_s": [round(total_bytes / s / 1e9, 2) for s in checked_s],
        "export_ms_per_1k": round(1e3 * served.reference_s / thousands, 2),
        "handover_ms_per_1k": [round(1e3 * s / thousands, 2) for s in moved_s],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--bytes", type=int, default=2, help="of a number in the cache")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=7)
    said = parser.parse_args()
    if said.serve:
        serve()
        return
    layer_bytes = 2 * said.kv_heads * said.head_dim * said.bytes * BLOCK
    print("best and median; GB/s of one thread, milliseconds per 1,000 tokens")
    for transport in ("shm", "tcp"):
        pool = Pool(
            secret=secrets.token_bytes(32),
            transport=transport,
            layer_bytes=(layer_bytes,) * said.layers,
            pages=said.tokens // BLOCK,
        )
        print(json.dumps(measure(pool, said.rounds)), flush=True)
    print(json.dumps(describe_machine()))


if __name__ == "__main__":
    main()
