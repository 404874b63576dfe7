"""Batch invariance: on the compiled kernels a row's bits never depend on what it is computed with.

Not on other rows, on its place among them, on threads, nor on how a sequence was cut into chunks.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.kernels.cases import (
    KV_DTYPES,
    Case,
    attention_case,
    normal,
    packed_bytes,
    part_of,
    stored,
)
from toque.kernels.api import Floats, RopeTable, RotatedBias
from toque.kernels.cpu import CpuOps, _native
from toque.kernels.ref import pages
from toque.kernels.ref.dequantize import KINDS
from toque.types import StoredTensor

ONE, TWO = CpuOps(1), CpuOps(2)


def bits(array: Floats) -> bytes:
    return array.tobytes()


@pytest.mark.parametrize("inputs", [64, 257, 600])
def test_linear_row_alone_equals_row_in_any_batch(inputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x, residual = normal(rng, 67, inputs), normal(rng, 67, 45)
    weight, bias = stored(normal(rng, 45, inputs)), normal(rng, 45)
    matrix = TWO.matrix(weight)
    alone = [
        bits(ONE.linear_add(x[r : r + 1], matrix, bias, residual[r : r + 1])) for r in range(67)
    ]
    for rows in range(1, 68):
        first = (67 - rows) // 2  # another place in every batch
        part = slice(first, first + rows)
        out = TWO.linear_add(x[part], matrix, bias, residual[part])
        assert [bits(row) for row in out] == alone[part]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kinds_row_alone_equals_row_in_any_batch(kind: str) -> None:
    """Batches of 1 to 140 rows: every tile, both ways of unpacking, two blocks of rows."""
    rng = np.random.default_rng(1)
    blocks = 1280 // KINDS[kind].values  # more than one part of a panel
    weight = StoredTensor("w", kind, (45, 1280), packed_bytes(rng, kind, 45 * blocks))
    x, matrix = normal(rng, 140, 1280), TWO.matrix(weight)
    alone = [bits(ONE.linear(x[r : r + 1], matrix)) for r in range(140)]
    assert len(set(alone)) == 140
    for rows in [*range(1, 30), 64, 127, 128, 129, 131, 132, 133, 140]:
        first = (140 - rows) // 2  # another place in every batch
        part = slice(first, first + rows)
        assert [bits(row) for row in TWO.linear(x[part], matrix)] == alone[part]
        assert [bits(row) for row in ONE.linear(x[part], matrix)] == alone[part]


@pytest.mark.parametrize(("gate_kind", "up_kind"), [("Q5_0", "Q4_K"), ("Q6_K", "Q6_K")])
def test_quantized_gate_up_silu_row_alone_equals_row_in_batch(gate_kind: str, up_kind: str) -> None:
    rng = np.random.default_rng(0)
    x = normal(rng, 140, 256) / 16
    gate, up = (
        TWO.matrix(StoredTensor("w", kind, (77, 256), packed_bytes(rng, kind, 77 * 256 // values)))
        for kind, values in ((k, KINDS[k].values) for k in (gate_kind, up_kind))
    )
    whole = TWO.gate_up_silu(x, gate, up)
    for r in (0, 1, 5, 6, 63, 64, 127, 128, 139):
        assert bits(ONE.gate_up_silu(x[r : r + 1], gate, up)) == bits(whole[r])


def test_gate_up_silu_row_alone_equals_row_in_batch() -> None:
    rng = np.random.default_rng(0)
    x = normal(rng, 67, 300)
    gate, up = (TWO.matrix(stored(normal(rng, 77, 300) / 16)) for _ in range(2))
    whole = TWO.gate_up_silu(x, gate, up)
    for r in (0, 1, 5, 6, 63, 64, 66):
        assert bits(ONE.gate_up_silu(x[r : r + 1], gate, up)) == bits(whole[r])


def test_rms_norm_row_alone_equals_row_in_batch() -> None:
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 600, 131), normal(rng, 131)
    whole = TWO.rms_norm(x, weight, 1e-6)
    assert all(bits(ONE.rms_norm(x[r : r + 1], weight, 1e-6)) == bits(whole[r]) for r in range(67))


def chunked(
    case: Case, sizes: list[int], ops: CpuOps, left_out: RotatedBias | None = None
) -> Floats:
    """The first chunk of the case in pieces of the given sizes, each a call of its own."""
    outs, begin = [], 0
    for size in sizes:
        q = np.ascontiguousarray(case.q[begin : begin + size])
        batch = part_of(case.batch, 0, begin, begin + size)
        outs.append(ops.attention(q, case.kv, batch, 0.125, left_out))
        begin += size
    return np.concatenate(outs)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("group", "dim", "block_size"), [(1, 64, 16), (3, 80, 16), (7, 64, 5), (7, 128, 24)]
)
def test_attention_does_not_depend_on_chunks(
    dtype: str, group: int, dim: int, block_size: int
) -> None:
    """130 new tokens after 200 cached ones, so that a part ends among them: at once, in uneven
    pieces, and one by one; with one thread and, as parts are shared out, with two."""
    rng = np.random.default_rng(3)
    case = attention_case(
        rng, [(330, 130)], group=group, dim=dim, block_size=block_size, dtype=dtype
    )
    whole = TWO.attention(case.q, case.kv, case.batch, 0.125)
    assert bits(chunked(case, [1, 63, 2, 31, 33], ONE)) == bits(whole)
    assert bits(chunked(case, [1] * 130, TWO)) == bits(whole)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_attention_with_a_bias_left_out_does_not_depend_on_chunks(dtype: str) -> None:
    rng = np.random.default_rng(3)
    case = attention_case(rng, [(330, 130)], group=7, dtype=dtype)
    angles = np.arange(330)[:, None] * 1e4 ** (-np.arange(32) / 32)  # [positions, dim / 2]
    rope = RopeTable(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    left_out = RotatedBias(normal(rng, 2 * 64), rope)
    whole = TWO.attention(case.q, case.kv, case.batch, 0.125, left_out)
    assert bits(chunked(case, [1, 63, 2, 31, 33], ONE, left_out)) == bits(whole)
    assert bits(chunked(case, [1] * 130, TWO, left_out)) == bits(whole)


def test_attention_does_not_depend_on_neighbours() -> None:
    chunks = [(200, 1), (33, 33), (64, 1), (100, 50), (1, 1), (700, 5)]
    case = attention_case(np.random.default_rng(4), chunks)
    whole = TWO.attention(case.q, case.kv, case.batch, 0.125)
    for c, (_, new) in enumerate(chunks):
        part = slice(case.batch.chunk_starts[c], case.batch.chunk_starts[c + 1])
        batch = part_of(case.batch, c, 0, new)
        assert bits(ONE.attention(case.q[part], case.kv, batch, 0.125)) == bits(whole[part])


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_attention_does_not_depend_on_page_size(dtype: str) -> None:
    """Pages are a matter of storage: any number of tokens in each, the same numbers."""
    outs = set()
    for block_size in (1, 7, 8, 16, 20, 32, 1024):
        case = attention_case(
            np.random.default_rng(6), [(290, 60)], block_size=block_size, dtype=dtype
        )
        rng, place = np.random.default_rng(7), np.arange(290)
        write_at = case.batch.page_table[0, place // block_size].astype(np.int64) * block_size
        k, v = normal(rng, 290, 2, 64), normal(rng, 290, 2, 64)
        pages.write(case.kv, write_at + place % block_size, k, v)
        outs.add(bits(TWO.attention(normal(rng, 60, 6, 64), case.kv, case.batch, 0.125)))
    assert len(outs) == 1


@pytest.mark.parametrize("isa", _native.ISAS)
def test_every_instruction_set_passes_these_tests(isa: str) -> None:
    """This file and three others of its folder, in a process that TOQUE_ISA tells what to use."""
    if os.environ.get("TOQUE_ISA"):
        pytest.skip("is the inner process")
    if ONE.backend.isa == isa:
        return
    tests = ["test_cpu.py", "test_cpu_bits.py", "test_dequantize.py", "test_quantized.py"]
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + [os.path.join(folder, test) for test in tests],
        env={**os.environ, "TOQUE_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
