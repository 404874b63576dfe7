"""Unpacking of every GGUF kind: numpy against the gguf package, the compiled twin against numpy."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from tests.kernels.cases import packed_bytes
from toque.errors import ModelError
from toque.kernels import select
from toque.kernels.cpu import CpuOps
from toque.kernels.ref.dequantize import KINDS, SLICE_BLOCKS, dequantize
from toque.types import StoredTensor

ROWS = 9


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_equals_the_gguf_package(kind: str) -> None:
    data = packed_bytes(np.random.default_rng(1), kind, ROWS * 3)
    ours = dequantize(kind, data, (ROWS, 3 * KINDS[kind].values))
    theirs = gguf.quants.dequantize(data.reshape(ROWS, -1), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_has_the_bits_of_numpy(kind: str) -> None:
    """As a vector, and through the panels of a matrix, whose rows embed() gives back."""
    ops = select("cpu", 2)
    shape = (ROWS * 7, 3 * KINDS[kind].values)
    data = packed_bytes(np.random.default_rng(2), kind, ROWS * 7 * 3)
    expected = dequantize(kind, data, shape)
    flat = ops.vector(StoredTensor("w", kind, (expected.size,), data))
    rows = ops.embed(
        ops.matrix(StoredTensor("w", kind, shape, data)), np.arange(shape[0], dtype=np.int32)
    )
    assert flat.tobytes() == expected.tobytes()
    assert rows.tobytes() == expected.tobytes()


def test_slices_join_without_a_seam() -> None:
    blocks = SLICE_BLOCKS + 5
    data = packed_bytes(np.random.default_rng(3), "Q4_0", blocks)
    whole = dequantize("Q4_0", data, (blocks * 32,))
    tail = dequantize("Q4_0", data[-18 * 6 :], (6 * 32,))
    np.testing.assert_array_equal(whole[-6 * 32 :], tail)


@pytest.mark.parametrize("ops", ["ref", "cpu"])
def test_unknown_kind_and_wrong_size_are_named(ops: str) -> None:
    kernels = select(ops, 1)
    data = np.zeros(18, dtype=np.uint8)
    with pytest.raises(ModelError, match="IQ2_XXS"):
        kernels.matrix(StoredTensor("w", "IQ2_XXS", (1, 32), data))
    with pytest.raises(ModelError, match="needs 36 bytes, found 18"):
        kernels.matrix(StoredTensor("w", "Q4_0", (2, 32), data))
    with pytest.raises(ModelError, match="multiple"):
        kernels.matrix(StoredTensor("w", "Q4_0", (1, 33), data))


def test_extension_checks_sizes_itself() -> None:
    backend = CpuOps(1).backend
    with pytest.raises(ValueError, match="size"):
        backend.pack("Q4_0", np.zeros(17, dtype=np.uint8), 1, 32)
    with pytest.raises(ValueError, match="unknown"):
        backend.pack("Q9_9", np.zeros(18, dtype=np.uint8), 1, 32)
