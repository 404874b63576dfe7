"""Sampling on the compiled extension: one call for all rows of a step.

Owns: per row, the extension's sampler. Knows: what it wants and returns. Does not know: formulas;
they are in csrc/sample.cpp and, readable, in `kernels/ref/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from toque.errors import NOT_NUMBERS
from toque.kernels.api import NOTHING_LEFT, Floats, Mask
from toque.kernels.cpu import _native
from toque.types import Logprob, RowSetup, Sampled, TokenId

# By the number of csrc/sample.h's Outcome.
ERRORS = (None, NOT_NUMBERS, NOTHING_LEFT, "sampling failed")
WORD = (1 << 64) - 1


class CpuSampler:
    """An api.Sampler."""

    def __init__(self, backend: _native.Backend, num_rows: int) -> None:
        self._backend = backend
        self._rows: list[_native.RowSampler | None] = [None] * num_rows

    def set_up(self, setup: RowSetup) -> None:
        self._rows[setup.row] = native_sampler(setup)

    def sample(
        self,
        logits: Floats,
        rows: Sequence[int],
        positions: Sequence[int],
        masks: Sequence[Mask | None],
    ) -> list[Sampled]:
        chosen = self._backend.sample(logits, self.of(rows), list(positions), list(masks))
        return sampled(rows, chosen)

    def of(self, rows: Sequence[int]) -> list[_native.RowSampler | None]:
        """The extension's samplers of these rows; None where none was set up."""
        own = self._rows
        return [own[row] for row in rows]

    def score(
        self, logits: Floats, targets: Sequence[TokenId], num_top: int
    ) -> list[Logprob | None]:
        return [logprob_of(row) for row in self._backend.score(logits, list(targets), num_top)]


def sampled(rows: Sequence[int], chosen: Sequence[_native.Chosen]) -> list[Sampled]:
    return [
        Sampled(row=row, token=token, logprob=logprob_of(found), error=ERRORS[outcome])
        for row, (outcome, token, found) in zip(rows, chosen, strict=True)
    ]


def logprob_of(found: _native.Logprobs | None) -> Logprob | None:
    return None if found is None else Logprob(chosen=found[0], rank=found[1], top=found[2])


def native_sampler(setup: RowSetup) -> _native.RowSampler:
    params = setup.sampling
    assert params.seed is not None
    return _native.RowSampler(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed & WORD,
        choice=setup.choice & WORD,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list(params.logit_bias.items()),
        allowed=params.allowed_token_ids,
        never=[word[0] for word in params.bad_words if len(word) == 1],
        spelled=[word for word in params.bad_words if len(word) > 1],
        end_ids=setup.end_token_ids,
        num_prompt=setup.num_prompt,
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        history=setup.history,
    )
