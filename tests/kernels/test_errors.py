"""Wrong arguments of the compiled kernels are exceptions, never a read out of bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cases import attention_case, normal, stored
from toque.kernels.api import QKV, ForwardBatch, LayerKV, PagedKV, RopeTable, RotatedBias
from toque.kernels.cpu import CpuOps

OPS = CpuOps(2)
RNG = np.random.default_rng(0)
MATRIX = OPS.matrix(stored(normal(RNG, 12, 8)))
CASE = attention_case(RNG, [(20, 3), (5, 5)])


def changed(array: np.ndarray, index: Any, value: int) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


@pytest.mark.parametrize("token", [-1, 12, 2**31 - 1])
def test_token_out_of_the_vocabulary(token: int) -> None:
    with pytest.raises(IndexError, match=f"token id {token}"):
        OPS.embed(MATRIX, np.array([0, token], dtype=np.int32))


@pytest.mark.parametrize("page", [-1, len(CASE.kv.pages)])
def test_page_out_of_the_pool(page: int) -> None:
    batch = replace(CASE.batch, page_table=changed(CASE.batch.page_table, (0, 1), page))
    with pytest.raises(IndexError, match=f"page {page}"):
        OPS.attention(CASE.q, CASE.kv, batch, 1.0)


def test_unused_places_of_the_page_table_may_hold_anything() -> None:
    batch = replace(CASE.batch, page_table=changed(CASE.batch.page_table, (1, 1), -7))
    expected = OPS.attention(CASE.q, CASE.kv, CASE.batch, 1.0)
    np.testing.assert_array_equal(OPS.attention(CASE.q, CASE.kv, batch, 1.0), expected)


def broken_batches() -> list[ForwardBatch]:
    b = CASE.batch
    return [
        replace(b, context_lens=changed(b.context_lens, 0, 1000)),  # beyond the table
        replace(b, context_lens=changed(b.context_lens, 1, 4)),  # fewer than the new tokens
        replace(b, chunk_starts=changed(b.chunk_starts, 1, 9)),
        replace(b, chunk_starts=changed(b.chunk_starts, 1, -1)),
        replace(b, chunk_starts=changed(b.chunk_starts, 2, 100)),
        replace(b, chunk_starts=b.chunk_starts[:-1].copy()),
        replace(b, positions=changed(b.positions, 4, 3)),
        replace(b, positions=b.positions[:-1].copy()),
        replace(b, page_table=b.page_table[:1].copy()),
    ]


@pytest.mark.parametrize("batch", broken_batches())
def test_batch_that_contradicts_itself(batch: ForwardBatch) -> None:
    with pytest.raises(ValueError, match=r"chunk|position|page|context"):
        OPS.attention(CASE.q, CASE.kv, batch, 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("write_at", -1), ("write_at", 16 * len(CASE.kv.pages)), ("positions", 40)],
)
def test_write_or_position_out_of_range(field: str, value: int) -> None:
    square = OPS.matrix(stored(normal(RNG, 128, 16)))
    qkv = QKV(square, square, square, None, None, None, None, None, norm_eps=0.0, head_dim=64)
    rope = RopeTable(np.ones((40, 32), np.float32), np.ones((40, 32), np.float32))
    batch = replace(CASE.batch, **{field: changed(getattr(CASE.batch, field), 2, value)})
    before = CASE.kv.pages.tobytes()
    with pytest.raises(IndexError, match=f"{field.removesuffix('s')} {value}"):
        OPS.qkv_rope_write(normal(RNG, 8, 16), qkv, rope, batch, CASE.kv)
    assert CASE.kv.pages.tobytes() == before


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 8), dtype=np.float64),
        np.zeros((2, 16), dtype=np.float32)[:, ::2],
        np.zeros((8, 2), dtype=np.float32).T,
        np.zeros(8, dtype=np.float32),
    ],
    ids=["float64", "strided", "transposed", "rank 1"],
)
def test_arrays_are_not_converted(x: np.ndarray) -> None:
    out = np.empty((2, 12), dtype=np.float32)
    with pytest.raises(TypeError):
        OPS.backend.linear(x, MATRIX, None, None, out)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="inputs"):
        OPS.linear(normal(RNG, 2, 7), MATRIX)
    with pytest.raises(ValueError, match="bias"):
        OPS.linear(normal(RNG, 2, 8), MATRIX, normal(RNG, 11))
    with pytest.raises(ValueError, match="residual"):
        OPS.linear_add(normal(RNG, 2, 8), MATRIX, None, normal(RNG, 1, 12))
    with pytest.raises(ValueError, match="outputs"):
        OPS.gate_up_silu(normal(RNG, 2, 8), MATRIX, OPS.matrix(stored(normal(RNG, 13, 8))))
    with pytest.raises(ValueError, match="width"):
        OPS.rms_norm(normal(RNG, 2, 8), normal(RNG, 7), 1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        PagedKV(2, 64, "float16"),  # half the bytes
        PagedKV(4, 64, "float32"),
        PagedKV(3, 64, "float32"),  # no divisor of the six heads
        PagedKV(0, 64, "float32"),
        PagedKV(-2, 64, "float32"),
        PagedKV(2**62, 64, "float32"),  # the product wraps around
        PagedKV(2, 64, "float64"),
    ],
)
def test_pages_of_another_type_or_size(spec: PagedKV) -> None:
    with pytest.raises(ValueError, match=r"pages|kv_heads"):
        OPS.attention(CASE.q, LayerKV(CASE.kv.pages, spec, 16), CASE.batch, 1.0)


@pytest.mark.parametrize("block_size", [0, -16, 8, 32, 2**62])
def test_pages_of_another_block_size(block_size: int) -> None:
    with pytest.raises(ValueError, match="pages"):
        OPS.attention(CASE.q, replace(CASE.kv, block_size=block_size), CASE.batch, 1.0)


def test_heads_that_are_no_multiple() -> None:
    with pytest.raises(ValueError, match="multiple"):
        OPS.attention(CASE.q[:, :5].copy(), CASE.kv, CASE.batch, 1.0)


def test_a_bias_that_does_not_fit() -> None:
    bias, table = np.ones(128, np.float32), np.ones((20, 32), np.float32)
    for wrong in (
        RotatedBias(bias[:64], RopeTable(table, table)),
        RotatedBias(bias, RopeTable(table[:, :16].copy(), table[:, :16].copy())),
        RotatedBias(bias, RopeTable(table, table[:19])),
    ):
        with pytest.raises(ValueError, match=r"bias|rope"):
            OPS.attention(CASE.q, CASE.kv, CASE.batch, 1.0, wrong)
    short = RotatedBias(bias, RopeTable(table[:19], table[:19]))
    with pytest.raises(IndexError, match="20"):
        OPS.attention(CASE.q, CASE.kv, CASE.batch, 1.0, short)
