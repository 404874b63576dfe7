"""Plain numpy kernels: slow, short and meant to be read. The oracle of every other kernel set."""

from __future__ import annotations

from toque.kernels.ref.ops import RefOps

__all__ = ["RefOps"]
