"""Typed reads from a checkpoint's key-value pairs; whatever does not fit is refused by name.

Owns: nothing. Knows: how to say which file and key are at fault. Does not know: what keys mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from toque.errors import ModelError


@dataclass(frozen=True, slots=True)
class Keys:
    """A read-only view of config.json or of GGUF key-values. `prefix` goes before every name.

    A key that is present with null counts as absent. Every method raises ModelError.
    """

    source: str  # the file, for messages
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def refuse(self, key: str, reason: str) -> ModelError:
        """The error to raise about a key: names the file, the key and its value."""
        shown = f"{self.prefix}{key} = {self.get(key)!r}"
        return ModelError(f"{self.source}: {shown} is not supported: {reason}")

    def count(self, key: str, default: int | None = None) -> int:
        """An integer above zero."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise self.refuse(key, "it must be an integer above zero")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise self.refuse(key, "it must be a number")
        if not math.isfinite(value) or value <= 0:
            raise self.refuse(key, "it must be finite and above zero")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def one_of(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        value = self._present(key, default)
        if value not in allowed:
            raise self.refuse(key, f"supported are {', '.join(sorted(allowed))}")
        return str(value)

    def require_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse every key of the table that has a value other than null or a listed one."""
        for key, harmless in neutral.items():
            value = self.get(key)
            if value is not None and value not in harmless:
                raise self.refuse(key, "what it changes is not implemented")

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(f"{self.source}: {self.prefix}{key} is missing")
        return default
