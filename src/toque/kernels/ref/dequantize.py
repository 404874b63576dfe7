"""From packed weights to float32: every tensor kind of a GGUF file that toque reads, in numpy.

Follows the block layouts of ggml (https://github.com/ggml-org/ggml: docs/gguf.md, and the block
structs of ggml-common.h). A row of a matrix is a run of whole blocks; numbers are little-endian.
`d` is a block's scale and `m` its minimum, both float16.

Every product below is exact in float32: a float16 has 11 significant bits, sub-block scale and
quantized value together at most 12 (Q6_K: 7 and 5). What remains is one rounding (the minimum), so
a compiled twin gives the same bits in whatever order it multiplies.

    kind   values  bytes  layout                                            value
    Q4_0       32     18  d | 16 x nibbles                                  d * (q - 8)
    Q4_1       32     20  d | m | 16 x nibbles                              d * q + m
    Q5_0       32     22  d | 32 fifth bits | 16 x nibbles                  d * (q - 16)
    Q5_1       32     24  d | m | 32 fifth bits | 16 x nibbles              d * q + m
    Q8_0       32     34  d | 32 x int8                                     d * q
    Q4_K      256    144  d | dmin | 12 x scales | 128 x nibbles            d*sc * q - dmin*mn
    Q5_K      256    176  d | dmin | 12 x scales | 32 x bits | 128 x nib.   d*sc * q - dmin*mn
    Q6_K      256    210  128 x nibbles | 64 x bit pairs | 16 x int8 | d    d*sc * (q - 32)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toque.errors import ModelError

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Blocks = NDArray[Any]  # [blocks] of one of the structured dtypes below

# Temporaries of one slice stay small beside the result, also for an embedding of a gigabyte.
SLICE_BLOCKS = 1 << 15


def f32(block: Blocks) -> Floats:
    return block["x"].astype(np.float32)  # [blocks, 1]


def bf16(block: Blocks) -> Floats:
    """A bfloat16 is the upper half of a float32."""
    return (block["x"].astype(np.uint32) << 16).view(np.float32)  # [blocks, 1]


def nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes -> [..., 2, n]: first all low halves, then all high halves.

    byte i:  | value i + n | value i |
              7          4  3       0
    """
    return np.stack([packed & 15, packed >> 4], axis=-2)


def bits(packed: Bytes, count: int) -> Bytes:
    """[..., n] bytes -> [..., count, n]: plane j holds bit j of every byte."""
    shifts = np.arange(count, dtype=np.uint8)[:, None]  # [count, 1]
    return (packed[..., None, :] >> shifts) & np.uint8(1)


def q4(block: Blocks) -> Floats:
    """The sixteen bytes of nibbles of a 32-value block as [blocks, 32], 0..15."""
    return nibbles(block["q"]).reshape(len(block), 32).astype(np.float32)


def q5(block: Blocks) -> Floats:
    """Nibbles plus 16 times the fifth bit; bit i of the 32-bit word belongs to value i."""
    fifth = np.unpackbits(block["high"], axis=-1, bitorder="little")  # [blocks, 32]
    return q4(block) + np.float32(16) * fifth


def q4_0(block: Blocks) -> Floats:
    return scale(block, "d") * (q4(block) - 8)


def q4_1(block: Blocks) -> Floats:
    return scale(block, "d") * q4(block) + scale(block, "m")


def q5_0(block: Blocks) -> Floats:
    return scale(block, "d") * (q5(block) - 16)


def q5_1(block: Blocks) -> Floats:
    return scale(block, "d") * q5(block) + scale(block, "m")


def q8_0(block: Blocks) -> Floats:
    return scale(block, "d") * block["q"].astype(np.float32)


def scale(block: Blocks, field: str) -> Floats:
    return block[field].astype(np.float32)[:, None]  # [blocks, 1]


def six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The 8 scales and 8 minima (6 bits each) of a Q4_K or Q5_K block, from 12 bytes.

    byte 0..3    | scale 4..7, bits 5-4 | scale 0..3   |
    byte 4..7    | min   4..7, bits 5-4 | min   0..3   |
    byte 8..11   | min 4..7, bits 3-0 | scale 4..7, bits 3-0 |
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]  # [blocks, 4] each
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)  # [blocks, 8] each


def with_sub_blocks(block: Blocks, q: Bytes) -> Floats:
    """d * scale * q - dmin * minimum, for eight sub-blocks of 32: q is [blocks, 8, 32]."""
    scales, minima = six_bit_scales(block["scales"])  # [blocks, 8] each
    step = (scale(block, "d") * scales)[:, :, None]  # [blocks, 8, 1]
    offset = (scale(block, "dmin") * minima)[:, :, None]  # [blocks, 8, 1]
    return step * q.astype(np.float32) - offset


def q4_k(block: Blocks) -> Floats:
    """Bytes 32 j .. 32 j + 31: sub-block 2 j in the low halves, 2 j + 1 in the high ones."""
    q = nibbles(block["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return with_sub_blocks(block, q)


def q5_k(block: Blocks) -> Floats:
    """As Q4_K; bit j of high[i] is the fifth bit of value i of sub-block j."""
    q = nibbles(block["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return with_sub_blocks(block, q | (bits(block["high"], 8) << np.uint8(4)))


def q6_k(block: Blocks) -> Floats:
    """Two halves of 128 values; each half is four runs of 32.

    run 0 and 2: low and high halves of bytes 0..31 of the half's 64 bytes; run 1 and 3: of bytes
    32..63. The upper two bits of run r are bits 2 r and 2 r + 1 of the half's 32 `high` bytes.
    """
    low = nibbles(block["q"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]  # [4, 1]
    high = (block["high"].reshape(-1, 2, 1, 32) >> shifts) & 3  # [blocks, 2, 4, 32]
    q = (low | (high << 4)).astype(np.float32).reshape(-1, 16, 16) - 32  # [blocks, 16, 16]
    step = scale(block, "d") * block["scales"].astype(np.float32)  # [blocks, 16]
    return step[:, :, None] * q


@dataclass(frozen=True, slots=True)
class Kind:
    """One block's layout, how many values it holds, and how to unpack an array of them."""

    values: int
    layout: np.dtype[Any]
    unpack: Callable[[Blocks], Floats]


def kind(values: int, unpack: Callable[[Blocks], Floats], *fields: tuple[Any, ...]) -> Kind:
    return Kind(values, np.dtype(list(fields)), unpack)


D, M, DMIN = ("d", "<f2"), ("m", "<f2"), ("dmin", "<f2")
NIBBLES, SCALES = ("q", "u1", 16), ("scales", "u1", 12)

KINDS: dict[str, Kind] = {
    "F32": kind(1, f32, ("x", "<f4", 1)),
    "F16": kind(1, f32, ("x", "<f2", 1)),
    "BF16": kind(1, bf16, ("x", "<u2", 1)),
    "Q4_0": kind(32, q4_0, D, NIBBLES),
    "Q4_1": kind(32, q4_1, D, M, NIBBLES),
    "Q5_0": kind(32, q5_0, D, ("high", "u1", 4), NIBBLES),
    "Q5_1": kind(32, q5_1, D, M, ("high", "u1", 4), NIBBLES),
    "Q8_0": kind(32, q8_0, D, ("q", "i1", 32)),
    "Q4_K": kind(256, q4_k, D, DMIN, SCALES, ("q", "u1", 128)),
    "Q5_K": kind(256, q5_k, D, DMIN, SCALES, ("high", "u1", 32), ("q", "u1", 128)),
    "Q6_K": kind(256, q6_k, ("q", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), D),
}


def check_packed(name: str, data: Bytes, shape: tuple[int, ...]) -> Kind:
    """The kind called `name`; ModelError when it is unknown or `data` does not fit `shape`."""
    if name not in KINDS:
        raise ModelError(f"tensor kind {name} is not supported; known kinds: {', '.join(KINDS)}")
    kind = KINDS[name]
    if not shape or shape[-1] % kind.values:
        raise ModelError(f"rows of shape {shape} are no multiple of {name}'s {kind.values} values")
    expected_bytes = prod(shape) // kind.values * kind.layout.itemsize
    if data.nbytes != expected_bytes:
        raise ModelError(f"{name} {shape} needs {expected_bytes} bytes, found {data.nbytes}")
    return kind


def dequantize(name: str, data: Bytes, shape: tuple[int, ...]) -> Floats:
    """Unpack `data` (uint8 [bytes]) of the kind `name` to float32 of `shape`.

    Raises ModelError for an unknown kind, or a shape that `data` does not fit.
    """
    kind = check_packed(name, data, shape)
    blocks = np.ascontiguousarray(data).reshape(-1).view(kind.layout)  # [blocks]
    out = np.empty((len(blocks), kind.values), dtype=np.float32)
    for start in range(0, len(blocks), SLICE_BLOCKS):
        part = blocks[start : start + SLICE_BLOCKS]
        out[start : start + SLICE_BLOCKS] = kind.unpack(part).reshape(-1, kind.values)
    return out.reshape(shape)
