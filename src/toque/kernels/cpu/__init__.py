"""Compiled kernels (C++, `csrc/`). Importing this fails where the extension has not been built."""

from __future__ import annotations

from toque.kernels.cpu.ops import CpuOps

__all__ = ["CpuOps"]
