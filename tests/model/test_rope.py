"""Rotary tables against transformers' formulas over drawn parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from toque.layers.rope import attention_factor, inverse_frequencies, rope_table
from toque.types import RopeSpec

THETAS = st.sampled_from([500.0, 1e4, 1e6])
HEAD_DIMS = st.sampled_from([16, 64, 80, 128])
FACTORS = st.floats(1.0, 32.0)
CONTEXTS = st.sampled_from([32, 512, 4096, 8192])
QUICK = settings(max_examples=60, deadline=None)


def reference(
    kind: str, theta: float, head_dim: int, context: int, parameters: dict[str, Any], length: int
) -> tuple[np.ndarray, float]:
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    return inverse.numpy(), factor


def check(
    kind: str,
    theta: float,
    head_dim: int,
    context: int,
    parameters: dict[str, Any],
    length: int = 64,
) -> None:
    inverse, factor = reference(kind, theta, head_dim, context, parameters, length)
    ours = {"original_max_position_embeddings": float(context), **parameters}
    spec = RopeSpec(theta=theta, kind=kind, parameters=ours)
    np.testing.assert_allclose(inverse_frequencies(spec, head_dim, length), inverse, rtol=3e-5)
    assert attention_factor(spec) == pytest.approx(factor, rel=1e-6)


@QUICK
@given(theta=THETAS, head_dim=HEAD_DIMS, factor=FACTORS)
def test_linear(theta: float, head_dim: int, factor: float) -> None:
    check("linear", theta, head_dim, 512, {"factor": factor})


@QUICK
@given(
    theta=THETAS,
    head_dim=HEAD_DIMS,
    factor=FACTORS,
    context=CONTEXTS,
    length=st.integers(1, 20000),
)
def test_dynamic_is_the_one_shot_base_for_the_longest_sequence(
    theta: float, head_dim: int, factor: float, context: int, length: int
) -> None:
    check("dynamic", theta, head_dim, context, {"factor": factor}, length)


@QUICK
@given(
    theta=THETAS,
    head_dim=HEAD_DIMS,
    factor=FACTORS,
    context=CONTEXTS,
    low=st.floats(0.5, 2.0),
    high=st.floats(2.5, 8.0),
)
def test_llama3(
    theta: float, head_dim: int, factor: float, context: int, low: float, high: float
) -> None:
    parameters = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    parameters["original_max_position_embeddings"] = context
    check("llama3", theta, head_dim, context, parameters)


@QUICK
@given(
    theta=THETAS,
    head_dim=HEAD_DIMS,
    factor=FACTORS,
    context=CONTEXTS,
    optional=st.fixed_dictionaries(
        {},
        optional={
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "mscale": st.floats(0.2, 2.0),
            "mscale_all_dim": st.floats(0.2, 2.0),
            "attention_factor": st.floats(0.5, 2.0),
            "truncate": st.booleans(),
        },
    ),
)
def test_yarn(
    theta: float, head_dim: int, factor: float, context: int, optional: dict[str, Any]
) -> None:
    parameters = {"factor": factor, "original_max_position_embeddings": context, **optional}
    check("yarn", theta, head_dim, context, parameters)


def test_frequency_factors_divide_each_frequency() -> None:
    plain = RopeSpec(theta=1e4)
    divided = RopeSpec(theta=1e4, frequency_factors=(1.0, 2.0, 4.0, 8.0))
    ratio = inverse_frequencies(plain, 8, 1) / inverse_frequencies(divided, 8, 1)
    np.testing.assert_allclose(ratio, [1.0, 2.0, 4.0, 8.0])


def test_table_is_exact_far_out() -> None:
    """Angles are formed in float64: at position 100 000 a float32 product is off by 1e-3."""
    table = rope_table(RopeSpec(theta=1e4), 8, 100_001)
    assert table.cos.dtype == table.sin.dtype == np.float32
    assert table.cos.shape == table.sin.shape == (100_001, 4)
    angle = np.float64(100_000) * np.float64(10000.0) ** (-1 / 4)
    assert table.cos[100_000, 1] == np.float32(np.cos(angle))
    assert table.sin[100_000, 1] == np.float32(np.sin(angle))


def test_attention_factor_scales_cos_and_sin() -> None:
    parameters = {"factor": 4.0, "original_max_position_embeddings": 32.0, "attention_factor": 0.5}
    table = rope_table(RopeSpec(theta=1e4, kind="yarn", parameters=parameters), 16, 20)
    np.testing.assert_allclose(np.hypot(table.cos, table.sin), 0.5, rtol=1e-6)
