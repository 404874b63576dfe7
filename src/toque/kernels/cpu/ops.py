"""Every op of `kernels/api.py` on the compiled extension: allocates results, hands over arrays.

Owns: the thread pool and the choice of instruction set (inside `Backend`). Knows: which native call
computes which op. Does not know: formulas; they are in csrc/ and, readable, in `kernels/ref`.

The extension checks everything that it is given: TypeError for another dtype, rank or memory order
(nothing is converted), ValueError for sizes that do not fit, IndexError for an index out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from toque.errors import ConfigError
from toque.kernels.api import (
    QKV,
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
)
from toque.kernels.cpu import _native
from toque.kernels.cpu.packing import PanelPacking
from toque.kernels.cpu.record import CpuProgram, native
from toque.kernels.cpu.sampler import CpuSampler
from toque.kernels.ref.dequantize import check_packed
from toque.kernels.ref.pages import zero_pages
from toque.types import StoredTensor

ACTIVATIONS = "a14"  # bits of a rounded input


class CpuOps:
    """Matrices stay packed: panels of the file's own integers and scales (csrc/layout.h), made
    once when a model is loaded. Inputs of integer weights are rounded to 14 bits per group of 32;
    `kernels/ref/quantized.py` is the same arithmetic, readable. Unquantized weights multiply in
    float32.

    `threads` counts the calling thread. The environment variable TOQUE_ISA (avx512, avx2, neon_dot,
    neon or portable) overrides the choice of instruction set. Raises ConfigError where either
    cannot be had.
    """

    def __init__(self, threads: int) -> None:
        try:
            self.backend = _native.Backend(threads)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        # Part of an answer's fingerprint: another arithmetic is another name.
        self.name = f"cpu/{self.backend.isa}/{ACTIVATIONS}"
        self.packing: Packing | None = PanelPacking(self.backend)

    def set_threads(self, threads: int) -> None:
        """Use so many threads from the next op on. Raises ValueError below 1."""
        self.backend.set_threads(threads)

    def matrix(self, tensor: StoredTensor) -> Matrix:
        check_packed(tensor.kind, tensor.data, tensor.shape)
        rows, columns = tensor.shape
        data = np.ascontiguousarray(tensor.data).reshape(-1)  # [bytes]
        return self.backend.pack(tensor.kind, data, rows, columns)

    def vector(self, tensor: StoredTensor) -> Floats:
        check_packed(tensor.kind, tensor.data, tensor.shape)
        out = np.empty((1, *tensor.shape), dtype=np.float32)  # [1, n]
        self.backend.dequantize(tensor.kind, np.ascontiguousarray(tensor.data).reshape(-1), out)
        return out.reshape(tensor.shape)

    def kv_pages(self, specs: Sequence[PagedKV], num_pages: int, block_size: int) -> list[LayerKV]:
        return [zero_pages(spec, num_pages, block_size) for spec in specs]

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        out = np.empty((len(ids), table.shape[1]), dtype=np.float32)  # [tokens, hidden]
        self.backend.embed(native(table), ids, out)
        return out

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        out = np.empty_like(x)  # [rows, n]
        self.backend.rms_norm(x, weight, eps, out)
        return out

    def linear(self, x: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
        out = result_of(x, weight)  # [rows, out]
        self.backend.linear(x, native(weight), bias, None, out)
        return out

    def linear_add(
        self, x: Floats, weight: Matrix, bias: Floats | None, residual: Floats
    ) -> Floats:
        out = result_of(x, weight)  # [rows, out]
        self.backend.linear(x, native(weight), bias, residual, out)
        return out

    def gate_up_silu(
        self,
        x: Floats,
        gate: Matrix,
        up: Matrix,
        gate_bias: Floats | None = None,
        up_bias: Floats | None = None,
    ) -> Floats:
        out = result_of(x, gate)  # [rows, intermediate]
        self.backend.gate_up_silu(x, native(gate), native(up), gate_bias, up_bias, out)
        return out

    def qkv_rope_write(
        self, x: Floats, qkv: QKV, rope: RopeTable, batch: ForwardBatch, kv: LayerKV
    ) -> Floats:
        weights = (native(qkv.query), native(qkv.key), native(qkv.value))
        key_bias = None if qkv.bias_left_out(kv.spec) is not None else qkv.key_bias
        biases = (qkv.query_bias, key_bias, qkv.value_bias)
        q, k, v = (result_of(x, weight) for weight in weights)  # [tokens, (kv_)heads * head_dim]
        self.backend.linear3(x, *weights, *biases, q, k, v)
        query, key, value = (out.reshape(len(x), -1, qkv.head_dim) for out in (q, k, v))
        self.backend.rope_write(
            query,
            key,
            value,
            qkv.query_norm,
            qkv.key_norm,
            qkv.norm_eps,
            rope.cos,
            rope.sin,
            batch.positions,
            batch.write_at,
            kv.spec.dtype,
            kv.block_size,
            kv.pages,
        )
        return query  # [tokens, heads, head_dim], rotated in place

    def attention(
        self,
        q: Floats,
        kv: LayerKV,
        batch: ForwardBatch,
        scale: float,
        left_out: RotatedBias | None = None,
    ) -> Floats:
        out = np.empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=np.float32)
        pages = (kv.spec.dtype, kv.spec.kv_heads, kv.block_size, kv.pages)
        chunks = (batch.positions, batch.chunk_starts, batch.context_lens, batch.page_table)
        bias = None if left_out is None else left_out.bias
        cos = None if left_out is None else left_out.rope.cos
        sin = None if left_out is None else left_out.rope.sin
        self.backend.attention(q, *pages, *chunks, scale, bias, cos, sin, out)
        return out  # [tokens, heads * head_dim]

    def output_rows(self, x: Floats, batch: ForwardBatch) -> Floats:
        rows: Floats = x[batch.output_rows]  # [outputs, n]
        return rows

    def sampler(self, num_rows: int) -> CpuSampler:
        return CpuSampler(self.backend, num_rows)

    def record(self, trace: Callable[[Ops, ForwardBatch], Floats]) -> CpuProgram:
        return CpuProgram(self.backend, trace)


def result_of(x: Floats, weight: Matrix) -> Floats:
    return np.empty((x.shape[0], weight.shape[0]), dtype=np.float32)  # [rows, out]
