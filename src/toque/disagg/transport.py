"""How bytes of pages get from one engine's pool into another's: the contract of every transport.

Owns: nothing. Knows: pages as rows of bytes, their epochs and checksums.
Does not know: tokens, trees, requests, which pages are worth moving.

A source is registered once and described in one line. A peer pulls: it names pages and the epochs
it means, gives a buffer that nobody else uses (a bounce buffer, never the pool) and a deadline,
and has either all of them or an error. Transports move bytes; whether these are the right ones is
decided by `verified`, for all transports alike, on the bytes that arrived and lie still.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from toque.errors import ToqueError
from toque.types import PageFault, PageRef

Bytes = NDArray[np.uint8]
CHECKSUM_BYTES = 16


class TransferError(ToqueError):
    """A pull did not bring its pages. The sentence says why; the caller computes them instead."""

    def __init__(self, message: str, fault: PageFault = PageFault.LOST) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class PoolView:
    """An engine's KV pool as other engines see it: for each layer [total_pages, layer bytes].

    `epochs` holds one 64-bit number per page, raised whenever the page is allocated anew.
    """

    layers: tuple[Bytes, ...]
    epochs: memoryview

    @property
    def page_bytes(self) -> int:
        """Of all layers together."""
        return sum(layer.shape[1] for layer in self.layers)

    @property
    def total_pages(self) -> int:
        return len(self.epochs)

    def gather(self, page: int, out: Bytes) -> None:
        """One page of all layers, one after the other: [page_bytes]."""
        begin = 0
        for layer in self.layers:
            end = begin + layer.shape[1]
            out[begin:end] = layer[page]
            begin = end

    def scatter(self, page: int, data: Bytes) -> None:
        """The way back."""
        begin = 0
        for layer in self.layers:
            end = begin + layer.shape[1]
            layer[page] = data[begin:end]
            begin = end

    def reference(self, page: int, name: bytes = b"") -> PageRef:
        """What a page holds now, for others to ask for, under the name of its tokens.
        O(page_bytes)."""
        data = np.empty(self.page_bytes, dtype=np.uint8)
        self.gather(page, data)
        return PageRef(page=page, epoch=int(self.epochs[page]), checksum=checksum(data, name))


def checksum(data: Bytes, name: bytes = b"") -> bytes:
    """Of the name of one page's tokens (names.py) and its bytes. SHA-256 (FIPS 180-4), cut: no two
    pages that differ in either will ever agree, and processors have instructions for it, which
    makes it twice as fast as BLAKE2b."""
    whole = hashlib.sha256(name)
    whole.update(data.data)
    return whole.digest()[:CHECKSUM_BYTES]


def verified(refs: Sequence[PageRef], data: Bytes, names: Sequence[bytes] = ()) -> list[bool]:
    """Which rows of `data`, [len(refs), page_bytes], are the pages that were meant, under the
    names that the reader has for them."""
    names = names or [b""] * len(refs)
    return [
        checksum(row, name) == ref.checksum
        for ref, row, name in zip(refs, data, names, strict=True)
    ]


class Peer(Protocol):
    """A pool elsewhere, to read from. One thread uses it at a time."""

    name: str  # of the transport, for metrics

    def pull(self, refs: Sequence[PageRef], out: Bytes, deadline_s: float) -> None:
        """Fill out[i], [page_bytes], with the page that refs[i] names. Blocks until it is done or
        `deadline_s` of time.monotonic() has come. Raises TransferError; `out` is then garbage."""

    def fence(self) -> None:
        """When this returns, no buffer of an earlier pull will be written to any more."""

    def close(self) -> None:
        """From any thread: a pull that blocks in another one ends with an error."""


class Listener(Protocol):
    """A pool of ours that peers may read."""

    rejected: int  # connections that did not know the secret or sent nonsense

    @property
    def address(self) -> str:
        """What a peer needs to find it."""

    def close(self) -> None: ...


def host_id() -> str:
    """Which start of which machine this is: shared memory does not reach further."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def check_range(refs: Sequence[PageRef], total_pages: int) -> None:
    """Raises TransferError for a page that the pool does not have."""
    for ref in refs:
        if not 0 <= ref.page < total_pages:
            raise TransferError(f"page {ref.page} is outside a pool of {total_pages}")
