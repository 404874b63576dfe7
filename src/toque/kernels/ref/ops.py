"""Every op of `kernels/api.py` in plain numpy, on dequantized float32 weights.

Owns: nothing. Knows: the formulas. Does not know: speed; nor bit-exactness over batch sizes, which
only the `cpu` set promises (numpy's matmul rounds a row differently beside other rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from toque.kernels.api import QKV, Floats, ForwardBatch, Ints, LayerKV, Matrix, PagedKV, RopeTable
from toque.kernels.ref.dequantize import dequantize
from toque.types import StoredTensor


class RefOps:
    """The oracle. Its matrices are float32 arrays [out, in]."""

    name = "ref"

    def matrix(self, tensor: StoredTensor) -> Matrix:
        return dequantize(tensor.kind, tensor.data, tensor.shape)  # [out, in]

    def vector(self, tensor: StoredTensor) -> Floats:
        return dequantize(tensor.kind, tensor.data, tensor.shape)  # [n]

    def kv_pages(self, specs: Sequence[PagedKV], num_pages: int, block_size: int) -> list[LayerKV]:
        return [empty_pages(spec, num_pages, block_size) for spec in specs]

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
        key = self.linear(x, qkv.key, qkv.key_bias).reshape(heads)  # [tokens, kv_heads, dim]
        value = self.linear(x, qkv.value, qkv.value_bias).reshape(heads)
        if qkv.query_norm is not None:
            query = self.rms_norm(query, qkv.query_norm, qkv.norm_eps)
        if qkv.key_norm is not None:
            key = self.rms_norm(key, qkv.key_norm, qkv.norm_eps)
        page, offset = np.divmod(batch.write_at, kv.block_size)  # [tokens] each
        kv.keys[page, :, offset] = rotate(key, rope, batch.positions)
        kv.values[page, :, offset] = value
        return rotate(query, rope, batch.positions)

    def attention(self, q: Floats, kv: LayerKV, batch: ForwardBatch, scale: float) -> Floats:
        out = np.empty_like(q)  # [tokens, heads, dim]
        for chunk, context_tokens in enumerate(batch.context_lens):
            tokens = slice(batch.chunk_starts[chunk], batch.chunk_starts[chunk + 1])
            pages = batch.page_table[chunk, : -(-context_tokens // kv.block_size)]
            keys = gather(kv.keys, pages, context_tokens)  # [kv_heads, context, dim]
            values = gather(kv.values, pages, context_tokens)
            out[tokens] = attend(q[tokens], keys, values, batch.positions[tokens], scale)
        return out.reshape(len(q), -1)


def array(matrix: Matrix) -> Floats:
    """This set's matrices are plain arrays; the protocol hides that from the layers."""
    return cast(Floats, matrix)


def empty_pages(spec: PagedKV, num_pages: int, block_size: int) -> LayerKV:
    """np.zeros asks the kernel for zero pages, which cost no memory until they are written."""
    shape = (num_pages, spec.kv_heads, block_size, spec.head_dim)
    return LayerKV(np.zeros(shape, dtype=spec.dtype), np.zeros(shape, dtype=spec.dtype))


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


def gather(pages: Floats, ids: Ints, context_tokens: int) -> Floats:
    """The first `context_tokens` tokens of the listed pages, in order: [kv_heads, context, dim]."""
    picked = pages[ids].swapaxes(0, 1)  # [kv_heads, pages, block_size, dim]
    kv_heads, dim = picked.shape[0], picked.shape[-1]
    return picked.reshape(kv_heads, -1, dim)[:, :context_tokens].astype(np.float32, copy=False)


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
