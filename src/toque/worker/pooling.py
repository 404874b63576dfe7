"""From the hidden states of a prompt to one vector.

Owns: per row, the sum so far. Knows: states. Does not know: prompts, chunks, why a state counts.

The sum is taken state by state in the order of the tokens, in float64: its bits do not depend on
how the prompt was cut into chunks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from toque.kernels.api import Floats


class StatePool:
    """The mean of the states that were added; of one state, that state."""

    def __init__(self) -> None:
        self._sum: NDArray[np.float64] | None = None

    def add(self, states: Floats) -> None:  # [tokens, hidden]
        for state in states.astype(np.float64):
            self._sum = state if self._sum is None else self._sum + state

    def vector(self) -> bytes:
        """The mean's direction: [hidden] little-endian float32, of length 1.

        Raises:
            ValueError: there is none, as nothing was added or a state is not a number.
        """
        if self._sum is None:
            raise ValueError("no state to pool")
        length = math.sqrt(math.fsum((self._sum * self._sum).tolist()))
        if not 0.0 < length < math.inf:
            raise ValueError("the states have no direction")
        return (self._sum / length).astype("<f4").tobytes()
