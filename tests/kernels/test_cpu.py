"""The compiled kernels against the numpy ones.

Tolerances: a sum of n products in float32 is off by at most about n * 2^-24 of the sum of their
magnitudes; drawn inputs are of order 1 and the errors add up like a random walk, so sqrt(n) * 2^-22
of the terms' typical size (sqrt(n)) leaves room and still fails for a single wrong term.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import KV_DTYPES, attention_case, copy_of, kept, normal, stored
from toque.kernels.api import QKV, Floats, PagedKV, RopeTable, RotatedBias
from toque.kernels.cpu import CpuOps
from toque.kernels.ref import RefOps, pages

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


# How far a number may lie from its neighbour: relative, and int8 in steps of its group's scale.
STEPS = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7, "int8": 2**-7, "fp8_e4m3": 2**-3}


@pytest.mark.parametrize("dtype", KV_DTYPES)
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
        kv = copy_of(case.kv)
        results.append((ops.qkv_rope_write(x, qkv, rope, case.batch, kv), kv))
    (query, kv), (ref_query, ref_kv) = results
    assert_sums_close(query, ref_query, hidden)
    # A difference of the projections may also move a number to its neighbour, but only a few.
    pairs = zip(kept(kv, case.batch.write_at), kept(ref_kv, case.batch.write_at), strict=True)
    for ours, theirs in pairs:
        largest = float(np.abs(theirs).max()) if dtype == "int8" else 0.0
        step = STEPS[dtype]
        np.testing.assert_allclose(ours, theirs, rtol=step, atol=1e-4 + largest * step)
        if dtype != "float32":
            assert (ours != theirs).mean() < 0.02


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 80)), min_size=1, max_size=4),
    st.sampled_from([(1, 64), (3, 32), (7, 64), (2, 128), (3, 80), (1, 20), (70, 8), (5, 7)]),
    st.sampled_from([1, 5, 8, 16, 20, 24, 32, 300]),
    st.sampled_from(KV_DTYPES),
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
    case = attention_case(np.random.default_rng(5), [(600, 40)], dim=64)
    ramp = np.linspace(1, 40, 600, dtype=np.float32)
    place = np.arange(600)
    write_at = case.batch.page_table[0, place // 16].astype(np.int64) * 16 + place % 16
    keys, values = kept(case.kv, write_at)
    pages.write(case.kv, write_at, keys * ramp[:, None, None], values)
    out = CPU.attention(case.q, case.kv, case.batch, 1.0)
    expected = REF.attention(case.q, case.kv, case.batch, 1.0)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)


def through_pages(numbers: Floats, dtype: str) -> Floats:
    """What the compiled write path makes of a value of these numbers. Keys are rotated by no angle,
    which leaves all but the sign of zeros and the neighbours of infinities."""
    dim = len(numbers)
    (kv,) = CPU.kv_pages([PagedKV(kv_heads=1, head_dim=dim, dtype=dtype)], 1, 1)
    flat = np.zeros((1, dim // 2), dtype=np.float32)
    one = numbers.reshape(1, 1, dim)
    at = np.zeros(1, dtype=np.int32)
    CPU.backend.rope_write(
        one.copy(), one.copy(), one, None, None, 0.0, flat + 1, flat, at, at.astype(np.int64),
        dtype, 1, kv.pages,
    )  # fmt: skip
    field = pages.fields(kv)
    if np.isfinite(numbers).all():
        scales = field["key_scales"][0, 0, :, 0], field["value_scales"][0, 0, 0]
        vectors = field["keys"][0, 0, :, 0], field["values"][0, 0, 0]
        keys, values = (pages.widen(v, s, dtype) for v, s in zip(vectors, scales, strict=True))
        np.testing.assert_array_equal(keys, values)
    return field["values"].reshape(-1)


def hard_to_round(numbers: Floats) -> Floats:
    """All of them, all halfway points, and their neighbours, of both signs; an even number."""
    between = (numbers[:-1] + numbers[1:]) / 2
    near = [np.nextafter(between, np.float32(sign)) for sign in (9e9, -9e9)]
    ends = np.array([1e30, 3e38, 1e-45, 1e-30, 0.0], dtype=np.float32)
    half = np.concatenate([numbers, between, *near, ends])
    return np.concatenate([half, -half]).astype(np.float32)


HALVES = np.arange(0, 0x7C00, 7, dtype=np.uint16).view(np.float16).astype(np.float32)
BFLOATS = (np.arange(0, 0x7F80, 3, dtype=np.uint32) << 16).view(np.float32)
OTHERS = {
    "float16": (np.append(HALVES, [np.float32(65504), np.float32(65536)]), torch.float16),
    "bfloat16": (BFLOATS, torch.bfloat16),
    "fp8_e4m3": (pages.E4M3_VALUES[:127], torch.float8_e4m3fn),
}


@pytest.mark.parametrize("dtype", OTHERS)
def test_pages_round_as_torch_does(dtype: str) -> None:
    """Ties to even, subnormals, overflow, signed zeros; both the compiled path and numpy's. Torch
    makes NaN of what fp8 cannot hold; here it is cut to 448 while it is finite."""
    known, theirs = OTHERS[dtype]
    with np.errstate(over="ignore"):
        numbers = hard_to_round(known)
    limited = np.clip(numbers, -448, 448) if dtype == "fp8_e4m3" else numbers
    expected = torch.from_numpy(limited).to(theirs).view(torch.uint8).numpy().tobytes()
    assert through_pages(numbers, dtype).tobytes() == expected
    assert pages.narrow(numbers, dtype)[0].tobytes() == expected


@pytest.mark.parametrize("dtype", OTHERS)
def test_what_is_no_number_stays_none(dtype: str) -> None:
    """NaN stays NaN; infinity too, or becomes NaN where there is none. It never becomes finite."""
    lost = np.array([np.nan, -np.nan, np.inf, -np.inf, 1, 2, 3, 4] * 2, dtype=np.float32)
    lost.view(np.uint32)[8] = 0x7F800001  # a NaN whose upper bits alone would be infinity
    for kept_as in (through_pages(lost, dtype), pages.narrow(lost, dtype)[0]):
        back = pages.widen(kept_as, np.zeros(0, np.uint16), dtype).reshape(2, 8)
        assert np.isnan(back[:, :2]).all() and not np.isfinite(back[:, 2:4]).any()
        assert (back[:, 4:] == [1, 2, 3, 4]).all()


def test_bytes_widen_as_torch_does() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(pages.E4M3_VALUES, theirs)
    (kv,) = CPU.kv_pages([PagedKV(1, 256, "fp8_e4m3")], 1, 1)
    pages.fields(kv)["values"][:] = codes
    case = attention_case(np.random.default_rng(0), [(1, 1)], kv_heads=1, group=1, dim=256)
    batch = replace(case.batch, page_table=np.zeros((1, 1), np.int32))
    np.testing.assert_array_equal(CPU.attention(case.q, kv, batch, 1.0)[0], theirs)


@pytest.mark.parametrize("dim", [8, 32, 40, 80])
def test_int8_is_within_half_a_step_of_its_groups_scale(dim: int) -> None:
    """A group of zeros, tiny and huge ones, and one whose NaN does not reach its neighbours."""
    rng = np.random.default_rng(dim)
    vectors = normal(rng, 6, 1, dim) * np.float32([[[1]], [[0]], [[1e-38]], [[1e34]], [[1]], [[1]]])
    vectors[4, 0, 1] = np.nan
    vectors[5, 0, dim - 1] = np.inf
    numbers, scales = pages.narrow(vectors, "int8")
    back = pages.widen(numbers, scales, "int8")
    assert np.isnan(back[4, 0, :32]).all() and np.isfinite(back[4, 0, 32:]).all()
    assert np.isnan(back[5, 0, -1])
    for v, b in zip(vectors[:4, 0], back[:4, 0], strict=True):
        for first in range(0, dim, 32):
            group = v[first : first + 32]
            step = np.abs(group).max() / 127 * 1.01  # rounding the scale up costs below 2^-7
            assert np.abs(group - b[first : first + 32]).max() <= max(step / 2, 2.0**-100)
    for vector in vectors[:, 0]:
        expected = pages.narrow(vector, "int8")[0]
        np.testing.assert_array_equal(through_pages(vector, "int8"), expected)


def rope_of(positions: int, dim: int, factor: float = 1.0) -> RopeTable:
    angles = np.arange(positions)[:, None] * 1e4 ** (-np.arange(dim // 2) / (dim // 2))
    cos, sin = (np.asarray(factor * f(angles), dtype=np.float32) for f in (np.cos, np.sin))
    return RopeTable(cos, sin)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("group", "dim", "block_size"), [(1, 64, 16), (3, 80, 8), (7, 128, 5)])
def test_a_bias_left_out_is_added_on_reading(
    dtype: str, group: int, dim: int, block_size: int
) -> None:
    """With a factor on the angles' table, as yarn has; contexts shorter and longer than a part."""
    rng = np.random.default_rng(dim)
    chunks = [(530, 3), (9, 9), (257, 2)]
    case = attention_case(rng, chunks, group=group, dim=dim, block_size=block_size, dtype=dtype)
    left_out = RotatedBias(4 * normal(rng, 2 * dim), rope_of(530, dim, factor=1.3))
    out = CPU.attention(case.q, case.kv, case.batch, dim**-0.5, left_out)
    expected = REF.attention(case.q, case.kv, case.batch, dim**-0.5, left_out)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    without = REF.attention(case.q, case.kv, case.batch, dim**-0.5)
    assert np.abs(without - expected).max() > 0.1


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("ops", [CPU, REF])
def test_a_large_bias_does_not_cost_the_rest_its_digits(dtype: str, ops: CpuOps | RefOps) -> None:
    """Keys of order 1 with a bias of 200: attention is near that of whole keys in float32."""
    rng = np.random.default_rng(0)
    hidden, dim = 32, 64
    weights = [stored(normal(rng, n * dim, hidden) / 6) for n in (6, 2, 2)]
    bias = np.where(rng.random(2 * dim) < 0.1, 200, 1).astype(np.float32)
    rope, x = rope_of(70, dim), normal(rng, 70, hidden)
    results = {}
    for kv_dtype in ("float32", dtype):
        case = attention_case(rng, [(70, 70)], dtype=kv_dtype)
        qkv = QKV(*map(ops.matrix, weights), None, bias, None, None, None, 1e-6, dim)
        query = ops.qkv_rope_write(x, qkv, rope, case.batch, case.kv) / 40
        apart = qkv.bias_left_out(case.kv.spec)
        assert (apart is None) == (kv_dtype == "float32")
        left_out = None if apart is None else RotatedBias(apart, rope)
        results[kv_dtype] = ops.attention(query, case.kv, case.batch, dim**-0.5, left_out)
    error = np.abs(results[dtype] - results["float32"]).max()
    assert error < {"int8": 0.02, "fp8_e4m3": 0.1}[dtype]


def test_keys_that_are_normed_after_their_bias_are_kept_whole() -> None:
    some = np.ones(64, dtype=np.float32)
    matrix = CPU.matrix(stored(np.ones((64, 8), dtype=np.float32)))
    normed = QKV(matrix, matrix, matrix, None, some, None, None, some, 1e-6, 64)
    assert normed.bias_left_out(PagedKV(1, 64, "int8")) is None


def test_nan_and_infinity_stay_in_their_row() -> None:
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 20, 64), CPU.matrix(stored(normal(rng, 40, 64)))
    clean = CPU.linear(x, weight)
    x[7, 3], x[12, 60] = np.nan, np.inf
    dirty = CPU.linear(x, weight)
    assert np.isnan(dirty[7]).all() and not np.isfinite(dirty[12]).any()
    keep = np.delete(np.arange(20), [7, 12])
    assert dirty[keep].tobytes() == clean[keep].tobytes()


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_nan_in_a_later_token_does_not_reach_earlier_ones(dtype: str) -> None:
    case = attention_case(np.random.default_rng(1), [(50, 50)], dtype=dtype)
    clean = CPU.attention(case.q, case.kv, case.batch, 0.125)
    place = case.batch.write_at[37:38]
    spoiled = np.full((2, 1, 2, 64), np.inf, dtype=np.float32)
    spoiled[0] = np.nan
    pages.write(case.kv, place, *spoiled)
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
