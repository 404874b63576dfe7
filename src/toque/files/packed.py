"""One file of packed weights: written whole or not at all, believed only where checksums agree.

Owns: nothing. Knows: the format. Does not know: what the bytes mean, when a file is out of date.

    preamble | magic, 8 bytes | size of the header, u64 | sha256 of the header, 32 bytes |
    header   | JSON of `Header`: the key, and for each tensor kind, shape, place and XXH64 |
    tensors  | each on a multiple of 4096 bytes, so that it can be mapped and used where it lies |

The file is not synced to disk before it gets its name: what a power failure leaves of it fails a
check at the next start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from toque.errors import ModelError
from toque.files.mapping import Bytes, map_file

MAGIC = b"toqpack1"
PREAMBLE_BYTES = len(MAGIC) + 8 + 32
ALIGNMENT = 4096
MOST_HEADER_BYTES = 64 << 20

Checksums = Callable[[Bytes, Sequence[int], Sequence[int]], list[int]]  # data, begins, sizes


class Damaged(Exception):
    """The file is not what was written; the text says where."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides the bytes."""

    source: str  # hash of the model's files
    layout: str  # of the kernel set's packed bytes
    quantization: str  # what was done to unquantized weights before; "" = nothing
    recipe: int  # version of the code that says which weight is which tensor

    @property
    def name(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    size_bytes: int
    checksum: int


class Header(msgspec.Struct, frozen=True, kw_only=True):
    key: Key
    file_bytes: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    name: str
    kind: str
    shape: tuple[int, ...]
    data: Bytes  # [bytes]


def read_header(path: Path) -> Header:
    """Raises OSError, and Damaged for a file that is not whole."""
    with path.open("rb") as file:
        preamble = file.read(PREAMBLE_BYTES)
        if len(preamble) < PREAMBLE_BYTES or not preamble.startswith(MAGIC):
            raise Damaged("it does not begin as such a file does")
        size_bytes = int.from_bytes(preamble[8:16], "little")
        content = file.read(min(size_bytes, MOST_HEADER_BYTES))
        file_bytes = os.fstat(file.fileno()).st_size
    if hashlib.sha256(content).digest() != preamble[16:]:
        raise Damaged("its header fails its checksum")
    header = msgspec.json.decode(content, type=Header)
    if header.file_bytes != file_bytes:
        raise Damaged(f"it has {file_bytes} bytes instead of {header.file_bytes}")
    return header


def read_packed(path: Path, key: Key, checksums: Checksums) -> dict[str, PackedTensor]:
    """The tensors by name, mapped, every one of them checked: what is served was read then.

    Raises OSError, and Damaged for a file that is not whole or was made for another key.
    """
    header = read_header(path)
    if header.key != key:
        raise Damaged("it was made for another key")
    try:
        data = map_file(path)
    except ModelError as error:
        raise Damaged(str(error)) from error
    begins = [entry.begin for entry in header.entries]
    sizes = [entry.size_bytes for entry in header.entries]
    for entry, found in zip(header.entries, checksums(data, begins, sizes), strict=True):
        if found != entry.checksum:
            raise Damaged(f"the tensor {entry.name} fails its checksum")
    return {
        e.name: PackedTensor(e.name, e.kind, e.shape, data[e.begin : e.begin + e.size_bytes])
        for e in header.entries
    }


def file_bytes(tensors: Sequence[PackedTensor]) -> int:
    """About how long the file will be."""
    return sum(tensor.data.size + ALIGNMENT for tensor in tensors) + (1 << 20)


def write_packed(
    descriptor: int, key: Key, tensors: Sequence[PackedTensor], checksums: Checksums
) -> None:
    """Fill an empty file. Raises OSError."""
    header, preamble = _header(key, tensors, checksums)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(preamble)
        for entry, tensor in zip(header.entries, tensors, strict=True):
            file.seek(entry.begin)
            file.write(tensor.data.data)
        file.truncate(header.file_bytes)


def _header(
    key: Key, tensors: Sequence[PackedTensor], checksums: Checksums
) -> tuple[Header, bytes]:
    """The header and how it stands at the file's beginning. Places depend on its length, and its
    length on the digits of places: room is left, and filled with blanks."""
    sums = [checksums(tensor.data, [0], [tensor.data.size])[0] for tensor in tensors]
    draft = _encode(key, tensors, sums, 1 << 50)
    first = _aligned(PREAMBLE_BYTES + len(draft))
    header = msgspec.json.decode(_encode(key, tensors, sums, first), type=Header)
    content = msgspec.json.encode(header).ljust(len(draft))
    size = len(content).to_bytes(8, "little")
    return header, MAGIC + size + hashlib.sha256(content).digest() + content


def _encode(key: Key, tensors: Sequence[PackedTensor], sums: Sequence[int], first: int) -> bytes:
    begins = list(_places(tensors, first))
    entries = tuple(
        Entry(
            name=tensor.name,
            kind=tensor.kind,
            shape=tensor.shape,
            begin=begin,
            size_bytes=tensor.data.size,
            checksum=checksum,
        )
        for tensor, begin, checksum in zip(tensors, begins, sums, strict=False)
    )
    return msgspec.json.encode(Header(key=key, file_bytes=begins[-1], entries=entries))


def _places(tensors: Sequence[PackedTensor], first: int) -> Iterator[int]:
    """Where each tensor begins; at last the end of the file."""
    place = first
    for tensor in tensors:
        yield place
        place = _aligned(place + tensor.data.size)
    yield place


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def as_bytes(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Bytes:
    """The bytes of an array, not copied. [bytes]"""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
