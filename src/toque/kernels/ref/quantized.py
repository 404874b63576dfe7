"""The arithmetic of integer products in numpy: what `kernels/cpu` computes for packed weights.

The other oracle, `RefOps`, multiplies in float32 on dequantized weights: it says what is true. The
functions here say what compiled kernels should give, rounding included, for weights

    weight = scale * w + offset        w an integer, scale and offset the file's, per group of 32

and inputs that are rounded to 14-bit integers q, with a scale per row and group of 32. For each
group, in this order along the inputs and with fused multiply-adds:

    total = total + (scale * input scale) * sum(q * w)
    total = total + offset * (input scale * sum(q))

Integer sums are exact. Q6_K has two small integer scales in each group, which are part of w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toque.kernels.ref import dequantize as gguf
from toque.kernels.ref.dequantize import Blocks, check_packed
from toque.types import StoredTensor

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

GROUP = 32
LARGEST = np.float32(8191)  # 14 bits with the sign
SMALLEST = np.float32(2.0**-100)  # below it a group is zero


@dataclass(frozen=True, slots=True)
class Rounded:
    """Inputs as integers. `scale` is NaN, and q 0, for groups that are not all finite numbers."""

    q: Integers  # [rows, groups, GROUP]
    scale: Floats  # [rows, groups]


@dataclass(frozen=True, slots=True)
class Lines:
    """Weights as integers: offset is 0 where the kind has none."""

    w: Integers  # [out, groups, GROUP]
    scale: Floats  # [out, groups]
    offset: Floats  # [out, groups]
    has_offset: bool


def rounded(x: Floats) -> Rounded:
    """x [rows, in] to integers of at most LARGEST; halfway cases go to the even one."""
    groups = x.reshape(len(x), -1, GROUP)  # [rows, groups, GROUP]
    largest = np.abs(groups).max(axis=-1)  # [rows, groups]; NaN if there is one
    finite, zero = np.isfinite(largest), largest < SMALLEST
    usable = np.where(finite & ~zero, largest, np.float32(1))
    inverse = np.where(zero, np.float32(0), LARGEST / usable)
    scaled = np.where(finite[..., None], groups, np.float32(0)) * inverse[..., None]
    scale = np.where(zero, np.float32(0), usable / LARGEST)
    return Rounded(np.rint(scaled).astype(np.int64), np.where(finite, scale, np.float32(np.nan)))


def lines(tensor: StoredTensor) -> Lines:
    """A quantized [out, in] weight. Raises ModelError for a kind or size that do not fit."""
    kind = check_packed(tensor.kind, tensor.data, tensor.shape)
    out, inputs = tensor.shape
    blocks = np.ascontiguousarray(tensor.data).reshape(-1).view(kind.layout)  # [blocks]
    w, scale, offset = PARTS[tensor.kind](blocks)
    groups = (out, inputs // GROUP)
    return Lines(
        w.astype(np.int64).reshape(*groups, GROUP),
        scale.astype(np.float32).reshape(groups),
        np.broadcast_to(offset, scale.shape).astype(np.float32).reshape(groups),
        tensor.kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"),
    )


def linear(x: Floats, weight: Lines) -> Floats:
    """x [rows, in] @ weight.T, as the compiled kernels round it: [rows, out]."""
    inputs = rounded(x)
    sums = inputs.q.sum(axis=-1).astype(np.float32)  # [rows, groups], exact
    total = np.zeros((len(x), len(weight.w)), dtype=np.float32)
    for g in range(weight.w.shape[1]):
        product = (inputs.q[:, g] @ weight.w[:, g].T).astype(np.float32)  # [rows, out]
        factor = weight.scale[:, g] * inputs.scale[:, g, None]
        total = multiply_add(factor, product, total)
        if weight.has_offset:
            scaled_sum = (inputs.scale[:, g] * sums[:, g])[:, None]  # [rows, 1]
            total = multiply_add(weight.offset[:, g], scaled_sum, total)
    return total


def multiply_add(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once: the product of two float32 is exact in float64. (That the sum rounds
    twice, to float64 and then to float32, differs from a fused operation once in 2^29 cases.)"""
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(np.float32)


# Each gives w [..., 32], scale and offset of its groups.
Parts = tuple[Any, Any, Any]


def q4_k(block: Blocks) -> Parts:
    q = gguf.nibbles(block["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return q, *sub_block_lines(block)


def q5_k(block: Blocks) -> Parts:
    q = gguf.nibbles(block["q"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return q | (gguf.bits(block["high"], 8) << np.uint8(4)), *sub_block_lines(block)


def sub_block_lines(block: Blocks) -> tuple[Floats, Floats]:
    scales, minima = gguf.six_bit_scales(block["scales"])  # [blocks, 8] each
    return gguf.scale(block, "d") * scales, -(gguf.scale(block, "dmin") * minima)


def q6_k(block: Blocks) -> Parts:
    """Values over d are integers: small scale times quantized value."""
    unit = block.copy()
    unit["d"] = 1
    w = gguf.q6_k(unit).reshape(-1, 8, 32)
    return w, np.repeat(gguf.scale(block, "d"), 8, axis=-1), np.float32(0)


PARTS = {
    "Q4_0": lambda b: (gguf.q4(b) - 8, gguf.scale(b, "d"), np.float32(0)),
    "Q4_1": lambda b: (gguf.q4(b), gguf.scale(b, "d"), gguf.scale(b, "m")),
    "Q5_0": lambda b: (gguf.q5(b) - 16, gguf.scale(b, "d"), np.float32(0)),
    "Q5_1": lambda b: (gguf.q5(b), gguf.scale(b, "d"), gguf.scale(b, "m")),
    "Q8_0": lambda b: (b["q"], gguf.scale(b, "d"), np.float32(0)),
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
