"""`--quantization`: the matrices of an unquantized model, rounded to GGUF's simplest blocks.

Owns: nothing. Knows: the blocks Q8_0 and Q4_1 of 32 values, and how to round to them.
Does not know: kernels; what comes out is a tensor like one from a file.

int8 is Q8_0: 32 integers of -127..127 and a float16 scale. int4 is Q4_1: 32 integers of 0..15, a
float16 scale and a float16 minimum; embedding and head stay at int8, where the error of four bits
would reach every logit directly. Formats: https://github.com/ggml-org/ggml (ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from toque.errors import ConfigError, ModelError
from toque.files.mapping import KINDS, Bytes
from toque.kernels.api import Floats, Matrix, WeightSource
from toque.types import StoredTensor

GROUP = 32
SLICE_VALUES = 1 << 20  # rounded at a time: temporary arrays stay in the cache
UNQUANTIZED = ("F32", "F16", "BF16")
LARGEST_HALF = 65504.0
Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", (GROUP,))])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (GROUP // 2,))])


class QuantizedWeights:
    """A WeightSource that rounds matrices on their way to another one; vectors pass as they are."""

    def __init__(self, packer: WeightSource, quantization: str, keep_int8: Collection[str]) -> None:
        """`keep_int8`: the tensors that int4 leaves at eight bits."""
        self._packer = packer
        self._quantization = quantization
        self._keep_int8 = frozenset(keep_int8)

    def matrix(self, tensor: StoredTensor) -> Matrix:
        four = self._quantization == "int4" and tensor.name not in self._keep_int8
        return self._packer.matrix(quantize(tensor, "Q4_1" if four else "Q8_0"))

    def vector(self, tensor: StoredTensor) -> Floats:
        return self._packer.vector(tensor)


def refuse_quantized(tensors: Collection[StoredTensor], quantization: str, source: str) -> None:
    """Raises ConfigError for a model whose matrices are quantized already."""
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.kind not in UNQUANTIZED:
            raise ConfigError(
                f"--quantization {quantization} is for unquantized models: {tensor.name} of "
                f"{source} is {tensor.kind} already; start without it"
            )


def quantize(tensor: StoredTensor, kind: str) -> StoredTensor:
    """An unquantized [out, in] tensor as Q8_0 or Q4_1.

    Raises ModelError for rows that are not whole groups, and for weights that are no numbers or
    beyond what a float16 scale reaches.
    """
    if tensor.shape[-1] % GROUP:
        raise ModelError(
            f"--quantization: rows of {tensor.shape[-1]} weights ({tensor.name}) are not whole "
            f"groups of {GROUP}; start without it"
        )
    data, rounded = tensor.data, {"Q8_0": q8_0, "Q4_1": q4_1}[kind]
    slice_bytes = SLICE_VALUES * KINDS[tensor.kind].size_bytes
    pieces = [
        rounded(as_floats(data[at : at + slice_bytes], tensor.kind).reshape(-1, GROUP), tensor.name)
        for at in range(0, data.size, slice_bytes)
    ]
    return StoredTensor(tensor.name, kind, tensor.shape, np.concatenate(pieces))


def as_floats(data: Bytes, kind: str) -> Floats:
    """[bytes] -> float32 [values]."""
    if kind == "BF16":
        return (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.view("<f4" if kind == "F32" else "<f2").astype(np.float32)


def q8_0(groups: Floats, name: str) -> Bytes:  # groups: [groups, GROUP]
    """The scale takes the largest magnitude to 127, as it is stored: in float16."""
    largest = np.abs(groups).max(axis=1)  # [groups]
    blocks = np.empty(len(groups), dtype=Q8_0)
    blocks["d"] = _halves(largest / np.float32(127), name)
    blocks["q"] = np.clip(np.rint(groups * _inverse(blocks["d"])), -127, 127)
    return blocks.view(np.uint8)


def q4_1(groups: Floats, name: str) -> Bytes:  # groups: [groups, GROUP]
    """Minimum and scale span the group, as they are stored. Value i stands in the low nibble of
    byte i, value i + 16 in the high one."""
    low, high = groups.min(axis=1), groups.max(axis=1)  # [groups]
    blocks = np.empty(len(groups), dtype=Q4_1)
    blocks["m"] = _halves(low, name)
    start = blocks["m"].astype(np.float32)
    blocks["d"] = _halves((high - start) / np.float32(15), name)
    steps = (groups - start[:, None]) * _inverse(blocks["d"])
    q = np.clip(np.rint(steps), 0, 15).astype(np.uint8)  # [groups, GROUP]
    blocks["q"] = q[:, : GROUP // 2] | q[:, GROUP // 2 :] << np.uint8(4)
    return blocks.view(np.uint8)


def _halves(values: Floats, name: str) -> NDArray[np.float16]:
    if not (np.abs(values) <= LARGEST_HALF).all():  # NaN compares false
        raise ModelError(
            f"--quantization: {name} holds weights that are not numbers, or beyond float16"
        )
    return values.astype(np.float16)


def _inverse(scales: NDArray[np.float16]) -> Floats:  # [groups] -> [groups, 1]
    wide = scales.astype(np.float32)
    usable = np.where(wide == 0, np.float32(1), wide)
    return np.where(wide == 0, np.float32(0), 1 / usable)[:, None]
