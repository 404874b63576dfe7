"""The compiled kernels against the numpy ones.

Tolerances: a sum of n products in float32 is off by at most about n * 2^-24 of the sum of their
magnitudes; drawn inputs are of order 1 and the errors add up like a random walk, so sqrt(n) * 2^-22
of the terms' typical size (sqrt(n)) leaves room and still fails for a single wrong term.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import attention_case, normal, stored
from toque.kernels.api import QKV, Floats, LayerKV, PagedKV, RopeTable
from toque.kernels.cpu import CpuOps
from toque.kernels.ref import RefOps

CPU, REF = CpuOps(2), RefOps()


def assert_sums_close(ours: Floats, theirs: Floats, terms: int) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=terms * 2.0**-22)


@given(st.integers(1, 70), st.integers(1, 600), st.integers(1, 70), st.booleans(), st.booleans())
@settings(deadline=None)
def test_linear(rows: int, inputs: int, outputs: int, with_bias: bool, with_residual: bool) -> None:
    rng = np.random.default_rng(inputs)
    x, weight = normal(rng, rows, inputs), stored(normal(rng, outputs, inputs))
    bias = normal(rng, outputs) if with_bias else None
    ours, theirs = CPU.matrix(weight), REF.matrix(weight)
    assert ours.shape == (outputs, inputs)
    if with_residual:
        residual = normal(rng, rows, outputs)
        out = CPU.linear_add(x, ours, bias, residual)
        assert_sums_close(out, REF.linear_add(x, theirs, bias, residual), inputs)
    else:
        assert_sums_close(CPU.linear(x, ours, bias), REF.linear(x, theirs, bias), inputs)


@given(st.integers(1, 70), st.integers(1, 300), st.integers(1, 40))
@settings(deadline=None)
def test_gate_up_silu(rows: int, inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x = normal(rng, rows, inputs)
    gate, up = (stored(normal(rng, outputs, inputs) / 16) for _ in range(2))
    out = CPU.gate_up_silu(x, CPU.matrix(gate), CPU.matrix(up))
    assert_sums_close(out, REF.gate_up_silu(x, REF.matrix(gate), REF.matrix(up)), inputs)


def test_silu_is_right_over_its_whole_range() -> None:
    """Weights of one input: gate gives x itself, up gives 1."""
    x = np.linspace(-95, 95, 4001, dtype=np.float32)[:, None]
    out = CPU.gate_up_silu(
        np.concatenate([x, np.ones_like(x)], axis=1),
        CPU.matrix(stored(np.array([[1, 0]], dtype=np.float32))),
        CPU.matrix(stored(np.array([[0, 1]], dtype=np.float32))),
    )
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(out, exact, rtol=4e-7, atol=1e-36)


@given(st.integers(1, 20), st.integers(1, 200))
@settings(deadline=None)
def test_rms_norm(rows: int, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x, weight = normal(rng, rows, columns), normal(rng, columns)
    ours = CPU.rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(ours, REF.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-7)


def test_embed() -> None:
    rng = np.random.default_rng(0)
    table = stored(normal(rng, 37, 50))
    ids = np.array([36, 0, 5, 5], dtype=np.int32)
    out = CPU.embed(CPU.matrix(table), ids)
    np.testing.assert_array_equal(out, REF.embed(REF.matrix(table), ids))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("dim", "normed", "biased"), [(64, True, False), (80, False, True), (6, True, True)]
)
def test_qkv_rope_write(dtype: str, dim: int, normed: bool, biased: bool) -> None:
    """Queries, and everything that the pages hold afterwards, are those of the numpy kernels."""
    rng = np.random.default_rng(dim)
    case = attention_case(rng, [(21, 3), (1, 1), (40, 17)], dim=dim, dtype=dtype)
    hidden, heads, kv_heads = 45, 6, 2
    weights = [stored(normal(rng, n * dim, hidden)) for n in (heads, kv_heads, kv_heads)]
    vectors = [normal(rng, n * dim) if biased else None for n in (heads, kv_heads, kv_heads)]
    norms = [normal(rng, dim) if normed else None for _ in range(2)]
    angles = rng.uniform(0, 6, (41, dim // 2)).astype(np.float32)
    rope = RopeTable(np.cos(angles), np.sin(angles))
    x = normal(rng, len(case.q), hidden)
    results = []
    for ops in (CPU, REF):
        qkv = QKV(*(ops.matrix(w) for w in weights), *vectors, *norms, norm_eps=1e-6, head_dim=dim)
        kv = LayerKV(case.kv.keys.copy(), case.kv.values.copy())
        results.append((ops.qkv_rope_write(x, qkv, rope, case.batch, kv), kv))
    (query, kv), (ref_query, ref_kv) = results
    # A difference of the projections may also move a half to its neighbour, 2^-10 of it away.
    step = {"rtol": 1e-6 if dtype == "float32" else 2**-10, "atol": 1e-4}
    assert_sums_close(query, ref_query, hidden)
    np.testing.assert_allclose(kv.keys, ref_kv.keys, **step)
    np.testing.assert_allclose(kv.values, ref_kv.values, **step)


@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 80)), min_size=1, max_size=4),
    st.sampled_from([(1, 64), (3, 32), (7, 64), (2, 128), (3, 80), (1, 20), (70, 8), (5, 7)]),
    st.sampled_from([1, 5, 16, 32]),
    st.sampled_from(["float32", "float16"]),
)
@settings(deadline=None)
def test_attention(
    drawn: list[tuple[int, int]], shape: tuple[int, int], block_size: int, dtype: str
) -> None:
    """Any mix of chunks, page sizes, groups and dimensions; NaN in all places not to be read."""
    chunks = [(max(context, new), new) for context, new in drawn]
    group, dim = shape
    rng = np.random.default_rng(len(chunks))
    case = attention_case(rng, chunks, group=group, dim=dim, block_size=block_size, dtype=dtype)
    out = CPU.attention(case.q, case.kv, case.batch, dim**-0.5)
    expected = REF.attention(case.q, case.kv, case.batch, dim**-0.5)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=2e-6)


def test_attention_with_scores_far_apart() -> None:
    """Scores of several hundreds: the running maximum must rescale what came before it."""
    case = attention_case(np.random.default_rng(5), [(200, 40)], dim=64)
    ramp = np.linspace(1, 40, 200, dtype=np.float32)
    place = np.arange(200)
    pages, offsets = case.batch.page_table[0, place // 16], place % 16
    case.kv.keys[pages, :, offsets] *= ramp[:, None, None]
    out = CPU.attention(case.q, case.kv, case.batch, 1.0)
    expected = REF.attention(case.q, case.kv, case.batch, 1.0)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)


def test_float16_pages_round_to_nearest_even() -> None:
    """Ties, subnormals, overflow and infinities, through the write path, against numpy's cast."""
    halves = np.arange(0, 0x7C00, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2
    numbers = np.concatenate([halves, between, np.nextafter(between, 9e9), -between])
    numbers = np.concatenate([numbers, [65519.0, 65520.0, 1e30, np.inf, 0.0, -0.0]])
    numbers = numbers[: len(numbers) // 2 * 2].astype(np.float32)
    dim = len(numbers)
    kv = CPU.kv_pages([PagedKV(kv_heads=1, head_dim=dim, dtype="float16")], 1, 1)[0]
    flat = np.zeros((1, dim // 2), dtype=np.float32)
    one = numbers.reshape(1, 1, dim)
    at = np.zeros(1, dtype=np.int32)
    CPU.backend.rope_write(
        one.copy(), one.copy(), one, None, None, 0.0, flat + 1, flat, at, at.astype(np.int64),
        kv.keys, kv.values,
    )  # fmt: skip
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16)
    assert kv.values.tobytes() == expected.tobytes()


def CPU_SPEC(dim: int):
    from toque.kernels.api import PagedKV

    return PagedKV(kv_heads=1, head_dim=dim, dtype="float16")


def test_nan_and_infinity_stay_in_their_row() -> None:
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 20, 64), CPU.matrix(stored(normal(rng, 40, 64)))
    clean = CPU.linear(x, weight)
    x[7, 3], x[12, 60] = np.nan, np.inf
    dirty = CPU.linear(x, weight)
    assert np.isnan(dirty[7]).all() and not np.isfinite(dirty[12]).any()
    keep = np.delete(np.arange(20), [7, 12])
    assert dirty[keep].tobytes() == clean[keep].tobytes()


def test_nan_in_a_later_token_does_not_reach_earlier_ones() -> None:
    case = attention_case(np.random.default_rng(1), [(50, 50)])
    clean = CPU.attention(case.q, case.kv, case.batch, 0.125)
    place = case.batch.write_at[37]
    case.kv.values[place // 16, :, place % 16] = np.inf
    case.kv.keys[place // 16, :, place % 16] = np.nan
    dirty = CPU.attention(case.q, case.kv, case.batch, 0.125)
    assert dirty[:37].tobytes() == clean[:37].tobytes()
    assert np.isnan(dirty[37:]).all()


def test_empty_batches_give_empty_results() -> None:
    rng = np.random.default_rng(0)
    weight = CPU.matrix(stored(normal(rng, 5, 4)))
    assert CPU.linear(np.zeros((0, 4), np.float32), weight).shape == (0, 5)
    assert CPU.embed(weight, np.zeros(0, np.int32)).shape == (0, 4)
    case = attention_case(rng, [(3, 1)])
    none = replace(
        case.batch,
        positions=case.batch.positions[:0],
        chunk_starts=np.zeros(1, np.int32),
        context_lens=case.batch.context_lens[:0],
        page_table=case.batch.page_table[:0],
    )
    assert CPU.attention(case.q[:0], case.kv, none, 1.0).shape == (0, 6 * 64)
