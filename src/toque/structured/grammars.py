"""The grammars of an engine's requests: compiled in a thread of their own, kept while in use.

Owns: the compiler, which grammars are in use and by whom. Knows: request ids.
Does not know: rows, tokens, messages. Its methods are for the engine's thread; `matcher` for any.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toque.structured.grammar import CACHED_CHARS, Compiler, GrammarError
from toque.types import Grammar, Spellings

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(slots=True)
class _InUse:
    compiled: Future[LLMatcher]
    users: set[str] = field(default_factory=set)  # request ids


class Grammars:
    def __init__(self) -> None:
        self.spellings: Spellings | None = None  # None until somebody has needed them
        self._compiler: Future[Compiler] | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="toque-grammar")
        self._in_use: dict[Grammar, _InUse] = {}
        self._used_by: dict[str, Grammar] = {}

    def learn(self, spellings: Spellings) -> None:
        """Needed before anything is compiled; more than one is one too many and ignored."""
        if self._compiler is None:
            self.spellings = spellings
            self._compiler = self._threads.submit(Compiler, spellings)

    def has_room(self, grammar: Grammar) -> bool:
        """Whether it may be taken in use now: what is compiled must not fill the memory."""
        if grammar in self._in_use or not self._in_use:
            return True
        chars = sum(used.num_chars for used in self._in_use)
        return chars + grammar.num_chars <= CACHED_CHARS

    def take(self, request_id: str, grammar: Grammar) -> Future[LLMatcher]:
        """Compile it, unless it is; kept until `release`. The future is done when it is usable,
        or fails with a GrammarError."""
        if grammar not in self._in_use:
            self._in_use[grammar] = _InUse(self._threads.submit(self._compile, grammar))
        entry = self._in_use[grammar]
        entry.users.add(request_id)
        self._used_by[request_id] = grammar
        return entry.compiled

    def release(self, request_id: str) -> None:
        """The request has ended, or never had a grammar."""
        grammar = self._used_by.pop(request_id, None)
        if grammar is not None:
            entry = self._in_use[grammar]
            entry.users.discard(request_id)
            if not entry.users:
                del self._in_use[grammar]

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """One at the beginning, for one sequence. Raises GrammarError."""
        entry = self._in_use.get(grammar)
        if entry is not None:
            entry.compiled.result()
        return self._compile(grammar)

    @property
    def num_words(self) -> int:
        """Of 32 bits, in a mask."""
        assert self._compiler is not None
        return self._compiler.result().num_words

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._compiler is None:
            raise GrammarError("the engine was not told how tokens are spelled")
        return self._compiler.result().matcher(grammar)
