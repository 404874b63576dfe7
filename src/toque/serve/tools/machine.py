"""How a parser is written once for every way of cutting its text: as a reader of single characters.

Owns: what one answer has been taken apart into, the text of a call that is not known to be one.
Knows: nothing of formats. Does not know: tokens, HTTP.

A format is a generator that is sent one character at a time, and END at the end. It is written as
if it read a file: `c` is the character in hand, which nobody has used yet; a reader of something
takes the first character and returns the one after its last. So cuts cannot matter: no reader ever
sees one. Where a reader only looks for markers it says so (Idle), and other text goes past it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from toque.serve.tools.parts import Kind, Part

T = TypeVar("T")
Steps = Generator[None, str, T]
END = "<end>"  # longer than a character, so equal to none and inside no set of them


class Malformed(Exception):
    """What looked like a call is none; the message says why."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A reader looks for nothing but markers and holds no part of one."""

    free: re.Pattern[str]  # text in which none begins
    say: Callable[[str], None]


class Sink:
    """Where readers put what they have read.

    White space beside calls and reasoning belongs to the format, so it waits until text follows.
    """

    def __init__(
        self, names: Collection[str] = (), may_call: bool = True, parallel: bool = True
    ) -> None:
        """`names`: the tools that may be called. `may_call` off: calls are left out, and it is
        said; `parallel` off: the answer is over after one."""
        self.last = END  # the character in hand
        self.in_reasoning = False
        self.num_openings = 0  # of the reasoning
        self.thought_chars = 0  # of the reasoning, white space included
        self.num_calls = 0
        self.all_complete = True
        self.done = False  # nothing that follows counts
        self.idle: Idle | None = None  # until the reader next sees a character
        self._names = frozenset(names)
        self._may_call = may_call
        self._parallel = parallel
        self._out: list[Part] = []
        self._blank = ""  # white space that nothing has followed yet
        self._ends = False  # … and that goes if nothing will, because a call is before it
        self._trim = False  # white space goes, whatever follows: reasoning began or ended
        self._raw: list[str] | None = None  # what was read of a call and is not told yet
        self._open = False  # a call has its name and not its end

    def drain(self) -> list[Part]:
        out, self._out = self._out, []
        return out

    def skip(self, text: str, place: int) -> int:
        """Take what the reader would take character by character and say as it is; returns where
        in `text` that ends."""
        if self.idle is None or self._raw is not None:
            return place
        run = self.idle.free.match(text, place)
        if run is None:
            return place
        self.last = text[run.end() - 1]
        self.idle.say(run[0])
        return run.end()

    def saw(self, char: str) -> None:
        """Every character, before a reader has it."""
        self.last = char
        if self._raw is not None:
            self._raw.append(char)

    # -------------------------------------------------------------------------------------- text

    def text(self, text: str) -> None:
        self._say(Kind.TEXT, text)

    def reasoning(self, text: str) -> None:
        self.thought_chars += len(text)
        self._say(Kind.REASONING, text)

    def begin_reasoning(self) -> None:
        self.num_openings += 1
        self.in_reasoning, self._blank, self._trim = True, "", True

    def end_reasoning(self) -> None:
        self.in_reasoning, self._blank, self._trim = False, "", True

    def _say(self, kind: Kind, text: str) -> None:
        if self._trim:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._out.append(Part(kind, self._blank + body))
            self._blank, self._ends, self._trim = text[len(body) :], False, False
        else:
            self._blank += text

    def finish(self) -> None:
        if self._blank and not (self._ends or self.in_reasoning):
            self._out.append(Part(Kind.TEXT, self._blank))
        self._blank = ""

    # ------------------------------------------------------------------------------------- calls

    def suspect(self, marker: str) -> None:
        """A call may have begun with `marker`; what follows is kept until that is known."""
        self._raw = [marker, self.last]

    def open(self, name: str) -> None:
        """Raises Malformed for a tool that was not offered."""
        if name not in self._names:
            raise Malformed(f"it calls {name[:64]!a}, which is not among the tools")
        self._raw = []
        self._open = True
        self.border()
        if self._may_call:
            self._out.append(Part(Kind.CALL, name, self.num_calls))
        else:
            self._warn(f"a call of '{name}' was left out, because tool_choice is 'none'")

    def arguments(self, text: str) -> None:
        self._raw = []
        if self._may_call:
            self._out.append(Part(Kind.ARGUMENTS, text, self.num_calls))

    def close(self) -> None:
        self._open, self._raw = False, None
        if self._may_call:
            self._out.append(Part(Kind.CALL_END, call=self.num_calls))
            self.num_calls += 1
            self.done = not self._parallel

    def border(self) -> None:
        """A call begins or ends here: blanks before it go, those after it if no text follows."""
        self._blank, self._ends = "", True

    def recover(self, why: str, quiet: bool = False) -> str:
        """The call is none after all: its text is text. Returns the character in hand.

        Of a call whose name has been told only the rest is handed back: a client has the beginning.
        """
        raw, self._raw = self._raw or [], None
        if self._open:
            self._open = False
            if self._may_call:
                self._warn(f"call {self.num_calls} has broken arguments: {why}")
                self.num_calls += 1
                self.all_complete = False
        elif raw and not (quiet and self.num_calls == 0):
            self._warn(f"a malformed call was handed back as text: {why}")
        self.text("".join(raw[:-1]))
        return self.last

    def _warn(self, message: str) -> None:
        self._out.append(Part(Kind.WARNING, message))


Reader = Callable[[Sink, str], Steps[None]]  # reads the rest of an answer, from the first character


class Machine:
    """Pushes text through a reader."""

    def __init__(self, reader: Reader, sink: Sink) -> None:
        self.sink = sink
        self._steps = self._run(reader)
        next(self._steps)

    def push(self, text: str) -> None:
        sink, send, place = self.sink, self._steps.send, 0
        while not sink.done and (place := sink.skip(text, place)) < len(text):
            sink.saw(text[place])
            send(text[place])
            place += 1

    def finish(self) -> None:
        if not self.sink.done:
            self.sink.saw(END)
            self._steps.send(END)
        self.sink.finish()

    def _run(self, reader: Reader) -> Steps[None]:
        c = yield
        yield from reader(self.sink, c)
        yield  # END has been read; nobody sends any more


# ------------------------------------------------------------------------------------ readers


def blanks(c: str) -> Steps[str]:
    """Reads white space."""
    while c.isspace():
        c = yield
    return c


def literal(c: str, text: str) -> Steps[str]:
    """Reads exactly `text`. Raises Malformed."""
    for expected in text:
        if c != expected:
            raise Malformed(f"'{text}' is missing")
        c = yield
    return c


@cache
def _free(markers: tuple[str, ...]) -> re.Pattern[str]:
    firsts = "".join(re.escape(marker[0]) for marker in markers)
    return re.compile(f"[^{firsts}]+" if firsts else "(?s:.+)")


def until(
    sink: Sink, c: str, markers: tuple[str, ...], say: Callable[[str], None]
) -> Steps[tuple[str | None, str]]:
    """Reads up to and including the first of `markers`; what is before it is said as it comes.

    Returns the marker, None at the end, and the character in hand. No marker may begin another.
    """
    idle, held = Idle(_free(markers), say), ""
    while c != END:
        held += c
        while held and not any(marker.startswith(held) for marker in markers):
            say(held[0])
            held = held[1:]
        sink.idle = None if held else idle
        c = yield
        sink.idle = None
        if held in markers:
            return held, c
    for char in held:
        say(char)
    return None, c
