"""A file as bytes that the system pages in on demand, and the tensor kinds that may lie in it.

Kinds carry GGUF's type names (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); a kind is
a block of elements that is stored together, along a tensor's last axis.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toque.errors import ModelError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Kind:
    """`elements` values are stored together in `size_bytes` bytes."""

    elements: int
    size_bytes: int


KINDS = {
    "F32": Kind(1, 4),
    "F16": Kind(1, 2),
    "BF16": Kind(1, 2),
    "Q4_0": Kind(32, 18),
    "Q4_1": Kind(32, 20),
    "Q5_0": Kind(32, 22),
    "Q5_1": Kind(32, 24),
    "Q8_0": Kind(32, 34),
    "Q4_K": Kind(256, 144),
    "Q5_K": Kind(256, 176),
    "Q6_K": Kind(256, 210),
}


def map_file(path: Path) -> Bytes:
    """The whole file, read-only. [file bytes]. Raises ModelError if it cannot be read or is empty.

    The mapping lives as long as any view of it. Cutting the file short while it is mapped kills
    the process (SIGBUS): whoever replaces a model file must rename a new one over it.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise ModelError(f"{path}: the file is empty") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    return np.frombuffer(mapped, dtype=np.uint8)


def stored_bytes(kind: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of a known kind. Raises ValueError if a row is not whole blocks."""
    block = KINDS[kind]
    row_elements = shape[-1] if shape else 1
    if row_elements % block.elements:
        raise ValueError(
            f"rows of {row_elements} elements are not whole {kind} blocks of {block.elements}"
        )
    size_bytes = row_elements // block.elements * block.size_bytes
    for extent in shape[:-1]:
        size_bytes *= extent
    return size_bytes


def read_json_object(path: Path, limit_bytes: int = 64 << 20) -> dict[str, Any]:
    """A JSON object from a file beside the weights. Raises ModelError naming file and fault."""
    import msgspec

    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise ModelError(f"{path}: larger than the {limit_bytes} bytes such a file may have")
        return msgspec.json.decode(content, type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: not a JSON object: {error}") from error
