"""Every op of `kernels/api.py` in plain numpy, on dequantized float32 weights.

Owns: nothing. Knows: the formulas. Does not know: speed; nor bit-exactness over batch sizes, which
only the `cpu` set promises (numpy's matmul rounds a row differently beside other rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from toque.kernels.api import (
    QKV,
    Decode,
    Floats,
    ForwardBatch,
    Ints,
    LayerKV,
    Matrix,
    Ops,
    Packing,
    PagedKV,
    RopeTable,
    RotatedBias,
    Sampler,
)
from toque.kernels.ref import pages
from toque.kernels.ref.dequantize import dequantize
from toque.kernels.ref.sampler import RefSampler
from toque.types import Sampled, StoredTensor


class RefOps:
    """The oracle. Its matrices are float32 arrays [out, in]."""

    name = "ref"
    packing: Packing | None = None

    def matrix(self, tensor: StoredTensor) -> Matrix:
        return dequantize(tensor.kind, tensor.data, tensor.shape)  # [out, in]

    def vector(self, tensor: StoredTensor) -> Floats:
        return dequantize(tensor.kind, tensor.data, tensor.shape)  # [n]

    def kv_pages(self, specs: Sequence[PagedKV], num_pages: int, block_size: int) -> list[LayerKV]:
        return [pages.zero_pages(spec, num_pages, block_size) for spec in specs]

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        rows: Floats = array(table)[ids]  # [tokens, hidden]
        return rows

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)  # [rows, 1]
        out: Floats = x / np.sqrt(mean_square + np.float32(eps)) * weight
        return out

    def linear(self, x: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
        out = cast(Floats, x @ array(weight).T)  # [rows, out]
        return out if bias is None else out + bias

    def linear_add(
        self, x: Floats, weight: Matrix, bias: Floats | None, residual: Floats
    ) -> Floats:
        return residual + self.linear(x, weight, bias)

    def gate_up_silu(
        self,
        x: Floats,
        gate: Matrix,
        up: Matrix,
        gate_bias: Floats | None = None,
        up_bias: Floats | None = None,
    ) -> Floats:
        return silu(self.linear(x, gate, gate_bias)) * self.linear(x, up, up_bias)

    def qkv_rope_write(
        self, x: Floats, qkv: QKV, rope: RopeTable, batch: ForwardBatch, kv: LayerKV
    ) -> Floats:
        heads = (len(x), -1, qkv.head_dim)
        query = self.linear(x, qkv.query, qkv.query_bias).reshape(heads)  # [tokens, heads, dim]
        key_bias = None if qkv.bias_left_out(kv.spec) is not None else qkv.key_bias
        key = self.linear(x, qkv.key, key_bias).reshape(heads)  # [tokens, kv_heads, dim]
        value = self.linear(x, qkv.value, qkv.value_bias).reshape(heads)
        if qkv.query_norm is not None:
            query = self.rms_norm(query, qkv.query_norm, qkv.norm_eps)
        if qkv.key_norm is not None:
            key = self.rms_norm(key, qkv.key_norm, qkv.norm_eps)
        pages.write(kv, batch.write_at, rotate(key, rope, batch.positions), value)
        return rotate(query, rope, batch.positions)

    def attention(
        self,
        q: Floats,
        kv: LayerKV,
        batch: ForwardBatch,
        scale: float,
        left_out: RotatedBias | None = None,
    ) -> Floats:
        out = np.empty_like(q)  # [tokens, heads, dim]
        for chunk, context_tokens in enumerate(batch.context_lens):
            tokens = slice(batch.chunk_starts[chunk], batch.chunk_starts[chunk + 1])
            ids = batch.page_table[chunk, : -(-context_tokens // kv.block_size)]
            keys, values = pages.read(kv, ids, context_tokens)  # [kv_heads, context, dim] each
            if left_out is not None:
                keys = keys + rotated_bias(left_out, kv.spec, context_tokens)
            out[tokens] = attend(q[tokens], keys, values, batch.positions[tokens], scale)
        return out.reshape(len(q), -1)

    def output_rows(self, x: Floats, batch: ForwardBatch) -> Floats:
        rows: Floats = x[batch.output_rows]  # [outputs, n]
        return rows

    def sampler(self, num_rows: int) -> RefSampler:
        return RefSampler(num_rows)

    def record(self, trace: Callable[[Ops, ForwardBatch], Floats]) -> Unrecorded:
        return Unrecorded(self, trace)


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """Every op called anew for each batch."""

    ops: Ops
    trace: Callable[[Ops, ForwardBatch], Floats]

    def run(self, batch: ForwardBatch) -> Floats:
        return self.trace(self.ops, batch)

    def decode(self, step: Decode, sampler: Sampler, known: int) -> list[Sampled]:
        logits = self.run(step.batch())  # [n, vocab]
        logits[:, known:] = -np.inf
        after = [position + 1 for position in step.positions]
        return sampler.sample(logits, step.rows, after, [None] * len(after))


def array(matrix: Matrix) -> Floats:
    """This set's matrices are plain arrays; the protocol hides that from the layers."""
    return cast(Floats, matrix)


def silu(x: Floats) -> Floats:
    """x * sigmoid(x). exp of -|x| only: it cannot overflow."""
    small = np.exp(-np.abs(x))
    out: Floats = x * np.where(x >= 0, np.float32(1), small) / (1 + small)
    return out


def rotate(x: Floats, rope: RopeTable, positions: Ints) -> Floats:
    """Rotary embedding (arXiv:2104.09864) of x [tokens, heads, dim], pairs (i, i + dim / 2)."""
    cos = rope.cos[positions][:, None, :]  # [tokens, 1, dim / 2]
    sin = rope.sin[positions][:, None, :]
    first, second = np.split(x, 2, axis=-1)  # [tokens, heads, dim / 2] each
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rotated_bias(left_out: RotatedBias, spec: PagedKV, context_tokens: int) -> Floats:
    """The bias at positions 0 .. context_tokens - 1: [kv_heads, context, head_dim]."""
    bias = left_out.bias.reshape(1, spec.kv_heads, spec.head_dim)
    everywhere = np.broadcast_to(bias, (context_tokens, *bias.shape[1:]))
    positions = np.arange(context_tokens, dtype=np.int32)
    return rotate(everywhere, left_out.rope, positions).swapaxes(0, 1)


def attend(q: Floats, keys: Floats, values: Floats, positions: Ints, scale: float) -> Floats:
    """softmax(q k^T * scale, masked to keys at or before each token's position) v, in float32.

    q [tokens, heads, dim], keys and values [kv_heads, context, dim] -> [tokens, heads, dim].
    """
    tokens, heads, dim = q.shape
    kv_heads, context_tokens, _ = keys.shape
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, dim) * np.float32(scale)
    scores = np.einsum("thgd,hcd->hgtc", grouped, keys)  # [kv_heads, group, tokens, context]
    visible = np.arange(context_tokens) <= positions[:, None]  # [tokens, context]
    scores = np.where(visible, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: Floats = np.einsum("hgtc,hcd->thgd", weights, values).reshape(q.shape)
    return out
