"""Reasoning that ends after so many tokens: then its closing text is all that a row may choose.

Owns: how far each row with a budget has thought. Knows: RowSetup, how tokens are spelled.
Does not know: grammars, logits. Constraints (worker.Constraints) around others, whose masks hold
at every other token: up to its budget a row is as free as without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from toque.structured.grammar import GrammarError
from toque.structured.grammars import Grammars
from toque.structured.masks import Mask, Masks
from toque.types import RowSetup, ThinkingBudget, TokenId


class Budgets:
    def __init__(self, inner: Masks, grammars: Grammars) -> None:
        self._inner = inner
        self._grammars = grammars
        self._rows: dict[int, tuple[RowSetup, Thought]] = {}

    def begin(self, setup: RowSetup) -> None:
        """Raises GrammarError."""
        self._rows.pop(setup.row, None)  # of whoever had the row before
        output = setup.history[setup.num_prompt :]
        if setup.thinking is not None:
            spellings = self._grammars.spellings
            thought = Thought(setup.thinking, spellings.tokens if spellings else ())
            for token in output:
                thought.take(token)
            if not thought.over:
                self._rows[setup.row] = setup, thought
            output = output[thought.forced_from or 0 :]
        self._inner.begin(_with_output(setup, output))

    def free(self, rows: Sequence[int]) -> bool:
        return self._rows.keys().isdisjoint(rows) and self._inner.free(rows)

    def mask(self, row: int) -> Mask | None:
        """Raises GrammarError."""
        _, thought = self._rows.get(row, (None, None))
        due = None if thought is None else thought.due
        return self._inner.mask(row) if due is None else _only(due)

    def accept(self, row: int, token: TokenId) -> bool:
        """Raises GrammarError."""
        setup, thought = self._rows.get(row, (None, None))
        if setup is None or thought is None:
            return self._inner.accept(row, token)
        thought.take(token)
        if thought.over:
            del self._rows[row]
        if thought.forced_from is None:
            return self._inner.accept(row, token)
        if thought.over:
            self._inner.begin(_with_output(setup, thought.budget.closing_ids))
        return False


def _with_output(setup: RowSetup, output: tuple[TokenId, ...]) -> RowSetup:
    """As grammars see it: after a forced end the closing text comes first, because a budget may
    run out within a character, which is no text that a grammar could read."""
    return structs.replace(setup, num_prompt=0, history=output)


def _only(token: TokenId) -> Mask:
    mask = np.zeros(token // 32 + 1, dtype=np.uint32)
    mask[-1] = 1 << token % 32
    return mask


@dataclass(slots=True)
class Thought:
    """The reasoning of one output, token by token.

    Where it begins and ends is told as the text side's parser tells it: an opening mark counts
    after nothing but white space, the first closing mark ends it, in one token or in letters.
    """

    budget: ThinkingBudget
    spelled: Sequence[bytes]  # by token id
    spent: int = 0  # tokens between the marks
    over: bool = False
    forced_from: int | None = None  # place in the output where the closing text was forced
    _taken: int = 0
    _text: bytes = b""  # the output, later what of it may be the beginning of a closing mark
    _opened: bool = False  # the reasoning has begun, and no opening mark can follow
    _closed: int = 0  # tokens of the closing text that were forced

    @property
    def due(self) -> TokenId | None:
        """The token that must come next."""
        thinking = not self.over and (self._opened or self.budget.is_open)
        if thinking and self.spent >= self.budget.num_tokens:
            return self.budget.closing_ids[self._closed]
        return None

    def take(self, token: TokenId) -> None:
        """Raises GrammarError."""
        if self.over:
            return
        self._taken += 1
        if self.due is not None:
            self.forced_from = self._taken - 1 - self._closed
            self._closed += 1
            self.over = self._closed == len(self.budget.closing_ids)
            return
        if not self.spelled:
            raise GrammarError("the engine was not told how tokens are spelled")
        self._text += self.spelled[token] if token < len(self.spelled) else b""
        if not self._opened and self._is_ahead():
            return
        self.spent += 1
        closing = self.budget.closing.encode()
        self.over = closing in self._text
        if self._opened:
            self._text = self._text[1 - len(closing) :]

    def _is_ahead(self) -> bool:
        """Whether the reasoning has not begun with the last token either; it may never."""
        opening, text = self.budget.opening, self._text.decode(errors="ignore").lstrip()
        if text.startswith(opening):
            self._opened, self.spent, self._text = True, 0, text[len(opening) :].encode()
            return not self._text
        open_ended = opening.startswith(text)
        if self.budget.is_open:
            self._opened = not open_ended
            return False
        self.over = not open_ended
        return True
