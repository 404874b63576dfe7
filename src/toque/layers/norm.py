"""Root-mean-square normalisation (arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

from toque.kernels.api import Floats, Ops


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """[rows, hidden] -> [rows, hidden]."""

    ops: Ops
    weight: Floats  # [hidden]
    eps: float

    def __call__(self, x: Floats) -> Floats:
        return self.ops.rms_norm(x, self.weight, self.eps)
