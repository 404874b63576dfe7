"""Packed matrices as bytes: to a file and back (`kernels.api.Packing`).

Owns: nothing. Knows: the extension's matrices. Does not know: files, names of weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import numpy as np

from toque.kernels.api import Bytes, Matrix
from toque.kernels.cpu import _native
from toque.kernels.ref.dequantize import KINDS

SAMPLE_SHAPE = (19, 512)  # two panels, the second one filled up; whole blocks of every kind


class PanelPacking:
    def __init__(self, backend: _native.Backend) -> None:
        self._backend = backend

    @cached_property
    def layout(self) -> str:
        """A digest of the layout's number and of one small matrix of each kind as this build packs
        it: whatever changes the bytes, another instruction set's panels included, changes it, even
        if somebody forgets to raise the number."""
        digest = hashlib.sha256(f"{_native.LAYOUT} ".encode())
        rows, columns = SAMPLE_SHAPE
        for name in sorted(KINDS):
            size_bytes = rows * columns // KINDS[name].values * KINDS[name].layout.itemsize
            data = np.arange(size_bytes, dtype=np.uint32) * np.uint32(2654435761)  # spread bits
            matrix = self._backend.pack(
                name, (data >> np.uint32(24)).astype(np.uint8), *SAMPLE_SHAPE
            )
            digest.update(f"{name} {matrix.kind} ".encode())
            digest.update(matrix.packed.data)
        return f"cpu-{digest.hexdigest()[:16]}"

    def packed(self, matrix: Matrix) -> tuple[str, Bytes]:
        made = cast(_native.Matrix, matrix)
        return made.kind, made.packed

    def matrix_of(self, kind: str, packed: Bytes, shape: tuple[int, ...]) -> Matrix:
        out, in_ = shape
        return self._backend.matrix_of(kind, packed, out, in_)

    def checksums(self, data: Bytes, begins: Sequence[int], sizes: Sequence[int]) -> list[int]:
        as_longs = (np.array(numbers, dtype=np.int64) for numbers in (begins, sizes))
        return self._backend.checksums(data, *as_longs)
