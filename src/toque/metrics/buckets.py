"""`--custom-histogram-buckets`: other bounds for histograms, by name.

Owns: nothing. Knows: the table's histograms, under our names and vLLM's. Does not know: values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from math import isfinite
from typing import Any, TypeAlias

from toque.errors import ConfigError
from toque.metrics.compat import VLLM_PREFIX
from toque.metrics.table import PREFIX, TABLE

Buckets: TypeAlias = Mapping[str, tuple[float, ...]]  # by the row's name

FLAG = "--custom-histogram-buckets"


def custom_buckets(text: str | None) -> Buckets:
    """A JSON object: name -> increasing numbers, which become the upper bounds (+Inf comes by
    itself). Raises ConfigError, which names what is wrong."""
    if text is None:
        return {}
    try:
        asked = json.loads(text, object_pairs_hook=_pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} is no JSON: {error}") from error
    if not isinstance(asked, dict):
        raise ConfigError(f"{FLAG} must be a JSON object: a histogram's name -> its bounds")
    known = _names()
    found: dict[str, tuple[float, ...]] = {}
    for name, bounds in asked.items():
        if name not in known:
            raise ConfigError(f"{FLAG}: there is no histogram {name!r}")
        if known[name] in found:
            raise ConfigError(f"{FLAG} has {known[name]!r} twice, the second time as {name!r}")
        found[known[name]] = _bounds(name, bounds)
    return found


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json alone would take the last of equal names."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{FLAG} has {twice!r} twice")
    return found


def _names() -> dict[str, str]:
    """What a histogram may be called -> its row's name."""
    found: dict[str, str] = {}
    for row in TABLE:
        if row.kind == "histogram":
            found |= {row.name: row.name, PREFIX + row.name: row.name}
            if row.vllm is not None:
                theirs = row.vllm or row.name
                found |= {theirs: row.name, VLLM_PREFIX + theirs: row.name}
    return found


def _bounds(name: str, bounds: object) -> tuple[float, ...]:
    wrong = ConfigError(f"{FLAG}: the bounds of {name!r} must be a list of increasing numbers")
    if not isinstance(bounds, list) or not bounds:
        raise wrong
    if not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds):
        raise wrong
    try:
        numbers = tuple(float(bound) for bound in bounds)
    except OverflowError as error:
        raise wrong from error
    if not all(map(isfinite, numbers)) or any(b <= a for a, b in pairwise(numbers)):
        raise wrong
    return numbers
