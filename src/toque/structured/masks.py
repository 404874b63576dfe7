"""Which tokens each row may choose next: computed in a thread while the forward pass runs.

Owns: the matcher and the next mask of each row with a grammar. Knows: RowSetup, Grammars.
Does not know: logits, sampling, sequences. The worker's collaborator (worker.Constraints).

Between two steps of a row its matcher is the thread's, otherwise the worker's: a mask is always
waited for before its token is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toque.structured.grammar import GrammarError
from toque.structured.grammars import Grammars
from toque.types import Grammar, RowSetup, TokenId

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint32]  # [words]: token i is allowed where bit i % 32 of word i // 32 is set


@dataclass(slots=True)
class _Matched:
    matcher: LLMatcher
    mask: Mask  # of what may follow


class Masks:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="toque-mask")
        self._rows: dict[int, Future[_Matched]] = {}

    def begin(self, setup: RowSetup) -> None:
        self._rows.pop(setup.row, None)  # of whoever had the row before
        if setup.grammar is not None:
            output = setup.history[setup.num_prompt :]
            self._rows[setup.row] = self._threads.submit(self._start, setup.grammar, output)

    def _start(self, grammar: Grammar, output: tuple[TokenId, ...]) -> _Matched:
        """After preemption the matcher reads again what the row had chosen."""
        matcher = self._grammars.matcher(grammar)
        if output and not matcher.consume_tokens(list(output)):
            raise GrammarError("the output so far no longer matches the grammar")
        return _next(_Matched(matcher, np.empty(self._grammars.num_words, dtype=np.uint32)))

    def free(self, rows: Sequence[int]) -> bool:
        return self._rows.keys().isdisjoint(rows)

    def mask(self, row: int) -> Mask | None:
        matched = self._rows.get(row)
        return None if matched is None else matched.result().mask

    def accept(self, row: int, token: TokenId) -> bool:
        future = self._rows.get(row)
        if future is None:
            return False
        matched = future.result()
        if not matched.matcher.consume_token(token):
            raise _broken(matched.matcher)
        if matched.matcher.is_stopped():
            del self._rows[row]
            return True
        self._rows[row] = self._threads.submit(_next, matched)
        return False


def _next(matched: _Matched) -> _Matched:
    """Fill in the mask. The call lets go of the interpreter's lock."""
    mask = matched.mask
    matched.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matched.matcher.is_error():
        raise _broken(matched.matcher)
    return matched


def _broken(matcher: LLMatcher) -> GrammarError:
    reason = matcher.get_error().split("<")[0].strip()
    return GrammarError(f"the grammar cannot be followed any further: {reason}")
