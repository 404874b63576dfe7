"""Classes of service: how they are written, and when a request has been served as its class says.

Owns: nothing. Knows: the flag's grammar, the one definition of "attained" that the scheduler's
simulation, the metrics and the benchmarks share. Does not know: who waits, who measures.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from math import floor
from pathlib import Path

from toque.errors import ConfigError
from toque.types import Slo

DEFAULT_CLASS = "default"  # the class of requests that name none, if it is defined
MISSES_ALLOWED = 0.01  # of a request's inter-token gaps
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,31}")
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0}


def attained(
    slo: Slo, first_token_s: float | None, gaps_s: Collection[float], whole_s: float | None
) -> bool:
    """Whether a request was served as its class says.

    `first_token_s` and `whole_s` count from its arrival; None = it never came. `gaps_s` are the
    times between its tokens: one in a hundred may be longer than the class says, rounded down, so
    none of the first 99.
    """
    if first_token_s is None or whole_s is None:
        return False
    if slo.ttft_s is not None and first_token_s > slo.ttft_s:
        return False
    if slo.deadline_s is not None and whole_s > slo.deadline_s:
        return False
    return slo.itl_s is None or late_gaps(slo, gaps_s) <= floor(len(gaps_s) * MISSES_ALLOWED)


def late_gaps(slo: Slo, gaps_s: Iterable[float]) -> int:
    return 0 if slo.itl_s is None else sum(gap_s > slo.itl_s for gap_s in gaps_s)


def slo_classes(flags: Iterable[str], path: str | None = None) -> tuple[Slo, ...]:
    """The classes of flags and of a file (one a line, # for comments). Raises ConfigError."""
    texts = [*flags, *(_lines(path) if path is not None else ())]
    classes = [parse_slo(text) for text in texts]
    names = [slo.name for slo in classes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--slo defines the class {name!r} twice")
    return tuple(classes)


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--slo-file {path} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def parse_slo(text: str) -> Slo:
    """`interactive:ttft=500ms,itl=60ms`. Raises ConfigError that says what is wrong with it."""
    name, colon, listed = text.partition(":")
    if not _NAME.fullmatch(name) or not colon:
        raise ConfigError(
            f"--slo {text!r}: it must begin with a name and a colon, as in "
            "interactive:ttft=500ms,itl=60ms"
        )
    targets: dict[str, float] = {}
    downgrade = False
    for part in listed.split(","):
        key, _, value = part.strip().partition("=")
        if key in targets:
            raise ConfigError(f"--slo {name!r} says {key} twice")
        if key == "else" and value in ("refuse", "downgrade"):
            downgrade = value == "downgrade"
        elif key in ("ttft", "itl", "deadline"):
            targets[key] = _seconds(name, key, value)
        else:
            raise ConfigError(
                f"--slo {name!r} has {part!r}: known are ttft=TIME, itl=TIME, deadline=TIME, "
                "else=refuse, else=downgrade"
            )
    if not targets:
        raise ConfigError(f"--slo {name!r} has no target: give it ttft, itl or deadline")
    return Slo(
        name=name,
        ttft_s=targets.get("ttft"),
        itl_s=targets.get("itl"),
        deadline_s=targets.get("deadline"),
        downgrade=downgrade,
    )


def _seconds(name: str, key: str, value: str) -> float:
    match = _TIME.fullmatch(value)
    seconds = float(match[1]) * _UNIT_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(f"--slo {name!r} has {key}={value!r}: write a time as 500ms, 2s or 1m")
    return seconds
