"""The ops of the default model's layers (Qwen2.5-0.5B) as timed calls, over random weights.

Owns: nothing. Knows: shapes, what each op multiplies and reads. Does not know: clocks, ceilings.
Only the `Ops` contract is used, so that every kernel set is measured by the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.drawn import (
    BLOCK_SIZE,
    Rng,
    attention_case,
    fits,
    forward_batch,
    normal,
    stored_matrix,
)
from toque.kernels.api import QKV, Matrix, Ops, PagedKV, RopeTable

HIDDEN, INNER, VOCAB = 896, 4864, 151936
HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64
LOGIT_ROWS = 64  # a step never computes more logits than it has sequences
COLD_BYTES = 64 << 20  # copies of the weights in turn: more than a cache holds
MAX_COPIES = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One op on one shape. `calls` do the same work on different copies of the weights."""

    op: str
    kind: str  # of the weights, or of the KV pages
    rows: int  # M
    shape: str
    calls: Sequence[Callable[[], object]]
    operations: float  # multiplications and additions
    weight_bytes: int  # weights or KV that must be read: as the kernel set keeps them
    moved_bytes: int  # all that must be read or written


@dataclass(frozen=True, slots=True)
class Cases:
    """`kinds` overrides the default file's kinds of each weight (Q4_K_M)."""

    ops: Ops
    rng: Rng
    kinds: Sequence[str] | None
    kv_dtypes: Sequence[str]

    def all(self, rows: Sequence[int]) -> Iterator[Case]:
        """Weights are made once per shape and kind, and dropped before the next ones."""
        for kind in self._kinds_for(("Q5_0",), HIDDEN):
            yield from self.linear("attention out", kind, HIDDEN, HIDDEN, rows, add=True)
            yield from self.qkv(kind, rows)
            yield from self.gate_up(kind, rows)
        for kind in self._kinds_for(("Q4_K", "Q6_K"), INNER):
            yield from self.linear("ffn down", kind, HIDDEN, INNER, rows, add=True)
        for kind in self._kinds_for(("Q8_0",), HIDDEN):
            few = [m for m in rows if m <= LOGIT_ROWS]
            yield from self.linear("logits", kind, VOCAB, HIDDEN, few, add=False)
        for m in rows:
            yield self.norm(m)
        for dtype in self.kv_dtypes:
            yield self.attention("decode B16 L1k", dtype, [1024] * 16, 1)
            yield self.attention("chunk 512 of 1k", dtype, [1024], 512)

    def linear(
        self, op: str, kind: str, out: int, inner: int, rows: Sequence[int], *, add: bool
    ) -> Iterator[Case]:
        """`add`: into the residual stream, as the layers do it."""
        weights = self.copies(kind, out, inner)
        for m in rows:
            x, residual = normal(self.rng, m, inner), normal(self.rng, m, out)
            calls = [
                partial(self.ops.linear_add, x, weight, None, residual)
                if add
                else partial(self.ops.linear, x, weight)
                for weight in weights
            ]
            array_floats = m * (inner + out * (2 if add else 1))
            yield product(op, kind, m, f"{out}x{inner}", calls, weights[:1], array_floats)

    def gate_up(self, kind: str, rows: Sequence[int]) -> Iterator[Case]:
        gates, ups = (self.copies(kind, INNER, HIDDEN, share=2) for _ in range(2))
        for m in rows:
            x = normal(self.rng, m, HIDDEN)
            calls = [
                partial(self.ops.gate_up_silu, x, gate, up)
                for gate, up in zip(gates, ups, strict=True)
            ]
            shape, array_floats = f"2x{INNER}x{HIDDEN}", m * (HIDDEN + INNER)
            yield product("gate up silu", kind, m, shape, calls, [gates[0], ups[0]], array_floats)

    def qkv(self, kind: str, rows: Sequence[int]) -> Iterator[Case]:
        """Projections with biases, rotation, and the write into the pages; one chunk of m."""
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        weights = [self.copies(kind, size, HIDDEN, share=2) for size in sizes]
        sets = list(zip(*weights, strict=False))  # the smaller ones have more copies
        query_bias, key_bias, value_bias = (normal(self.rng, size) for size in sizes)
        layers = [
            QKV(
                query=query,
                key=key,
                value=value,
                query_bias=query_bias,
                key_bias=key_bias,
                value_bias=value_bias,
                query_norm=None,
                key_norm=None,
                norm_eps=1e-6,
                head_dim=HEAD_DIM,
            )
            for query, key, value in sets
        ]
        angles = normal(self.rng, max(rows), HEAD_DIM // 2)
        rope = RopeTable(np.cos(angles), np.sin(angles))
        for m in rows:
            x = normal(self.rng, m, HIDDEN)
            pages = np.arange(-(-m // BLOCK_SIZE), dtype=np.int32)[None, :]  # [1, pages]
            batch = forward_batch(pages, [m], m)
            spec = PagedKV(KV_HEADS, HEAD_DIM, self.kv_dtypes[0])
            (kv,) = self.ops.kv_pages([spec], pages.size, BLOCK_SIZE)
            calls = [
                partial(self.ops.qkv_rope_write, x, layer, rope, batch, kv) for layer in layers
            ]
            shape, array_floats = f"{sum(sizes)}x{HIDDEN}", m * (HIDDEN + sum(sizes))
            yield product("qkv rope write", kind, m, shape, calls, sets[0], array_floats)

    def norm(self, m: int) -> Case:
        x, weight = normal(self.rng, m, HIDDEN), normal(self.rng, HIDDEN)
        call = partial(self.ops.rms_norm, x, weight, 1e-6)
        moved_bytes = 2 * x.nbytes + weight.nbytes
        return Case(
            "rms norm", "F32", m, f"{HIDDEN}", [call], 4.0 * x.size, moved_bytes, moved_bytes
        )

    def attention(self, op: str, dtype: str, contexts: Sequence[int], new_tokens: int) -> Case:
        spec = PagedKV(KV_HEADS, HEAD_DIM, dtype)
        case = attention_case(self.rng, self.ops, spec, HEADS, contexts, new_tokens)
        call = partial(self.ops.attention, case.q, case.kv, case.batch, case.scale)
        visible = int(np.sum(case.batch.positions + 1))  # keys, over all tokens
        kv_bytes = sum(contexts) * spec.bytes_per_token()
        return Case(
            op=f"attention {op}",
            kind=dtype,
            rows=len(case.batch.positions),
            shape=f"{HEADS}/{KV_HEADS} heads d{HEAD_DIM}",
            calls=[call],
            operations=4.0 * HEADS * HEAD_DIM * visible,
            weight_bytes=kv_bytes,
            moved_bytes=kv_bytes + 2 * case.q.nbytes,
        )

    def copies(self, kind: str, out: int, inner: int, share: int = 1) -> list[Matrix]:
        """Equal matrices that lie apart, `COLD_BYTES / share` in all; at least one."""
        stored = stored_matrix(self.rng, kind, out, inner)
        first = self.ops.matrix(stored)
        count = min(MAX_COPIES, -(-COLD_BYTES // share // first.nbytes))
        return [first, *(self.ops.matrix(stored) for _ in range(count - 1))]

    def _kinds_for(self, usual: Sequence[str], columns: int) -> list[str]:
        return [kind for kind in self.kinds or usual if fits(kind, columns)]


def product(
    op: str,
    kind: str,
    m: int,
    shape: str,
    calls: Sequence[Callable[[], object]],
    weights: Sequence[Matrix],
    array_floats: int,
) -> Case:
    """A matrix product of m rows with all of `weights`."""
    elements = sum(weight.shape[0] * weight.shape[1] for weight in weights)
    weight_bytes = sum(weight.nbytes for weight in weights)
    moved_bytes = weight_bytes + 4 * array_floats
    return Case(op, kind, m, shape, calls, 2.0 * m * elements, weight_bytes, moved_bytes)
