"""Ops that are written down instead of computed, and the program that they leave.

Owns: a `_native.Recording`, the array its results lie in. Knows: which native call records which
op; the extension checks sizes, once. Does not know: layers, and no formula (csrc/program.h).

`ops.py` beside it is the slow twin: the same kernels on the same numbers, one call per op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from toque.kernels.cpu import _native
from toque.kernels.cpu.sampler import CpuSampler, sampled
from toque.types import Sampled, StoredTensor

NOBODY = np.zeros(0, dtype=np.int32)


class CpuProgram:
    """What `trace` does on a batch, as one native call per batch, sampling included where no row
    needs Python before it."""

    def __init__(
        self, backend: _native.Backend, trace: Callable[[Ops, ForwardBatch], Floats]
    ) -> None:
        self._backend = backend
        self._recording = _native.Recording()
        recorder = Recorder(self._recording)
        result = recorder.number(trace(recorder, recorder.batch))
        self._recording.finish(result)
        self._width: int = self._recording.width(result)
        self._per_output: bool = self._recording.is_per_output(result)
        self._room: Floats = np.empty((0, self._width), dtype=np.float32)  # [rows, width]

    def run(self, batch: ForwardBatch) -> Floats:
        result = self._result(len(batch.output_rows if self._per_output else batch.ids))
        self._backend.run(
            self._recording,
            batch.ids,
            batch.positions,
            batch.chunk_starts,
            batch.context_lens,
            batch.page_table,
            batch.write_at,
            batch.output_rows,
            result,
        )
        return result

    def decode(self, step: Decode, sampler: Sampler, known: int) -> list[Sampled]:
        samplers = cast(CpuSampler, sampler)
        rows = step.rows
        chosen = self._backend.decode(
            self._recording,
            step.ids,
            rows,
            step.positions,
            step.page_table,
            self._result(len(rows)),
            samplers.of(rows),
            known,
        )
        return sampled(rows, chosen)

    def _result(self, rows: int) -> Floats:  # [rows, width]
        if rows > len(self._room):  # fresh memory for every step would cost its page faults
            self._room = np.empty((rows, self._width), dtype=np.float32)
        return self._room[:rows]


class Recorder:
    """An Ops whose arrays are stand-ins: zero rows of the right width, told apart by identity.

    A layer that computes on its arrays by itself, or takes them from elsewhere than this batch,
    could not be recorded; it is refused (ValueError) rather than recorded wrongly.
    """

    name = "recorder"
    packing: Packing | None = None

    def __init__(self, recording: _native.Recording) -> None:
        self._recording = recording
        self._values: list[Floats] = []  # the stand-in of each value, by its number
        self._numbers: dict[int, int] = {}  # by id() of the stand-in, which lives as long as this
        ids, rows = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        places = np.zeros(0, dtype=np.int64)
        self.batch = ForwardBatch(ids, NOBODY, NOBODY, NOBODY, NOBODY[None], places, rows)

    def number(self, x: Floats) -> int:
        """Which value a stand-in stands for."""
        number = self._numbers.get(id(x))
        if number is None:
            raise ValueError("an op was given an array that no op of this recording has made")
        return number

    def _stand_in(self, number: int) -> Floats:
        # An op may make more values than it returns: those get stand-ins that nobody has.
        while len(self._values) <= number:
            width = self._recording.width(len(self._values))
            self._values.append(np.empty((0, width), dtype=np.float32))
            self._numbers[id(self._values[-1])] = len(self._values) - 1
        return self._values[number]

    def _own(self, batch: ForwardBatch) -> None:
        if batch is not self.batch:
            raise ValueError("an op was given another batch than the recorded one")

    def matrix(self, tensor: StoredTensor) -> Matrix:
        raise NotImplementedError("weights are loaded before a program is recorded")

    def vector(self, tensor: StoredTensor) -> Floats:
        raise NotImplementedError("weights are loaded before a program is recorded")

    def kv_pages(self, specs: Sequence[PagedKV], num_pages: int, block_size: int) -> list[LayerKV]:
        raise NotImplementedError("pages are allocated before a program is recorded")

    def sampler(self, num_rows: int) -> Sampler:
        raise NotImplementedError("a program ends with logits")

    def record(self, trace: Callable[[Ops, ForwardBatch], Floats]) -> CpuProgram:
        raise NotImplementedError("a program cannot be recorded in a program")

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        if ids is not self.batch.ids:
            raise ValueError("an op was given other token ids than the recorded batch's")
        return self._stand_in(self._recording.embed(native(table)))

    def output_rows(self, x: Floats, batch: ForwardBatch) -> Floats:
        self._own(batch)
        return self._stand_in(self._recording.output_rows(self.number(x)))

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        return self._stand_in(self._recording.rms_norm(self.number(x), weight, eps))

    def linear(self, x: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
        return self._stand_in(self._recording.linear(self.number(x), native(weight), bias, None))

    def linear_add(
        self, x: Floats, weight: Matrix, bias: Floats | None, residual: Floats
    ) -> Floats:
        number, onto = self.number(x), self.number(residual)
        return self._stand_in(self._recording.linear(number, native(weight), bias, onto))

    def gate_up_silu(
        self,
        x: Floats,
        gate: Matrix,
        up: Matrix,
        gate_bias: Floats | None = None,
        up_bias: Floats | None = None,
    ) -> Floats:
        return self._stand_in(
            self._recording.gate_up_silu(
                self.number(x), native(gate), native(up), gate_bias, up_bias
            )
        )

    def qkv_rope_write(
        self, x: Floats, qkv: QKV, rope: RopeTable, batch: ForwardBatch, kv: LayerKV
    ) -> Floats:
        self._own(batch)
        key_bias = None if qkv.bias_left_out(kv.spec) is not None else qkv.key_bias
        number = self._recording.qkv_rope_write(
            self.number(x),
            native(qkv.query),
            native(qkv.key),
            native(qkv.value),
            qkv.query_bias,
            key_bias,
            qkv.value_bias,
            qkv.query_norm,
            qkv.key_norm,
            qkv.norm_eps,
            rope.cos,
            rope.sin,
            kv.spec.dtype,
            kv.block_size,
            kv.pages,
            qkv.head_dim,
        )
        return self._stand_in(number)

    def attention(
        self,
        q: Floats,
        kv: LayerKV,
        batch: ForwardBatch,
        scale: float,
        left_out: RotatedBias | None = None,
    ) -> Floats:
        self._own(batch)
        spec = kv.spec
        pages = (spec.dtype, spec.kv_heads, kv.block_size, kv.pages, spec.head_dim)
        bias = None if left_out is None else left_out.bias
        cos = None if left_out is None else left_out.rope.cos
        sin = None if left_out is None else left_out.rope.sin
        number = self._recording.attention(self.number(q), *pages, scale, bias, cos, sin)
        return self._stand_in(number)


def native(matrix: Matrix) -> _native.Matrix:
    """This set's matrices are the extension's own; the protocol hides that from the layers."""
    return cast(_native.Matrix, matrix)
