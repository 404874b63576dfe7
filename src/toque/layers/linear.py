"""A matrix and its optional bias."""

from __future__ import annotations

from dataclasses import dataclass

from toque.kernels.api import Floats, Matrix, Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias: [rows, in] -> [rows, out]."""

    ops: Ops
    weight: Matrix  # [out, in]
    bias: Floats | None = None  # [out]

    def __call__(self, x: Floats) -> Floats:
        return self.ops.linear(x, self.weight, self.bias)

    def add_to(self, residual: Floats, x: Floats) -> Floats:
        """residual + self(x), fused: the way back into the residual stream."""
        return self.ops.linear_add(x, self.weight, self.bias, residual)
