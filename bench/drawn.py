"""Random weights and attention problems for timing: valid, finite, of realistic size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toque.kernels.api import QKV, Floats, ForwardBatch, LayerKV, Ops, PagedKV, RopeTable
from toque.kernels.ref.dequantize import KINDS
from toque.types import StoredTensor

Rng = np.random.Generator
BLOCK_SIZE = 16  # tokens per page: the engine's default


def normal(rng: Rng, *shape: int) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def fits(kind: str, columns: int) -> bool:
    """Whether a row of so many values is whole blocks of this kind."""
    return columns % KINDS[kind].values == 0


def stored_matrix(rng: Rng, kind: str, rows: int, columns: int) -> StoredTensor:
    """[rows, columns] of random blocks; scales of about 0.01 keep products near 1."""
    layout = KINDS[kind].layout
    blocks = rows * columns // KINDS[kind].values
    raw = rng.integers(0, 256, (blocks, layout.itemsize), dtype=np.uint8)
    view = raw.view(layout).reshape(-1)
    for name in {"d", "m", "dmin", "x"} & set(layout.names or ()):
        drawn = 0.01 * rng.standard_normal(view[name].shape, dtype=np.float32)
        # A bfloat16, stored as uint16, is the upper half of a float32.
        view[name] = drawn.view(np.uint32) >> 16 if kind == "BF16" else drawn
    return StoredTensor("drawn", kind, (rows, columns), raw.reshape(-1))


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Queries over random pages that are scattered in the pool."""

    q: Floats  # [tokens, heads, dim]
    kv: LayerKV
    batch: ForwardBatch
    scale: float


def attention_case(
    rng: Rng, ops: Ops, spec: PagedKV, heads: int, contexts: Sequence[int], new_tokens: int
) -> AttentionCase:
    """One chunk per entry of `contexts`: its last `new_tokens` tokens ask.

    The kernel set itself writes the pages, from random projections: only it knows how it keeps
    keys and values of `spec.dtype`.
    """
    pages = [-(-context // BLOCK_SIZE) for context in contexts]
    (kv,) = ops.kv_pages([spec], sum(pages), BLOCK_SIZE)
    table = np.zeros((len(contexts), max(pages)), dtype=np.int32)
    order = rng.permutation(sum(pages)).astype(np.int32)
    for row, (start, count) in enumerate(zip(np.cumsum([0, *pages]), pages, strict=False)):
        table[row, :count] = order[start : start + count]
    layer, rope = random_layer(rng, ops, spec, heads, max(contexts))
    for row, context in enumerate(contexts):
        batch = forward_batch(table[row : row + 1], [context], context)
        x = normal(rng, context, layer.query.shape[1])
        ops.qkv_rope_write(x, layer, rope, batch, kv)
    batch = forward_batch(table, contexts, new_tokens)
    q = normal(rng, len(batch.positions), heads, spec.head_dim)
    return AttentionCase(q, kv, batch, spec.head_dim**-0.5)


def random_layer(
    rng: Rng, ops: Ops, spec: PagedKV, heads: int, positions: int, hidden: int = 64
) -> tuple[QKV, RopeTable]:
    """The input side of an attention layer without biases and norms."""
    query, key, value = (
        ops.matrix(stored_matrix(rng, "F32", count * spec.head_dim, hidden))
        for count in (heads, spec.kv_heads, spec.kv_heads)
    )
    angles = normal(rng, positions, spec.head_dim // 2)
    nothing = (None, None, None, None, None)  # three biases, two norms
    return QKV(query, key, value, *nothing, 1e-6, spec.head_dim), RopeTable(
        np.cos(angles), np.sin(angles)
    )


def forward_batch(
    page_table: np.ndarray[tuple[int, int], np.dtype[np.int32]],
    contexts: Sequence[int],
    new_tokens: int,
) -> ForwardBatch:
    """The last `new_tokens` tokens of each context, one chunk each; all are outputs."""
    positions = np.concatenate(
        [np.arange(context - new_tokens, context, dtype=np.int32) for context in contexts]
    )
    chunk = np.repeat(np.arange(len(contexts)), new_tokens)  # [tokens]
    page = page_table[chunk, positions // BLOCK_SIZE].astype(np.int64)  # [tokens]
    return ForwardBatch(
        ids=np.zeros(len(positions), dtype=np.int32),
        positions=positions,
        chunk_starts=np.arange(0, len(positions) + 1, new_tokens, dtype=np.int32),
        context_lens=np.asarray(contexts, dtype=np.int32),
        page_table=page_table,
        write_at=page * BLOCK_SIZE + positions % BLOCK_SIZE,
        output_rows=np.arange(len(positions), dtype=np.int32),
    )
