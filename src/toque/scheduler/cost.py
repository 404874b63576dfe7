"""How long a step will take, learned from the steps before it.

Owns: the running sums of a least-squares fit. Knows: a plan's sizes. Does not know: the hardware.

time = constant + a * tokens + b * pairs, where pairs is the sum over chunks of queries x keys.
Old steps fade, so that the fit follows the machine; coefficients are kept at or above zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toque.types import StepPlan

FADE = 0.98  # weight of the past at each step: the last 50 or so count
SCALE: NDArray[np.float64] = np.array([1.0, 1e2, 1e5])  # to one order of magnitude


def features(plan: StepPlan) -> NDArray[np.float64]:  # [3]
    """1, tokens (a scored one counts twice), query-key pairs; scaled."""
    pairs = sum(chunk.num_tokens * (chunk.start + chunk.num_tokens) for chunk in plan.chunks)
    tokens = plan.num_tokens + sum(len(chunk.targets) for chunk in plan.chunks)
    return np.array([1.0, tokens, pairs], dtype=np.float64) / SCALE


class StepCost:
    def __init__(self, prefill_tokens_per_s: float) -> None:
        """Starts from the one rate that was measured at start-up."""
        prior = np.array([0.0, 1e3 / prefill_tokens_per_s, 0.0]) * SCALE  # ms
        self._gram = np.eye(3) * 1e-2  # [3, 3]
        self._moment = self._gram @ prior  # [3]
        self._coefficients = prior  # ms per scaled feature

    def predicted_ms(self, plan: StepPlan) -> float:
        return float(features(plan) @ self._coefficients)

    def observe(self, plan: StepPlan, measured_ms: float) -> None:
        x = features(plan)
        self._gram = FADE * self._gram + np.outer(x, x) + np.eye(3) * 1e-9
        self._moment = FADE * self._moment + x * measured_ms
        self._coefficients = np.maximum(np.linalg.solve(self._gram, self._moment), 0.0)
