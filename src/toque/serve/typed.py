"""Control tokens that a user typed into a message or a tool are text, not control.

Owns: nothing. Knows: how control tokens are spelled. Does not know: templates, ids.

A typed control token travels through the template as one private-use character, which no encoder
takes for control and which templates pass on as they do letters. Messages without any are not
touched, so their ids are those of the plain way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toque.errors import RequestError

_PRIVATE_PLANES = (0xF0000, 0x100000)  # Unicode 15, section 23.5: 65,534 characters each


@dataclass(frozen=True, slots=True)
class Typed:
    """Messages and tools with their typed control tokens replaced, and what each character is."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    literals: Mapping[int, str]  # code point -> control token

    def restore(self, text: str) -> str:
        return text.translate(self.literals)


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of the tokens, the longest first; None if there are none."""
    ordered = sorted((re.escape(token) for token in tokens if token), key=len, reverse=True)
    return re.compile(f"({'|'.join(ordered)})") if ordered else None


def typed_tokens(
    messages: Sequence[Mapping[str, Any]],
    tokens: re.Pattern[str] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Typed | None:
    """None when nobody typed a control token. Raises RequestError if they cannot be told apart."""
    strings = [*strings_in(messages), *strings_in(tools or ())]
    if tokens is None or not any(tokens.search(text) for text in strings):
        return None
    found = sorted({token for text in strings for token in tokens.findall(text)})
    first = _unused(strings, len(found))
    char_of = {token: chr(first + place) for place, token in enumerate(found)}

    def hide(text: str) -> str:
        return tokens.sub(lambda m: char_of[m[0]], text)

    return Typed(
        _mapped(list(messages), hide),
        None if tools is None else _mapped(list(tools), hide),
        {ord(char): token for token, char in char_of.items()},
    )


def strings_in(value: Any) -> Iterator[str]:
    """Every text in lists and objects, keys included."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value


def _unused(strings: Sequence[str], count: int) -> int:
    """The first of `count` code points that stand in none of the strings."""
    used = {ord(char) for text in strings for char in text if ord(char) >= _PRIVATE_PLANES[0]}
    for first in _PRIVATE_PLANES:
        if not used & set(range(first, first + count)):
            return first
    raise RequestError(
        "the messages use the private characters that mark control tokens", "messages"
    )
