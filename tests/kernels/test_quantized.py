"""Products with packed integer weights: against the same arithmetic in numpy, and against float32.

The scale of an output is sqrt(sum of (x * w)^2), what a sum of such terms with random signs comes
to. Where the instruction set has no fused multiply-add, each group of 32 inputs rounds twice more
than numpy's twin, by 2^-24 of the sum so far at most; that adds up like a random walk: up to 1000
inputs it stays below 1e-6 of the scale, from there on it grows with the root of their number. One
wrong term is of the order of the scale itself.
"""

from __future__ import annotations

import mmap
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cases import attention_case, copy_of, kept, normal, packed_bytes, stored
from toque.kernels.api import QKV, Floats, RopeTable
from toque.kernels.cpu import CpuOps
from toque.kernels.ref import RefOps, quantized
from toque.kernels.ref.dequantize import KINDS, dequantize
from toque.kernels.ref.ops import silu
from toque.types import StoredTensor

CPU, REF = CpuOps(2), RefOps()
QUANTIZED = [kind for kind in KINDS if kind not in ("F32", "F16", "BF16")]
Rng = np.random.Generator


def drawn(rng: Rng, kind: str, out: int, blocks: int) -> StoredTensor:
    """A weight of `blocks` blocks in each row, any integers and scales."""
    inputs = blocks * KINDS[kind].values
    return StoredTensor("w", kind, (out, inputs), packed_bytes(rng, kind, out * blocks))


def spread(x: Floats, weight: StoredTensor) -> Floats:
    """The scale of each output: [rows, out]."""
    w = dequantize(weight.kind, weight.data, weight.shape).astype(np.float64)
    return np.sqrt(np.square(x.astype(np.float64)) @ np.square(w).T) + 1e-30


def assert_equal_arithmetic(ours: Floats, twin: Floats, scale: Floats, inputs: int) -> None:
    assert ours.shape == twin.shape and ours.dtype == np.float32
    assert float((np.abs(ours - twin) / scale).max()) < 1e-6 * max(1.0, inputs / 1000) ** 0.5


@pytest.mark.parametrize("kind", QUANTIZED)
@given(st.integers(1, 70), st.integers(1, 5), st.integers(1, 50), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=30)
def test_linear(
    kind: str, rows: int, blocks: int, out: int, with_bias: bool, with_residual: bool
) -> None:
    rng = np.random.default_rng(rows * 50 + out)
    weight = drawn(rng, kind, out, blocks)
    x = normal(rng, rows, weight.shape[1]) * np.float32(10.0 ** rng.integers(-6, 6))
    scale = spread(x, weight)
    expected = quantized.linear(x, quantized.lines(weight))
    bias = normal(rng, out) if with_bias else None
    residual = normal(rng, rows, out) if with_residual else None
    matrix = CPU.matrix(weight)
    if bias is not None:
        expected, scale = expected + bias, scale + np.abs(bias)
    if residual is not None:
        expected, scale = expected + residual, scale + np.abs(residual)
        ours = CPU.linear_add(x, matrix, bias, residual)
    else:
        ours = CPU.linear(x, matrix, bias)
    assert_equal_arithmetic(ours, expected, scale, weight.shape[1])


@pytest.mark.parametrize(("kind", "rows"), list(product(QUANTIZED, (1, 3, 7, 200))))
def test_long_rows(kind: str, rows: int) -> None:
    """As many inputs as the default model's down projection has; several parts of a panel."""
    rng = np.random.default_rng(rows)
    weight = drawn(rng, kind, 33, 4864 // KINDS[kind].values)
    x = normal(rng, rows, weight.shape[1])
    twin = quantized.linear(x, quantized.lines(weight))
    assert_equal_arithmetic(CPU.linear(x, CPU.matrix(weight)), twin, spread(x, weight), 4864)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_error_against_float32_is_that_of_rounding_the_inputs(kind: str) -> None:
    """Each input is off by at most half a step, 2^-14 of its group's largest: a sum of those is a
    bound that always holds, and with random signs far less comes out."""
    rng = np.random.default_rng(5)
    weight = drawn(rng, kind, 64, 1024 // KINDS[kind].values)
    x = normal(rng, 16, 1024)
    w = dequantize(kind, weight.data, weight.shape).astype(np.float64)
    exact = x.astype(np.float64) @ w.T
    error = np.abs(CPU.linear(x, CPU.matrix(weight)) - exact)
    largest = np.abs(x.reshape(16, -1, 32)).max(-1)  # [rows, groups]
    weights = np.abs(w.reshape(64, -1, 32)).sum(-1)  # [out, groups]
    assert (error <= largest @ weights.T / 16382 + 1e-5 * spread(x, weight)).all()
    relative = np.sqrt(np.square(error).mean() / np.square(exact).mean())
    assert relative < 1e-4  # a step is 2.5 / 8191 of a deviation; 1 / sqrt(12) of it is 9e-5


@pytest.mark.parametrize("kinds", list(product(["Q8_0", "Q4_K", "F16"], ["Q5_0", "Q6_K", "F32"])))
@pytest.mark.parametrize("rows", [1, 9])
def test_gate_up_silu(kinds: tuple[str, str], rows: int) -> None:
    """Two kinds in one op, one of them possibly not quantized, with biases and without."""
    rng = np.random.default_rng(rows)
    gate, up = (drawn(rng, kind, 37, 512 // KINDS[kind].values) for kind in kinds)
    x = normal(rng, rows, 512) / 64
    biases = (normal(rng, 37), normal(rng, 37))
    matrices = (CPU.matrix(gate), CPU.matrix(up))
    for gate_bias, up_bias in (biases, (None, None), (biases[0], None), (None, biases[1])):
        ours = CPU.gate_up_silu(x, *matrices, gate_bias, up_bias)
        g, u = (
            product_of(x, w) + (0 if b is None else b)
            for w, b in ((gate, gate_bias), (up, up_bias))
        )
        np.testing.assert_allclose(ours, silu(g) * u, rtol=1e-5, atol=1e-5 * float(np.abs(u).max()))


def product_of(x: Floats, weight: StoredTensor) -> Floats:
    """In the arithmetic that the kind of weight gets."""
    if weight.kind in QUANTIZED:
        return quantized.linear(x, quantized.lines(weight))
    return REF.linear(x, REF.matrix(weight))


@pytest.mark.parametrize("kinds", [("Q5_0", "Q5_0", "Q8_0"), ("Q4_K", "F32", "Q6_K")])
def test_qkv_of_several_kinds(kinds: tuple[str, str, str]) -> None:
    """One rounding of the input serves all three; rotated by no angle, they stay as they are."""
    rng = np.random.default_rng(0)
    case = attention_case(rng, [(21, 3), (1, 1)], dim=64)
    sizes = (6 * 64, 2 * 64, 2 * 64)
    weights = [
        drawn(rng, kind, out, 256 // KINDS[kind].values)
        for kind, out in zip(kinds, sizes, strict=True)
    ]
    x = normal(rng, 4, 256)
    rope = RopeTable(np.ones((40, 32), np.float32), np.zeros((40, 32), np.float32))
    qkv = QKV(*map(CPU.matrix, weights), None, None, None, None, None, norm_eps=0.0, head_dim=64)
    kv = copy_of(case.kv)
    query = CPU.qkv_rope_write(x, qkv, rope, case.batch, kv)
    got = (query, *kept(kv, case.batch.write_at))
    for ours, weight in zip(got, weights, strict=True):
        scale = 10 * spread(x, weight)
        assert_equal_arithmetic(ours.reshape(4, -1), product_of(x, weight), scale, 256)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize(("rows", "inputs", "out"), [(1, 7, 5), (9, 600, 33), (200, 256, 16)])
def test_floats_of_two_bytes_stay_so_and_multiply_in_float32(
    kind: str, rows: int, inputs: int, out: int
) -> None:
    rng = np.random.default_rng(inputs)
    weight = drawn(rng, kind, out, inputs)
    x, matrix = normal(rng, rows, inputs), CPU.matrix(weight)
    assert matrix.nbytes == -(-out // 16) * 16 * inputs * 2
    expected = REF.linear(x, REF.matrix(weight))
    np.testing.assert_allclose(CPU.linear(x, matrix), expected, rtol=1e-6, atol=inputs * 2.0**-22)


BYTES_PER_WEIGHT = {
    "Q4_0": 0.5625,
    "Q4_1": 0.625,
    "Q4_K": 0.578125,
    "Q5_0": 0.6875,
    "Q5_1": 0.75,
    "Q5_K": 0.703125,
    "Q6_K": 0.8203125,
    "Q8_0": 1.0625,
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_size_is_the_packed_one(kind: str) -> None:
    weight = drawn(np.random.default_rng(0), kind, 32, 2)
    assert CPU.matrix(weight).nbytes == BYTES_PER_WEIGHT[kind] * 32 * weight.shape[1]


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("rows", [1, 20])
def test_nan_and_infinity_stay_in_their_row(kind: str, rows: int) -> None:
    """A group that is not all numbers has no scale: every output of its row is NaN."""
    rng = np.random.default_rng(0)
    weight = drawn(rng, kind, 40, 512 // KINDS[kind].values)
    x, matrix = normal(rng, 20, 512), CPU.matrix(weight)
    clean = CPU.linear(x, matrix)
    for row, value in ((7, np.nan), (12, np.inf), (15, -np.inf)):
        x[row, 100 + row] = value
    dirty = np.concatenate([CPU.linear(x[i : i + rows], matrix) for i in range(0, 20, rows)])
    assert np.isnan(dirty[[7, 12, 15]]).all()
    assert np.isnan(quantized.linear(x, quantized.lines(weight))[[7, 12, 15]]).all()
    keep = np.delete(np.arange(20), [7, 12, 15])
    assert dirty[keep].tobytes() == clean[keep].tobytes()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_inputs_of_any_magnitude(kind: str) -> None:
    """Zeros, numbers near the end of float32's range at either side, and both in one group."""
    rng = np.random.default_rng(0)
    weight = drawn(rng, kind, 20, 4)
    x = normal(rng, 6, 128)
    x[0] = 0
    x[1] *= np.float32(1e-38)
    x[2] *= np.float32(1e30)
    x[3, ::2] *= np.float32(1e-30)
    x[4] *= np.float32(1e-31)  # below and above the smallest group's limit
    x[5, :64] = np.float32(1e-45)
    ours = CPU.linear(x, CPU.matrix(weight))
    assert not ours[:2].any()
    twin = quantized.linear(x, quantized.lines(weight))
    assert_equal_arithmetic(ours[2:], twin[2:], spread(x, weight)[2:], 128)


def test_halfway_inputs_go_to_the_even_integer() -> None:
    """Weight 1: the output is the rounded input itself. The largest of the group sets the step."""
    weight = StoredTensor("w", "Q8_0", (1, 32), one_in(0, 32))
    x = np.zeros((6, 32), dtype=np.float32)
    x[:, 31] = 8191
    x[:, 0] = [0.5, 1.5, 2.5, -0.5, -1.5, 8190.5]
    out = CPU.linear(x, CPU.matrix(weight))[:, 0]
    assert out.tolist() == [0, 2, 2, 0, -2, 8190]


def one_in(place: int, inputs: int) -> np.ndarray:
    """A Q8_0 row that is 1 at `place` and 0 elsewhere."""
    blocks = np.zeros(inputs // 32, dtype=KINDS["Q8_0"].layout)
    blocks["d"] = 1
    blocks["q"][place // 32, place % 32] = 1
    return blocks.view(np.uint8).reshape(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_bytes_make_the_same_matrix_without_a_copy(kind: str) -> None:
    """What a cache file does: the bytes are position-independent, and mapped."""
    rng = np.random.default_rng(0)
    weight = drawn(rng, kind, 37, 512 // KINDS[kind].values)
    matrix, x = CPU.matrix(weight), normal(rng, 6, 512)
    packed = matrix.packed
    assert packed.nbytes == matrix.nbytes and not packed.flags.writeable
    assert packed.ctypes.data % 64 == 0
    mapped = mmap.mmap(-1, packed.nbytes + 64)
    mapped[64:] = packed.tobytes()
    expected = CPU.linear(x, matrix).tobytes()
    del matrix
    assert packed.tobytes() == mapped[64:]  # the view keeps the matrix alive
    lent = np.frombuffer(mapped, dtype=np.uint8, offset=64)
    again = CPU.backend.matrix_of(kind, lent, 37, 512)
    assert again.packed.ctypes.data == lent.ctypes.data
    assert again.shape == (37, 512) and again.kind == kind
    del lent
    assert CPU.linear(x, again).tobytes() == expected


def test_packed_bytes_that_do_not_fit_are_refused() -> None:
    matrix = CPU.matrix(stored(normal(np.random.default_rng(0), 16, 32)))
    packed = np.concatenate([matrix.packed, matrix.packed])
    start = -packed.ctypes.data % 64
    aligned = packed[start : start + matrix.nbytes]
    assert CPU.backend.matrix_of("F32", aligned, 16, 32).shape == (16, 32)
    with pytest.raises(ValueError, match="size"):
        CPU.backend.matrix_of("F32", aligned[:-4], 16, 32)
    with pytest.raises(ValueError, match="size"):
        CPU.backend.matrix_of("Q8_0", aligned, 16, 32)
    with pytest.raises(ValueError, match="blocks"):
        CPU.backend.matrix_of("Q8_0", aligned, 16, 33)
    with pytest.raises(ValueError, match="multiple of 64"):
        CPU.backend.matrix_of("F32", packed[start + 4 : start + 4 + matrix.nbytes], 16, 32)
    with pytest.raises(ValueError, match="unknown"):
        CPU.backend.matrix_of("Q9", aligned, 16, 32)
