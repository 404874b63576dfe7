"""Grouped-query attention over paged keys and values (arXiv:2305.13245).

The layer takes the normed input and the residual stream: the output projection adds into the latter
in one op. It declares the memory that it needs; the pages themselves come in as an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from toque.kernels.api import (
    QKV,
    Floats,
    ForwardBatch,
    LayerKV,
    Matrix,
    Ops,
    PagedKV,
    RopeTable,
    RotatedBias,
)
from toque.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Attention:
    """(x, residual) both [tokens, hidden] -> the new residual [tokens, hidden]."""

    ops: Ops
    qkv: QKV
    output: Linear  # [hidden, heads * head_dim]
    rope: RopeTable

    def __call__(self, x: Floats, residual: Floats, batch: ForwardBatch, kv: LayerKV) -> Floats:
        """Writes this batch's keys and values into `kv` before it reads them."""
        q = self.ops.qkv_rope_write(x, self.qkv, self.rope, batch, kv)  # [tokens, heads, head_dim]
        bias = self.qkv.bias_left_out(kv.spec)
        left_out = None if bias is None else RotatedBias(bias, self.rope)
        mixed = self.ops.attention(q, kv, batch, self.scale, left_out)  # [tokens, heads * head_dim]
        return self.output.add_to(residual, mixed)

    @property
    def scale(self) -> float:
        return float(self.qkv.head_dim**-0.5)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.qkv.query, self.qkv.key, self.qkv.value, self.output.weight)

    def kv_spec(self, dtype: str) -> PagedKV:
        kv_heads = self.qkv.key.shape[0] // self.qkv.head_dim
        return PagedKV(kv_heads, self.qkv.head_dim, dtype)
