"""Loading that can be watched: how many bytes of the weights have been taken so far.

Owns: the count. Knows: WeightSource. Does not know: who looks, how it is shown.
"""

from __future__ import annotations

from collections.abc import Callable

from toque.kernels.api import Floats, Matrix, WeightSource
from toque.types import StoredTensor


class Watched:
    """A WeightSource in front of another; `taken` is told the total after each tensor."""

    def __init__(self, source: WeightSource, taken: Callable[[int], None]) -> None:
        self._source = source
        self._taken = taken
        self._so_far_bytes = 0

    def matrix(self, tensor: StoredTensor) -> Matrix:
        made = self._source.matrix(tensor)
        self._count(tensor)
        return made

    def vector(self, tensor: StoredTensor) -> Floats:
        made = self._source.vector(tensor)
        self._count(tensor)
        return made

    def _count(self, tensor: StoredTensor) -> None:
        self._so_far_bytes += tensor.stored.nbytes  # `data` would read what may be mapped already
        self._taken(self._so_far_bytes)
