"""How far one set of logits is from another: Kullback-Leibler divergence and what goes with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Logits = NDArray[np.float32]  # [rows, vocab]

SLICE_ROWS = 16  # float64 temporaries of a large vocabulary stay small


def log_softmax(logits: Logits) -> Doubles:
    """Natural-log probabilities, in float64: [rows, vocab]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    out: Doubles = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return out


def kl_divergence(reference: Logits, other: Logits) -> Doubles:
    """sum p (log p - log q), nats per row; p of `reference`. Both [rows, vocab] -> [rows].

    It is what a reader of q pays for not knowing p, and never negative but for rounding.
    """
    log_p, log_q = log_softmax(reference), log_softmax(other)
    out: Doubles = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return out


@dataclass(slots=True)
class Divergence:
    """Collected row by row, in the order of the text's positions."""

    kl: list[float] = field(default_factory=list)  # nats
    same_top: list[bool] = field(default_factory=list)  # the likeliest token is the same
    max_logit_difference: float = 0.0

    def add(self, reference: Logits, other: Logits) -> None:
        """Both [rows, vocab]. Raises ValueError for logits that are not numbers."""
        if not np.isfinite(other).all():
            raise ValueError("logits that are infinite or not numbers")
        for begin in range(0, len(reference), SLICE_ROWS):
            rows = slice(begin, begin + SLICE_ROWS)
            self._add(reference[rows], other[rows])

    def _add(self, reference: Logits, other: Logits) -> None:
        self.kl.extend(kl_divergence(reference, other).tolist())
        same = reference.argmax(axis=-1) == other.argmax(axis=-1)
        self.same_top.extend(same.tolist())
        difference = float(np.abs(reference - other).max())
        self.max_logit_difference = max(self.max_logit_difference, difference)

    @property
    def mean_kl(self) -> float:
        return float(np.mean(self.kl))

    @property
    def top1_agreement(self) -> float:
        return float(np.mean(self.same_top))
