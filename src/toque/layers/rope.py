"""Rotary position embedding: the table of angles for every position a model may serve.

The base method is arXiv:2104.09864. `kind` says how a context beyond the trained one is reached:
linear (arXiv:2306.15595), dynamic (NTK-aware base), llama3 (by wavelength, Llama 3.1) and yarn
(arXiv:2309.00071). Parameter names are Hugging Face's. Computed once at load, in float64.

Dynamic is defined elsewhere as a base that grows with the sequence; keys that were rotated with an
earlier base would then be wrong, and the answer would depend on how a prompt was cut. Here the base
is fixed by the longest sequence that the engine admits: what a one-shot forward over exactly that
many tokens uses if they exceed the trained context, the plain base otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from toque.kernels.api import RopeTable
from toque.types import RopeSpec

Doubles = NDArray[np.float64]


def rope_table(rope: RopeSpec, head_dim: int, max_positions: int) -> RopeTable:
    """cos and sin for positions 0 .. max_positions - 1, the attention factor multiplied in.

    Raises KeyError for a parameter that `kind` needs and the spec lacks (the readers of configs
    see to it that none does).
    """
    inverse = inverse_frequencies(rope, head_dim, max_positions)  # [head_dim / 2]
    angles = np.arange(max_positions)[:, None] * inverse  # [positions, head_dim / 2]
    scale = attention_factor(rope)
    return RopeTable(
        cos=(np.cos(angles) * scale).astype(np.float32),  # [positions, head_dim / 2]
        sin=(np.sin(angles) * scale).astype(np.float32),  # [positions, head_dim / 2]
    )


def inverse_frequencies(rope: RopeSpec, head_dim: int, max_positions: int) -> Doubles:
    """Radians per position of each dimension pair: [head_dim / 2]."""
    inverse = KINDS[rope.kind](rope, head_dim, max_positions)
    if rope.frequency_factors:
        inverse = inverse / np.asarray(rope.frequency_factors, np.float64)
    return inverse


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by: 1 but for yarn, whose softer attention it restores."""
    if rope.kind != "yarn":
        return 1.0
    given = rope.parameters
    if "attention_factor" in given:
        return given["attention_factor"]
    factor, above, below = given["factor"], given.get("mscale"), given.get("mscale_all_dim")
    if above and below:
        return _yarn_scale(factor, above) / _yarn_scale(factor, below)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _plain(theta: float, head_dim: int) -> Doubles:
    exponents = np.arange(0, head_dim, 2) / head_dim  # [head_dim / 2]
    return np.power(theta, -exponents, dtype=np.float64)


def _default(rope: RopeSpec, head_dim: int, max_positions: int) -> Doubles:
    return _plain(rope.theta, head_dim)


def _linear(rope: RopeSpec, head_dim: int, max_positions: int) -> Doubles:
    return _plain(rope.theta, head_dim) / rope.parameters["factor"]


def _dynamic(rope: RopeSpec, head_dim: int, max_positions: int) -> Doubles:
    factor = rope.parameters["factor"]
    stretch = max(1.0, max_positions / rope.parameters["original_max_position_embeddings"])
    growth = (factor * stretch - (factor - 1.0)) ** (head_dim / (head_dim - 2))
    return _plain(rope.theta * growth, head_dim)


def _llama3(rope: RopeSpec, head_dim: int, max_positions: int) -> Doubles:
    """Slow pairs are divided by the factor, fast ones kept, those between blended linearly."""
    given = rope.parameters
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    inverse = _plain(rope.theta, head_dim)  # [head_dim / 2]
    turns = given["original_max_position_embeddings"] * inverse / (2 * math.pi)
    keep: Doubles = np.clip((turns - low) / (high - low), 0.0, 1.0)  # [head_dim / 2]
    return inverse * (keep + (1.0 - keep) / given["factor"])


def _yarn(rope: RopeSpec, head_dim: int, max_positions: int) -> Doubles:
    """As llama3, but the blend is linear in the pair's index instead of its frequency."""
    given = rope.parameters
    low = _pair_of_turns(rope, head_dim, given.get("beta_fast") or 32.0)
    high = _pair_of_turns(rope, head_dim, given.get("beta_slow") or 1.0)
    if given.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a ramp of no width would divide by zero
    ramp: Doubles = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)  # [head_dim / 2]
    inverse = _plain(rope.theta, head_dim)
    return inverse * ((1.0 - ramp) + ramp / given["factor"])


def _pair_of_turns(rope: RopeSpec, head_dim: int, turns: float) -> float:
    """Index of the pair that makes so many full turns over the original context."""
    original = rope.parameters["original_max_position_embeddings"]
    return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


KINDS: dict[str, Callable[[RopeSpec, int, int], Doubles]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
