"""The numpy kernels against formulas written otherwise: torch, and a loop in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.cases import KV_DTYPES, Case, attention_case, normal, stored
from toque.kernels.api import Floats, RopeTable
from toque.kernels.ref import RefOps
from toque.kernels.ref.ops import rotate, silu

OPS = RefOps()


def brute_force(case: Case, scale: float) -> Floats:
    """softmax over each token's own keys, one token and head at a time, in float64."""
    group = case.q.shape[1] // case.kv.spec.kv_heads
    out = np.zeros(case.q.shape)
    for chunk in range(len(case.keys)):
        for token in range(case.batch.chunk_starts[chunk], case.batch.chunk_starts[chunk + 1]):
            seen = case.batch.positions[token] + 1
            for head in range(case.q.shape[1]):
                keys = case.keys[chunk][:seen, head // group].astype(np.float64)
                values = case.values[chunk][:seen, head // group].astype(np.float64)
                weights = np.exp(keys @ case.q[token, head].astype(np.float64) * scale)
                out[token, head] = weights @ values / weights.sum()
    return out.reshape(len(case.q), -1)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([1, 3, 7]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(KV_DTYPES),
)
def test_attention_is_a_softmax_over_the_keys_at_or_before_each_token(
    drawn: list[tuple[int, int]], group: int, block_size: int, dtype: str
) -> None:
    chunks = [(max(context, new), new) for context, new in drawn]
    rng = np.random.default_rng(len(chunks))
    case = attention_case(rng, chunks, group=group, dim=8, block_size=block_size, dtype=dtype)
    out = OPS.attention(case.q, case.kv, case.batch, 8**-0.5)
    np.testing.assert_allclose(out, brute_force(case, 8**-0.5), rtol=1e-5, atol=2e-6)


def test_rms_norm_is_torchs() -> None:
    rng = np.random.default_rng(0)
    x, weight = normal(rng, 5, 48), normal(rng, 48)
    theirs = torch.nn.functional.rms_norm(
        torch.from_numpy(x), (48,), torch.from_numpy(weight), 1e-6
    )
    np.testing.assert_allclose(OPS.rms_norm(x, weight, 1e-6), theirs.numpy(), rtol=1e-6, atol=1e-6)


def test_rotation_multiplies_complex_pairs() -> None:
    """Pair (i, i + dim / 2) is a complex number that turns by its angle."""
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 100, (30, 8)).astype(np.float32)
    positions = np.array([0, 29, 7], dtype=np.int32)
    x = normal(rng, 3, 2, 16)
    turned = torch.view_as_complex(
        torch.from_numpy(np.stack([x[..., :8], x[..., 8:]], axis=-1))
    ) * torch.polar(torch.ones(3, 1, 8), torch.from_numpy(angles[positions][:, None]))
    expected = np.concatenate([turned.real.numpy(), turned.imag.numpy()], axis=-1)
    out = rotate(x, RopeTable(np.cos(angles), np.sin(angles)), positions)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_silu_is_torchs_and_does_not_overflow() -> None:
    x = np.concatenate([np.linspace(-200, 200, 999), [0.0]]).astype(np.float32)
    theirs = torch.nn.functional.silu(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(silu(x), theirs, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_and_its_sum_are_torchs(with_bias: bool) -> None:
    rng = np.random.default_rng(0)
    x, weight, residual = normal(rng, 3, 7), normal(rng, 5, 7), normal(rng, 3, 5)
    bias = normal(rng, 5) if with_bias else None
    theirs = torch.nn.functional.linear(
        torch.from_numpy(x),
        torch.from_numpy(weight),
        None if bias is None else torch.from_numpy(bias),
    ).numpy()
    matrix = OPS.matrix(stored(weight))
    np.testing.assert_allclose(OPS.linear(x, matrix, bias), theirs, rtol=1e-5, atol=1e-6)
    added = OPS.linear_add(x, matrix, bias, residual)
    np.testing.assert_allclose(added, theirs + residual, rtol=1e-5, atol=1e-6)
