"""The KV cache's bookkeeping: which page belongs to whom. Page ids only, never a tensor."""

from __future__ import annotations

from toque.memory.manager import CacheManager, Match
from toque.memory.radix import Node

__all__ = ["CacheManager", "Match", "Node"]
