"""Control tokens that a user typed into a message are text, not control.

Owns: nothing. Knows: how control tokens are spelled. Does not know: templates, ids.

A typed control token travels through the template as one private-use character, which no encoder
takes for control and which templates pass on as they do letters. Messages without any are not
touched, so their ids are those of the plain way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toque.errors import RequestError

_PRIVATE_PLANES = (0xF0000, 0x100000)  # Unicode 15, section 23.5: 65,534 characters each


@dataclass(frozen=True, slots=True)
class Typed:
    """Messages with their typed control tokens replaced, and what each character stands for."""

    messages: list[dict[str, Any]]
    literals: Mapping[int, str]  # code point -> control token

    def restore(self, text: str) -> str:
        return text.translate(self.literals)


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Finds any of the tokens, the longest first; None if there are none."""
    ordered = sorted((re.escape(token) for token in tokens if token), key=len, reverse=True)
    return re.compile(f"({'|'.join(ordered)})") if ordered else None


def typed_tokens(
    messages: Sequence[Mapping[str, Any]], tokens: re.Pattern[str] | None
) -> Typed | None:
    """None when nobody typed a control token. Raises RequestError if they cannot be told apart."""
    strings = [text for message in messages for text in message.values() if isinstance(text, str)]
    if tokens is None or not any(tokens.search(text) for text in strings):
        return None
    found = sorted({token for text in strings for token in tokens.findall(text)})
    first = _unused(strings, len(found))
    char_of = {token: chr(first + place) for place, token in enumerate(found)}

    def hide(value: Any) -> Any:
        return tokens.sub(lambda m: char_of[m[0]], value) if isinstance(value, str) else value

    hidden = [{key: hide(value) for key, value in message.items()} for message in messages]
    return Typed(hidden, {ord(char): token for token, char in char_of.items()})


def _unused(strings: Sequence[str], count: int) -> int:
    """The first of `count` code points that stand in none of the strings."""
    used = {ord(char) for text in strings for char in text if ord(char) >= _PRIVATE_PLANES[0]}
    for first in _PRIVATE_PLANES:
        if not used & set(range(first, first + count)):
            return first
    raise RequestError(
        "the messages use the private characters that mark control tokens", "messages"
    )
