"""The text of one choice while its tokens arrive: whole characters, cut before a stop string.

Owns: the undecoded bytes and the place in the stop strings. Knows: how tokens are spelled.
Does not know: requests, usage, SSE.

    shown | held: a beginning of some stop string | undecoded: a beginning of a character (<= 3 B)

Stop strings are found by one automaton (Aho and Corasick, "Efficient string matching", 1975) whose
state says at each character how much of the text's end is a beginning of a stop string. The held
text is that beginning, so it need not be stored.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection
from typing import Protocol

from toque.errors import RequestError


class TokenText(Protocol):
    """What a stream asks of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class TextStream:
    """Pushed tokens come back as text that will not change any more.

    Without stop strings, all pushes and the flush together are
    `Tokenizer.decode(ids, continuation=True)`: a SentencePiece token's leading space is kept for
    the first token too, because the text continues a prompt. With stop strings they are that text
    up to the match that ends first, of those the one that begins first.

    A push takes time in proportion to the token's text, on average over the pushes.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        """`include_stop`: the stop string itself is shown. `shown`: special tokens that are text
        all the same. Raises RequestError for an empty stop string."""
        self.stopped: str | None = None  # the stop string that ended the text
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._include_stop = include_stop
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = _Automaton(stop) if stop else None
        self._state = 0

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """The text that may be shown now; empty while all of it is held, and after a match.

        With `may_stop` off no stop string begins or ends in this token's text: a stream starts with
        such tokens or has none of them.
        """
        if self.stopped is not None:
            return ""
        hidden = self._skip_special and self._tokenizer.is_special(token_id)
        if hidden and token_id not in self._shown:
            return ""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return self._release(text) if may_stop else text

    def flush(self) -> str:
        """The end: everything that was held; an incomplete character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if self._stops is None or self.stopped is not None:
            return text
        state, self._state = self._state, 0
        return text + self._stops.beginning(state)

    def _release(self, text: str) -> str:
        """Move the automaton over `text`; return what can no longer be part of a stop string."""
        stops = self._stops
        if stops is None:
            return text
        before, include = self._state, self._include_stop
        state = before
        for place, char in enumerate(text):
            state = stops.follow(state, char)
            self.stopped = stops.ends_with[state]
            if self.stopped is not None:
                end = stops.depth[before] + place + 1
                return stops.cut(before, text, end - (0 if include else len(self.stopped)))
        self._state = state
        return stops.cut(before, text, stops.depth[before] + len(text) - stops.depth[state])


class _Automaton:
    """State 0 is the empty text; every other one is a beginning of at least one stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise RequestError("a stop string may not be empty", "stop")
        self._next: list[dict[str, int]] = [{}]
        self._source = [""]  # a stop string that begins with the state's text …
        self.depth = [0]  # … of so many characters
        self.ends_with: list[str | None] = [None]  # the longest stop string that ends the text
        for stop in stops:
            self._insert(stop)
        self._shorter = [0] * len(self.depth)  # the longest proper suffix that is a state
        self._link()

    def beginning(self, state: int) -> str:
        return self._source[state][: self.depth[state]]

    def follow(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(char, 0)

    def cut(self, state: int, text: str, count: int) -> str:
        """The first `count` characters of the state's text and `text` together."""
        held = min(self.depth[state], count)
        return self._source[state][:held] + text[: count - held]

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self.depth)
                self._next.append({})
                self._source.append(stop)
                self.depth.append(depth)
                self.ends_with.append(None)
            state = self._next[state][char]
        self.ends_with[state] = stop

    def _link(self) -> None:
        # Shallow states first: a suffix is shorter than what it ends.
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            if self.ends_with[state] is None:
                self.ends_with[state] = self.ends_with[self._shorter[state]]
            for char, longer in self._next[state].items():
                self._shorter[longer] = self.follow(self._shorter[state], char)
                waiting.append(longer)
