"""Drawn inputs that the kernel tests share: packed weights, and batches over scattered pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toque.kernels.api import KV_NUMBER_BYTES, Floats, ForwardBatch, LayerKV, PagedKV
from toque.kernels.ref import pages
from toque.kernels.ref.dequantize import KINDS
from toque.types import StoredTensor

Rng = np.random.Generator
KV_DTYPES = tuple(KV_NUMBER_BYTES)


def normal(rng: Rng, *shape: int) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def stored(array: Floats) -> StoredTensor:
    """A float32 array as a file would hold it."""
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return StoredTensor("drawn", "F32", array.shape, data)


def packed_bytes(rng: Rng, kind: str, blocks: int) -> NDArray[np.uint8]:
    """Random bytes of valid blocks: any quants and sub-scales, finite float16 scales."""
    layout = KINDS[kind].layout
    raw = rng.integers(0, 256, (blocks, layout.itemsize), dtype=np.uint8)
    view = raw.view(layout).reshape(-1)
    for field in ("d", "m", "dmin", "x"):
        if field in (layout.names or ()) and kind != "BF16":
            view[field] = rng.standard_normal(view[field].shape)
    if kind == "BF16":
        view["x"] = (normal(rng, blocks, 1).view(np.uint32) >> 16).astype(np.uint16)
    return raw.reshape(-1)


@dataclass(frozen=True)
class Case:
    """An attention problem and its pages. Places that no token may read hold NaN."""

    q: Floats  # [tokens, heads, dim]
    kv: LayerKV
    batch: ForwardBatch
    keys: list[Floats]  # per chunk: [context, kv_heads, dim], what the pages hold, as float32
    values: list[Floats]


def attention_case(
    rng: Rng,
    chunks: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
) -> Case:
    """`chunks` are (context tokens, new tokens); the new ones are the last of the context."""
    pages_of = [-(-context // block_size) for context, _ in chunks]
    spec = PagedKV(kv_heads, dim, dtype)
    kv = nan_pages(spec, sum(pages_of) + 3, block_size)
    free = rng.permutation(len(kv.pages)).astype(np.int32)
    table = np.zeros((len(chunks), max(pages_of)), dtype=np.int32)
    keys, values = [], []
    for c, (context, _) in enumerate(chunks):
        table[c, : pages_of[c]], free = free[: pages_of[c]], free[pages_of[c] :]
        place = np.arange(context)
        write_at = table[c, place // block_size].astype(np.int64) * block_size + place % block_size
        pages.write(kv, write_at, *(normal(rng, context, kv_heads, dim) for _ in range(2)))
        k, v = pages.read(kv, table[c, : pages_of[c]], context)  # [kv_heads, context, dim]
        keys.append(k.swapaxes(0, 1))
        values.append(v.swapaxes(0, 1))
    batch = forward_batch(chunks, table, block_size)
    q = normal(rng, len(batch.positions), kv_heads * group, dim)
    return Case(q, kv, batch, keys, values)


def nan_pages(spec: PagedKV, num_pages: int, block_size: int) -> LayerKV:
    """Whatever is read before it is written shows."""
    kv = pages.zero_pages(spec, num_pages, block_size)
    nothing = np.full((block_size, spec.head_dim), np.nan, dtype=np.float32)
    numbers, scales = pages.narrow(nothing, spec.dtype)
    view = pages.fields(kv)
    view["keys"], view["key_scales"] = numbers.T, scales.T
    view["values"], view["value_scales"] = numbers, scales
    return kv


def copy_of(kv: LayerKV) -> LayerKV:
    return replace(kv, pages=kv.pages.copy())


def kept(kv: LayerKV, write_at: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The keys and values at these places, as float32 [tokens, kv_heads, dim]."""
    page, offset = np.divmod(write_at, kv.block_size)
    at = pages.fields(kv)[page]  # [tokens, kv_heads]
    each = np.arange(len(page))
    keys = pages.widen(
        at["keys"][each, :, :, offset], at["key_scales"][each, :, :, offset], kv.spec.dtype
    )
    values = pages.widen(
        at["values"][each, :, offset], at["value_scales"][each, :, offset], kv.spec.dtype
    )
    return keys, values


def forward_batch(
    chunks: list[tuple[int, int]], table: NDArray[np.int32], block_size: int
) -> ForwardBatch:
    positions = [np.arange(context - new, context) for context, new in chunks]
    write_at = [
        table[c, p // block_size] * block_size + p % block_size for c, p in enumerate(positions)
    ]
    starts = np.cumsum([0, *(new for _, new in chunks)])
    return ForwardBatch(
        ids=np.zeros(starts[-1], dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        chunk_starts=starts.astype(np.int32),
        context_lens=np.array([context for context, _ in chunks], dtype=np.int32),
        page_table=table,
        write_at=np.concatenate(write_at).astype(np.int64),
        output_rows=np.zeros(0, dtype=np.int32),
    )


def part_of(batch: ForwardBatch, chunk: int, begin: int, end: int) -> ForwardBatch:
    """Tokens begin..end-1 of one chunk as a batch of their own."""
    tokens = slice(batch.chunk_starts[chunk] + begin, batch.chunk_starts[chunk] + end)
    return replace(
        batch,
        ids=batch.ids[tokens],
        positions=batch.positions[tokens],
        chunk_starts=np.array([0, end - begin], dtype=np.int32),
        context_lens=batch.positions[tokens][-1:] + np.int32(1),
        page_table=batch.page_table[chunk : chunk + 1],
        write_at=batch.write_at[tokens],
    )
