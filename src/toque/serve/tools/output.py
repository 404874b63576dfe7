"""The parser of one answer: reasoning first, then text and calls; and which formats there are.

Owns: nothing beyond its machine. Knows: every format by vLLM's name of its parser.
Does not know: tokens, routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from toque.serve.tools import json_calls
from toque.serve.tools.machine import Machine, Malformed, Reader, Sink, Steps, literal, until
from toque.serve.tools.parts import Kind, Part, merged
from toque.serve.tools.xml_calls import Schemas, qwen_xml

TOOL_PARSERS: Mapping[str, Callable[[Schemas], Reader]] = {
    "hermes": lambda schemas: json_calls.hermes,
    "qwen3_coder": qwen_xml,
    "llama3_json": lambda schemas: json_calls.llama,
    "mistral": lambda schemas: json_calls.mistral,
}
Head = Callable[[str], Steps[str]]  # reads what only a call begins with, or raises Malformed
# Of an answer that is calls or else text of some form, how calls begin.
_HEADS: Mapping[str, Callable[[Schemas], Head]] = {
    "hermes": lambda schemas: lambda c: _mark(c, "<tool_call>"),
    "qwen3_coder": lambda schemas: lambda c: _mark(c, "<tool_call>"),
    "llama3_json": lambda schemas: lambda c: json_calls.bare_head(c, schemas),
    "mistral": lambda schemas: lambda c: _mark(c, "[TOOL_CALLS]"),
}
# Control tokens that the formats are made of: they reach the parser though they are not text.
TOOL_MARKERS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
REASONING_PARSERS: Mapping[str, tuple[str, str]] = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),  # another name of the same: how a prompt ends decides
    "mistral": ("[THINK]", "[/THINK]"),
}


# "first": the answer is calls or text, by its beginning, and text with marks in it is still text.
Calls = Literal["anywhere", "first", "never"]


@dataclass(frozen=True, slots=True)
class Format:
    """How the answers to one call are written and read."""

    tools: str | None = None  # a name of TOOL_PARSERS; None: calls are text
    schemas: Schemas = field(default_factory=dict)
    calls: Calls = "anywhere"
    may_call: bool = True
    parallel: bool = True
    reasoning: str | None = None  # a name of REASONING_PARSERS
    in_reasoning: bool = False  # the prompt has opened it

    @property
    def markers(self) -> tuple[str, ...]:
        of_tools = TOOL_MARKERS[self.tools] if self.tools else ()
        return of_tools + (REASONING_PARSERS[self.reasoning] if self.reasoning else ())


PLAIN = Format()


class OutputParser:
    """Takes an answer's text as it comes, in any pieces; the parts do not depend on them."""

    def __init__(self, form: Format = PLAIN) -> None:
        self._sink = Sink(form.schemas, form.may_call, form.parallel)
        plain = form.tools is None and form.reasoning is None
        self._machine = None if plain else Machine(_reader(form), self._sink)
        if form.in_reasoning:
            self._sink.begin_reasoning()

    @property
    def thought(self) -> tuple[int, int]:
        """How often the reasoning has been opened, and how many characters it has."""
        return self._sink.num_openings, self._sink.thought_chars

    @property
    def done(self) -> bool:
        """The answer is over, whatever the model goes on to write: one call was all it may make."""
        return self._sink.done

    @property
    def called(self) -> bool:
        """There are calls, and all of them are complete."""
        return self._sink.num_calls > 0 and self._sink.all_complete

    def push(self, text: str) -> list[Part]:
        if self._machine is None:
            return [Part(Kind.TEXT, text)] if text else []
        self._machine.push(text)
        return merged(self._sink.drain())

    def finish(self) -> list[Part]:
        if self._machine is not None:
            self._machine.finish()
        return merged(self._sink.drain())


def _reader(form: Format) -> Reader:
    rest: Reader = _plain
    if form.tools and form.calls != "never":
        rest = TOOL_PARSERS[form.tools](form.schemas)
        if form.calls == "first":
            rest = _either(_HEADS[form.tools](form.schemas), rest)
    if form.reasoning is None:
        return rest
    opening, closing = REASONING_PARSERS[form.reasoning]
    return _thinking(opening, closing, form.in_reasoning, rest)


def _plain(sink: Sink, c: str) -> Steps[None]:
    yield from until(sink, c, (), sink.text)


def _mark(c: str, mark: str) -> Steps[str]:
    """After two line breaks at most, which may stand behind the reasoning."""
    for _ in range(2):
        if c == "\n":
            c = yield
    return (yield from literal(c, mark))


def _either(head: Head, calls: Reader) -> Reader:
    """Calls, if the answer begins as they do; else text."""

    def read(sink: Sink, c: str) -> Steps[None]:
        held, steps, reader = "", head(c), calls
        try:
            next(steps)
            while True:
                held += c
                c = yield
                steps.send(c)
        except Malformed:
            reader = _plain
        except StopIteration:
            pass
        yield from _replayed(reader, sink, held, c)

    return read


def _thinking(opening: str, closing: str, begun: bool, rest: Reader) -> Reader:
    """Reasoning comes first or not at all: its tags are text anywhere else. A prompt that has
    `begun` it may see it begun again."""

    def read(sink: Sink, c: str) -> Steps[None]:
        while c.isspace():
            sink.text(c)
            c = yield
        held = ""
        while held != opening and opening.startswith(held + c):
            held += c
            c = yield
        found = held == opening
        if found:
            sink.begin_reasoning()
        reader = think if found or begun else rest
        yield from _replayed(reader, sink, "" if found else held, c)

    def think(sink: Sink, c: str) -> Steps[None]:
        marker, c = yield from until(sink, c, (closing,), sink.reasoning)
        if marker is not None:
            sink.end_reasoning()
            yield from rest(sink, c)

    return read


def _replayed(reader: Reader, sink: Sink, held: str, c: str) -> Steps[None]:
    """The reader reads `held` first, which another one has looked at, and then from `c` on."""
    if not held:
        yield from reader(sink, c)
        return
    sink.saw(held[0])
    steps = reader(sink, held[0])
    next(steps)
    try:
        for char in (*held[1:], c):
            sink.saw(char)
            steps.send(char)
        while True:
            steps.send((yield))
    except StopIteration:
        return
