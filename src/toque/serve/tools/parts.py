"""The one form of what a model says: parts in order, whatever format it was written in.

Owns: nothing. Knows: the kinds of parts. Does not know: formats, JSON shapes of routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"  # a call begins; the text is the tool's whole name
    ARGUMENTS = "arguments"  # a piece of the JSON object of a call's arguments
    CALL_END = "call_end"  # the call is complete: its arguments are a JSON object
    WARNING = "warning"  # a sentence about what was handed back as text


_GROWING = frozenset({Kind.TEXT, Kind.REASONING, Kind.ARGUMENTS})


@dataclass(frozen=True, slots=True)
class Part:
    kind: Kind
    text: str = ""
    call: int = -1  # which call of the answer, from 0; -1: none

    def continues(self, last: Part) -> bool:
        return self.kind in _GROWING and self.kind is last.kind and self.call == last.call


def merged(parts: Iterable[Part]) -> list[Part]:
    """Neighbours that continue one another become one part."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and part.continues(runs[-1][0]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [Part(r[0].kind, "".join([p.text for p in r]), r[0].call) for r in runs]


@dataclass(slots=True)
class SaidCall:
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class Said:
    """A whole answer, put together from its parts."""

    text: str = ""
    reasoning: str = ""
    calls: list[SaidCall] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def said(parts: Iterable[Part]) -> Said:
    whole = Said()
    for part in merged(parts):
        match part.kind:
            case Kind.TEXT:
                whole.text += part.text
            case Kind.REASONING:
                whole.reasoning += part.text
            case Kind.CALL:
                whole.calls.append(SaidCall(part.text))
            case Kind.ARGUMENTS:
                whole.calls[part.call].arguments += part.text
            case Kind.CALL_END:
                whole.calls[part.call].complete = True
            case Kind.WARNING:
                whole.warnings.append(part.text)
    return whole
