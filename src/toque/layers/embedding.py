"""Token embedding: rows of a table that may be packed, and may be the output head's matrix too."""

from __future__ import annotations

from dataclasses import dataclass

from toque.kernels.api import Floats, Ints, Matrix, Ops


@dataclass(frozen=True, slots=True)
class Embedding:
    """ids [tokens] -> [tokens, hidden]."""

    ops: Ops
    table: Matrix  # [vocab, hidden]

    def __call__(self, ids: Ints) -> Floats:
        return self.ops.embed(self.table, ids)
