"""Reads JSON one character at a time (RFC 8259), and says each as soon as it is certain.

Owns: nothing. Knows: JSON's grammar. Does not know: what the values mean.

One thing is mended: a raw control character in a string, which models write, is said as its escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from toque.serve.tools.machine import Malformed, Steps, blanks

Say = Callable[[str], None]

MAX_DEPTH = 64
_MAX_NUMBER_CHARS = 400
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.eE0123456789")
_WORDS = frozenset({"true", "false", "null"})
_LETTERS = frozenset("truefalsn")
_ESCAPED = frozenset('"\\/bfnrtu')
_HEX = frozenset("0123456789abcdefABCDEF")


def value(c: str, say: Say, depth: int = 0) -> Steps[str]:
    """Reads one value. Raises Malformed."""
    if c == "{":
        return (yield from _members(say, depth + 1))
    if c == "[":
        return (yield from _items(say, depth + 1))
    if c == '"':
        return (yield from string(say))
    if c in _NUMBER_CHARS:
        return (yield from _number(c, say))
    return (yield from _word(c, say))


def string(say: Say) -> Steps[str]:
    """Reads a string whose opening quote is in hand."""
    say('"')
    c = yield
    while c != '"':
        if len(c) != 1:
            raise Malformed("it ends inside a string")
        if c == "\\":
            say(c)
            c = yield from _escape(say)
            continue
        say(c if c >= " " else json.dumps(c)[1:-1])
        c = yield
    say('"')
    return (yield)


def text_of(c: str) -> Steps[tuple[str, str]]:
    """Reads a string and returns its value, and the character in hand."""
    if c != '"':
        raise Malformed("a string is missing")
    raw: list[str] = []
    c = yield from string(raw.append)
    return json.loads("".join(raw)), c


def _escape(say: Say) -> Steps[str]:
    c = yield
    if c not in _ESCAPED:
        raise Malformed("a string has an escape that JSON does not know")
    say(c)
    digits = 4 if c == "u" else 0
    for _ in range(digits):
        c = yield
        if c not in _HEX:
            raise Malformed("a string has an escape that JSON does not know")
        say(c)
    return (yield)


def _number(c: str, say: Say) -> Steps[str]:
    number = ""
    while c in _NUMBER_CHARS and len(number) <= _MAX_NUMBER_CHARS:
        number += c
        c = yield
    if len(number) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(number):
        raise Malformed("a number is not one of JSON's")
    say(number)
    return c


def _word(c: str, say: Say) -> Steps[str]:
    word = ""
    while c in _LETTERS and len(word) < 6:
        word += c
        c = yield
    if word not in _WORDS:
        raise Malformed("a value is missing or not one of JSON's")
    say(word)
    return c


def _space(c: str, say: Say) -> Steps[str]:
    while c in (" ", "\t", "\n", "\r"):
        say(c)
        c = yield
    return c


def _members(say: Say, depth: int) -> Steps[str]:
    _check_depth(depth)
    say("{")
    c = yield from _space((yield), say)
    while c != "}":
        if c != '"':
            raise Malformed("an object has a key that is not a string")
        c = yield from _space((yield from string(say)), say)
        if c != ":":
            raise Malformed("an object's key has no colon after it")
        say(c)
        c = yield from _space((yield), say)
        c = yield from _space((yield from value(c, say, depth)), say)
        if c == ",":
            say(c)
            c = yield from _space((yield), say)
            if c == "}":
                raise Malformed("an object has a comma before its end")
        elif c != "}":
            raise Malformed("an object does not end")
    say("}")
    return (yield)


def _items(say: Say, depth: int) -> Steps[str]:
    _check_depth(depth)
    say("[")
    c = yield from _space((yield), say)
    while c != "]":
        c = yield from _space((yield from value(c, say, depth)), say)
        if c == ",":
            say(c)
            c = yield from _space((yield), say)
            if c == "]":
                raise Malformed("a list has a comma before its end")
        elif c != "]":
            raise Malformed("a list does not end")
    say("]")
    return (yield)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise Malformed("its JSON is nested too deeply")


def skip(c: str) -> Steps[str]:
    """Reads a value that nobody wants, and the blanks after it."""
    return (yield from blanks((yield from value(c, lambda char: None))))
