"""Calls that are JSON objects: Hermes and Qwen in tags, Llama 3 bare, Mistral after its marker.

Owns: nothing. Knows: those formats. Does not know: how text is cut, what tools do.

Formats: the chat templates of Qwen2.5 and Qwen3 (the Hermes form), of Llama 3.1 to 3.3
(https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/), and of Mistral's models from
tokenizer v3 (a list) and v11 (name and arguments) on (https://docs.mistral.ai/, mistral-common).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from toque.serve.tools import json_value
from toque.serve.tools.machine import END, Malformed, Sink, Steps, blanks, literal, until

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_MISTRAL, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_MAX_NAME_CHARS = 128
_JSON_BLANKS = (" ", "\t", "\r", "\n")
_CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})

Body = Callable[[Sink, str], Steps[str]]


def attempt(sink: Sink, c: str, body: Body, quiet: bool = False) -> Steps[str]:
    """Reads a call, or hands back what was taken for one."""
    try:
        return (yield from body(sink, c))
    except Malformed as why:
        return sink.recover(str(why), quiet)


def marked(sink: Sink, c: str, bodies: Mapping[str, Body]) -> Steps[None]:
    """Text, and after each of the marks a call, which its body reads."""
    while True:
        marker, c = yield from until(sink, c, tuple(bodies), sink.text)
        if marker is None:
            return
        sink.suspect(marker)
        c = yield from attempt(sink, c, bodies[marker])


def hermes(sink: Sink, c: str) -> Steps[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`"""
    yield from marked(sink, c, {_OPEN: _tagged})


def _tagged(sink: Sink, c: str) -> Steps[str]:
    c = yield from call_object(sink, (yield from blanks(c)))
    return (yield from closing(sink, c, _CLOSE))


def closing(sink: Sink, c: str, marker: str) -> Steps[str]:
    """Reads the blanks and the closing marker after a call, where they are there."""
    while c.isspace():
        sink.text(c)
        c = yield
    held = ""
    while marker.startswith(held + c):
        held += c
        c = yield
        if held == marker:
            sink.border()
            return c
    sink.text(held)
    return c


def llama(sink: Sink, c: str) -> Steps[None]:
    """`{"name": …, "parameters": {…}}` at the beginning, more after `;`, or after a marker."""
    c = yield from _say_blanks(sink, c)
    if c == "{":
        sink.suspect("")
        c = yield from attempt(sink, c, _bare, quiet=True)
    yield from marked(sink, c, {_PYTHON: _objects})


def _say_blanks(sink: Sink, c: str) -> Steps[str]:
    while c.isspace():
        sink.text(c)
        c = yield
    return c


def _bare(sink: Sink, c: str) -> Steps[str]:
    return (yield from _objects(sink, c, bare=True))


def _objects(sink: Sink, c: str, separator: str = ";", bare: bool = False) -> Steps[str]:
    c = yield from call_object(sink, (yield from blanks(c)), bare)
    c = yield from _say_blanks(sink, c)
    while c == separator:
        sink.suspect("")
        c = yield from blanks((yield))
        c = yield from call_object(sink, c)
        c = yield from _say_blanks(sink, c)
    return c


def bare_head(c: str, names: Collection[str]) -> Steps[str]:
    """Reads `{"name": "<one of them>", "parameters":` and white space of JSON. Raises Malformed at
    the first letter that differs, so an answer is held up no longer than it could be a call."""
    while c in _JSON_BLANKS:
        c = yield
    c = yield from blanks((yield from literal(c, "{")))
    c = yield from blanks((yield from literal(c, '"name"')))
    c = yield from blanks((yield from literal(c, ":")))
    quoted, held = [json.dumps(name) for name in names], ""
    while held not in quoted:
        held += c
        if not any(name.startswith(held) for name in quoted):
            raise Malformed("it names no tool")
        c = yield
    c = yield from blanks((yield from literal((yield from blanks(c)), ",")))
    c = yield from blanks((yield from literal(c, '"parameters"')))
    return (yield from literal(c, ":"))


def mistral(sink: Sink, c: str) -> Steps[None]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` or `[TOOL_CALLS]name[ARGS]{…}`"""
    yield from marked(sink, c, {_MISTRAL: _mistral_calls})


def _mistral_calls(sink: Sink, c: str) -> Steps[str]:
    c = yield from blanks(c)
    if c == "{":
        return (yield from call_object(sink, c))
    if c != "[":
        return (yield from _named(sink, c))
    c = yield from literal((yield from _objects(sink, (yield), ",")), "]")
    sink.border()
    return c


def _named(sink: Sink, c: str) -> Steps[str]:
    name = ""
    while c not in ("[", "{", END) and not c.isspace() and len(name) < _MAX_NAME_CHARS:
        name += c
        c = yield
    c = yield from blanks(c)
    if c == "[":
        c = yield
        if c == "C":
            c = yield from literal(c, _CALL_ID[1:])
            while c.isalnum() and len(c) == 1:
                c = yield
            c = yield from literal(c, "[")
        c = yield from literal(c, _ARGS[1:])
    c = yield from blanks(c)
    if c != "{":
        raise Malformed("the arguments are not a JSON object")
    sink.open(name)
    c = yield from json_value.value(c, sink.arguments)
    sink.close()
    return c


# ---------------------------------------------------------------------------------- call objects


@dataclass(slots=True)
class _Call:
    """What is known of a call object so far."""

    sink: Sink
    name: str | None = None
    early: list[str] = field(default_factory=list)  # arguments that came before the name
    begun: bool = False
    over: bool = False

    def named(self, name: str) -> None:
        if self.name is not None:
            raise Malformed("it has two names")
        self.name = name
        if self.begun:
            self.sink.open(name)
            self.sink.arguments("".join(self.early))
            self._end()

    def say(self, text: str) -> None:
        if self.name is None:
            self.early.append(text)
        else:
            self.sink.arguments(text)

    def begin(self) -> None:
        if self.begun:
            raise Malformed("it has arguments twice")
        self.begun = True
        if self.name is not None:
            self.sink.open(self.name)

    def arguments_end(self) -> None:
        if self.name is not None:
            self._end()

    def object_ends(self) -> None:
        if self.name is None:
            raise Malformed("it has no name")
        if not self.begun:
            self.begin()
            self.say("{}")
            self._end()

    def _end(self) -> None:
        self.sink.close()
        self.over = True


def call_object(sink: Sink, c: str, bare: bool = False) -> Steps[str]:
    """Reads `{"name": …, "arguments" or "parameters": {…}}`, in any order, other keys left out.

    A call is over with its arguments: an object that does not end after them has lost nothing.
    A `bare` one has no other keys in front, so that an answer in JSON is not taken for a call, and
    not held up. Raises Malformed.
    """
    if c != "{":
        raise Malformed("it is not a JSON object")
    call = _Call(sink)
    try:
        c = yield from blanks((yield))
        while c != "}":
            c = yield from _member(call, c, bare)
            if c == ",":
                c = yield from blanks((yield))
            elif c != "}":
                raise Malformed("its object does not end")
        call.object_ends()
    except Malformed:
        if call.over:
            return sink.last
        raise
    return (yield)


def _member(call: _Call, c: str, bare: bool) -> Steps[str]:
    key, c = yield from json_value.text_of(c)
    if bare and key not in _CALL_KEYS:
        raise Malformed(f"a call has no key {key[:64]!a}")
    c = yield from blanks((yield from literal((yield from blanks(c)), ":")))
    if key == "name":
        name, c = yield from json_value.text_of(c)
        call.named(name)
        return (yield from blanks(c))
    if key not in ("arguments", "parameters"):
        return (yield from json_value.skip(c))
    if c != "{":
        raise Malformed("the arguments are not a JSON object")
    call.begin()
    c = yield from json_value.value(c, call.say)
    call.arguments_end()
    return (yield from blanks(c))
