"""Pages of keys and values as numpy sees them: the layout that `LayerKV` draws, and its numbers.

Owns: nothing. Knows: where each number lies, and how floats become numbers and back. Does not know:
sequences, attention. Both kernel sets allocate here; the compiled one reads and writes in C++
(csrc/pages.h, csrc/kv_numbers.h), rounding alike.

E4M3 is that of "OCP 8-bit Floating Point Specification" (2023), which has no infinities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toque.kernels.api import KV_SCALE_GROUP, Floats, Ints, LayerKV, PagedKV

STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "i1", "fp8_e4m3": "u1"}
ALIGNMENT = 64  # a cache line
LARGEST_E4M3 = np.float32(448)
SMALLEST_GROUP = np.float32(2.0**-100)  # a group below it is zero


def zero_pages(spec: PagedKV, num_pages: int, block_size: int) -> LayerKV:
    """np.zeros asks the kernel for zero pages, which cost no memory until they are written."""
    page_bytes = block_size * spec.bytes_per_token()
    raw = np.zeros(num_pages * page_bytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    pages = raw[start : start + num_pages * page_bytes].reshape(num_pages, page_bytes)
    return LayerKV(pages, spec, block_size)


def fields(kv: LayerKV) -> NDArray[Any]:
    """The pages as records [pages, kv_heads] with the fields keys [head_dim, block_size],
    key_scales [groups, block_size], values [block_size, head_dim], value_scales
    [block_size, groups]: views that may be written to."""
    number, dim, size = STORED[kv.spec.dtype], kv.spec.head_dim, kv.block_size
    record = np.dtype(
        [
            ("keys", number, (dim, size)),
            ("key_scales", "<u2", (kv.spec.groups, size)),
            ("values", number, (size, dim)),
            ("value_scales", "<u2", (size, kv.spec.groups)),
        ]
    )
    return kv.pages.view(record)  # [pages, kv_heads]


def write(kv: LayerKV, write_at: NDArray[np.int64], keys: Floats, values: Floats) -> None:
    """keys and values [tokens, kv_heads, head_dim] into the tokens' places (page * block_size +
    offset)."""
    page, offset = np.divmod(write_at, kv.block_size)  # [tokens] each
    to = fields(kv)
    for name, vectors in (("keys", keys), ("values", values)):
        numbers, scales = narrow(vectors, kv.spec.dtype)
        across = name == "keys"
        scale_field = to["key_scales" if across else "value_scales"]
        if across:
            to[name][page, :, :, offset] = numbers
            scale_field[page, :, :, offset] = scales
        else:
            to[name][page, :, offset] = numbers
            scale_field[page, :, offset] = scales


def read(kv: LayerKV, ids: Ints, context_tokens: int) -> tuple[Floats, Floats]:
    """Keys and values of the first `context_tokens` tokens of the listed pages, in order, each
    [kv_heads, context, head_dim]."""
    picked = fields(kv)[ids]  # [pages, kv_heads]
    order = (1, 0, 2, 3)  # heads first
    keys = widen(
        picked["keys"].swapaxes(2, 3), picked["key_scales"].swapaxes(2, 3), kv.spec.dtype
    ).transpose(order)  # [kv_heads, pages, block_size, head_dim]
    values = widen(picked["values"], picked["value_scales"], kv.spec.dtype).transpose(order)
    flat = (kv.spec.kv_heads, -1, kv.spec.head_dim)
    return keys.reshape(flat)[:, :context_tokens], values.reshape(flat)[:, :context_tokens]


def narrow(x: Floats, dtype: str) -> tuple[NDArray[Any], NDArray[np.uint16]]:
    """Vectors [..., head_dim] as a page's numbers [..., head_dim] and scales [..., groups]."""
    none = np.zeros((*x.shape[:-1], 0), dtype=np.uint16)
    if dtype == "int8":
        return to_int8(x)
    if dtype == "bfloat16":
        return to_bfloat16(x), none
    if dtype == "fp8_e4m3":
        return to_e4m3(x), none
    with np.errstate(over="ignore"):
        return x.astype(STORED[dtype]), none


def widen(numbers: NDArray[Any], scales: NDArray[np.uint16], dtype: str) -> Floats:
    """The inverse of `narrow`, as float32."""
    if dtype == "int8":
        dim = numbers.shape[-1]
        each = np.repeat(from_bfloat16(scales), KV_SCALE_GROUP, axis=-1)[..., :dim]
        return numbers.astype(np.float32) * each
    if dtype == "bfloat16":
        return from_bfloat16(numbers)
    if dtype == "fp8_e4m3":
        values: Floats = E4M3_VALUES[numbers]
        return values
    return numbers.astype(np.float32)


def to_bfloat16(x: Floats) -> NDArray[np.uint16]:
    """To the nearest, ties to the even one; NaN stays one."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)
    whole = np.where(np.isnan(x), bits | 0x400000, rounded).astype(np.uint64)
    return (whole >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _e4m3_values() -> Floats:
    """What each of the 256 codes means."""
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    positive = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0)
    )
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def to_e4m3(x: Floats) -> NDArray[np.uint8]:
    """To the nearest code, ties to the even one; beyond 448 to 448; NaN for what is not finite: a
    model that overflows must fail, not go on."""
    finite = np.isfinite(x)
    size = np.minimum(np.where(finite, np.abs(x), np.float32(0)), LARGEST_E4M3)
    # The numbers are multiples of a step: 2^-9 below 2^-6, an eighth of the power of two above.
    exponent = np.frexp(np.maximum(size, np.float32(2.0**-6)))[1]  # size < 2^exponent
    step = np.ldexp(np.float32(1), exponent - 4)
    rounded = np.rint(size / step) * step  # exact in float32
    code = np.where(finite, np.searchsorted(E4M3_VALUES[:127], rounded), 127)
    sign = np.where(np.signbit(x), 128, 0)
    codes: NDArray[np.uint8] = (code | sign).astype(np.uint8)
    return codes


def to_int8(x: Floats) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Integers of -127..127 and, for each group, the scale: a 127th of its largest number, rounded
    up to a bfloat16. A group that is not all finite numbers has the scale NaN."""
    dim = x.shape[-1]
    groups = -(-dim // KV_SCALE_GROUP)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, groups * KV_SCALE_GROUP - dim)]
    grouped = np.pad(x, padding).reshape(*x.shape[:-1], groups, KV_SCALE_GROUP)
    largest = np.abs(grouped).max(axis=-1)  # [..., groups]
    finite, zero = np.isfinite(largest), largest < SMALLEST_GROUP
    usable = np.where(finite & ~zero, largest, np.float32(1))
    step = (usable / np.float32(127)).view(np.uint32)
    scales = (step + np.uint32(0xFFFF) >> np.uint32(16)).astype(np.uint16)
    inverse = np.where(finite & ~zero, np.float32(1) / from_bfloat16(scales), np.float32(0))
    clean = np.where(finite[..., None], grouped, np.float32(0))
    numbers = np.rint(clean * inverse[..., None]).astype(np.int8)
    scales = np.where(finite, np.where(zero, 0, scales), 0x7FC0).astype(np.uint16)
    return numbers.reshape(*x.shape[:-1], -1)[..., :dim], scales
