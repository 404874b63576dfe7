"""Pages through shared memory: the pool itself is mapped by the engine that reads it.

Owns: the memory file of a pool (SharedPool), a mapping of another's (SharedPeer).
Knows: where things lie in the file. Does not know: trees, requests.

    file   | header | epochs, 8 bytes a page | layer 0 | layer 1 | ...     parts begin at 4096

The file has no name (memfd): it ends with the last process that maps it, whatever kills the others,
and a mapping stays readable when its owner is gone. A peer opens it through /proc, which the kernel
allows to the same user only. The header proves that it is the file that was meant: process ids and
file numbers are used again.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence

import numpy as np

from toque.disagg.transport import (
    Bytes,
    PoolView,
    TransferError,
    check_range,
    host_id,
)
from toque.types import PageFault, PageRef, Source

MAGIC = b"TOQUEKV1"
PART = 4096  # parts begin at multiples of it, bytes
SCHEME = "shm:"


def proof(engine: str, layer_bytes: Sequence[int], total_pages: int, secret: bytes) -> bytes:
    """The header: who made the file, for which pool, and that he knows the secret."""
    about = f"{engine}/{total_pages}/{','.join(map(str, layer_bytes))}".encode()
    return MAGIC + hashlib.blake2b(about, key=secret, digest_size=32).digest()


def _places(layer_bytes: Sequence[int], total_pages: int) -> tuple[list[int], int]:
    """Where epochs and layers begin, and the length of the file."""
    begins, at = [], PART
    for size in (8, *layer_bytes):
        begins.append(at)
        at += -(-size * total_pages // PART) * PART
    return begins, at


def _views(memory: mmap.mmap, layer_bytes: Sequence[int], total_pages: int) -> PoolView:
    (epochs_at, *layers_at), _ = _places(layer_bytes, total_pages)
    epochs = memoryview(memory)[epochs_at : epochs_at + 8 * total_pages].cast("q")
    layers = tuple(
        np.frombuffer(memory, np.uint8, size * total_pages, at).reshape(total_pages, size)
        for size, at in zip(layer_bytes, layers_at, strict=True)
    )
    return PoolView(layers, epochs)


class SharedPool:
    """A pool in a memory file of its own; pages cost nothing until they are written."""

    rejected = 0  # the kernel does that, and tells nobody

    def __init__(
        self, engine: str, layer_bytes: Sequence[int], total_pages: int, secret: bytes
    ) -> None:
        _, length = _places(layer_bytes, total_pages)
        self._file = os.memfd_create("toque-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._file, length)
        memory = mmap.mmap(self._file, length)
        header = proof(engine, layer_bytes, total_pages, secret)
        memory[: len(header)] = header
        self.view = _views(memory, layer_bytes, total_pages)

    @property
    def address(self) -> str:
        return f"{SCHEME}/proc/{os.getpid()}/fd/{self._file}?{host_id()}"

    def close(self) -> None:
        """Nobody can map it from now on; the mapping itself lives as long as its arrays."""
        os.close(self._file)


class SharedPeer:
    """Another engine's pool, mapped. Raises TransferError where it cannot be."""

    name = "shm"

    def __init__(self, address: str, source: Source, secret: bytes) -> None:
        path, _, host = address.removeprefix(SCHEME).partition("?")
        if host != host_id():
            raise TransferError("shared memory does not reach another host")
        layer_bytes, total_pages = source.layer_bytes, source.total_pages
        header = proof(source.engine, layer_bytes, total_pages, secret)
        _, length = _places(layer_bytes, total_pages)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"the pool cannot be mapped: {error.strerror}") from error
        try:
            if os.pread(file, len(header), 0) != header or os.fstat(file).st_size != length:
                raise TransferError("the memory found is not the pool that was meant")
            memory = mmap.mmap(file, length, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        self._pool = _views(memory, layer_bytes, total_pages)

    def pull(self, refs: Sequence[PageRef], out: Bytes, deadline_s: float) -> None:
        """Copies take microseconds and cannot hang: the deadline has no say here."""
        check_range(refs, self._pool.total_pages)
        for ref, row in zip(refs, out, strict=True):
            if self._pool.epochs[ref.page] != ref.epoch:
                raise TransferError(
                    f"page {ref.page} is used for something else by now", PageFault.STALE
                )
            self._pool.gather(ref.page, row)

    def fence(self) -> None:
        """Copies end with `pull`."""

    def close(self) -> None:
        """The mapping goes with the last array that shows it."""
