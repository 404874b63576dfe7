"""Random weights for a model of which only the config is at hand (`--load-format dummy`).

The same spec and seed give the same weights. Matrices keep a unit-variance input at unit variance,
but for the head (or the tied table), which spreads the logits so that greedy choices differ.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from toque.model.weights import HF, TOP, Place, places
from toque.types import ModelSpec, StoredTensor

LOGIT_SPREAD = 3.0  # standard deviation


def dummy_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, StoredTensor]:
    """Every tensor of the spec by Hugging Face's names, kind F32."""
    tensors = {}
    for index, (name, place) in enumerate(places(spec, HF).items()):
        rng = np.random.default_rng((seed, index))  # one stream each: independent of their order
        values = _values(place, rng)
        tensors[name] = StoredTensor(name, "F32", place.shape, values.reshape(-1).view(np.uint8))
    return tensors


def _values(place: Place, rng: np.random.Generator) -> NDArray[np.float32]:
    """Uniform, which is several times faster to draw than normal: around 1 for norm weights,
    around 0 for biases and matrices."""
    centre = 1.0 if place.weight.role.endswith("norm") else 0.0
    unit = rng.random(place.shape, np.float32)  # deviates by 1 / sqrt(12)
    unit -= np.float32(0.5)
    unit *= np.float32(math.sqrt(12.0) * _deviation(place))
    unit += np.float32(centre)
    return unit


def _deviation(place: Place) -> float:
    if len(place.shape) == 1:
        return 0.1
    spread = LOGIT_SPREAD if place.weight in TOP else 1.0
    return spread / math.sqrt(place.shape[1])
