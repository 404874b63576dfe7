"""The gated feed-forward layer: down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from toque.kernels.api import Floats, Matrix, Ops
from toque.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class FeedForward:
    """(x, residual) both [tokens, hidden] -> the new residual [tokens, hidden]."""

    ops: Ops
    gate: Linear  # [intermediate, hidden]
    up: Linear  # [intermediate, hidden]
    down: Linear  # [hidden, intermediate]

    def __call__(self, x: Floats, residual: Floats) -> Floats:
        inner = self.ops.gate_up_silu(
            x, self.gate.weight, self.up.weight, self.gate.bias, self.up.bias
        )  # [tokens, intermediate]
        return self.down.add_to(residual, inner)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return (self.gate.weight, self.up.weight, self.down.weight)
