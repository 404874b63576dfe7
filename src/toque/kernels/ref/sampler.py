"""From one row of logits to one token: `csrc/sample.h`, readable.

Owns: per row, what the penalties need to remember. Knows: SamplingParams. Does not know: batches,
pages, text. Every choice is a function of (logits, params, history, seed, choice, position) alone.

The order is SamplingParams': penalties, logit_bias, bans, temperature, top_k, top_p, min_p.
Ties always go to the lower token id. Nothing here sorts the whole vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from toque.errors import NOT_NUMBERS
from toque.kernels.api import NOTHING_LEFT, Floats, Mask
from toque.kernels.ref.rng import uniform
from toque.types import Logprob, RowSetup, Sampled, SamplingParams, TokenId

log = logging.getLogger(__name__)

LARGEST_INVERSE = 1e200  # of a temperature: leaves only the best, and no difference overflows

Row = NDArray[np.float32]  # [vocab]
Ids = NDArray[np.int64]


class RefSampler:
    """An api.Sampler, row by row."""

    def __init__(self, num_rows: int) -> None:
        self._rows: list[RowSampler | None] = [None] * num_rows

    def set_up(self, setup: RowSetup) -> None:
        self._rows[setup.row] = RowSampler(setup)

    def sample(
        self,
        logits: Floats,
        rows: Sequence[int],
        positions: Sequence[int],
        masks: Sequence[Mask | None],
    ) -> list[Sampled]:
        return [
            self._sample(values, row, position, mask)
            for values, row, position, mask in zip(logits, rows, positions, masks, strict=True)
        ]

    def _sample(self, logits: Row, row: int, position: int, mask: Mask | None) -> Sampled:
        sampler = self._rows[row]
        assert sampler is not None
        try:
            return structs.replace(sampler.sample(logits, position, mask), row=row)
        except Exception as error:
            log.exception("a sequence failed in sampling")
            return Sampled(row=row, error=f"sampling failed: {type(error).__name__}")

    def score(
        self, logits: Floats, targets: Sequence[TokenId], num_top: int
    ) -> list[Logprob | None]:
        return [
            logprob_of(row, target, num_top) if np.isfinite(row.max()) else None
            for row, target in zip(logits, targets, strict=True)
        ]


class RowSampler:
    """The sampling state of one row."""

    def __init__(self, setup: RowSetup) -> None:
        self.params = setup.sampling
        self.choice = setup.choice
        self.num_prompt = setup.num_prompt
        self._end_ids = np.array(setup.end_token_ids, dtype=np.int64)
        self._seen = set(setup.history)  # prompt and output, for repetition_penalty
        self._output_counts: dict[TokenId, int] = {}
        for token in setup.history[setup.num_prompt :]:
            self._count(token)
        self._output = list(setup.history[setup.num_prompt :])  # for bad_words only
        params = setup.sampling
        single = [word[0] for word in params.bad_words if len(word) == 1]
        self._never = np.array(single, dtype=np.int64)
        self._spelled = [word for word in params.bad_words if len(word) > 1]
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64)
        self._penalized = params.repetition_penalty != 1.0 or (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )

    def _count(self, token: TokenId) -> None:
        self._output_counts[token] = self._output_counts.get(token, 0) + 1

    def sample(self, logits: Row, position: int, mask: Mask | None = None) -> Sampled:
        """Choose the token that will stand at `position`. NaN or infinite logits are this row's
        own failure. `mask` forbids what has no bit set in it, and what lies beyond its end."""
        if not np.isfinite(logits.max()):
            return Sampled(row=-1, error=NOT_NUMBERS)
        adjusted = self._adjust(logits, position, mask)
        best = adjusted.max()
        if not np.isfinite(best):
            return Sampled(row=-1, error=NOTHING_LEFT if best == -np.inf else NOT_NUMBERS)
        params = self.params
        if params.temperature == 0.0:
            token = int(adjusted.argmax())
        else:
            assert params.seed is not None
            token = draw(adjusted, params, uniform(params.seed, self.choice, position))
        if self._penalized:
            self._seen.add(token)
            self._count(token)
        if self._spelled:
            self._output.append(token)
        wanted = params.logprobs
        logprob = None if wanted is None else logprob_of(logits, token, wanted)
        return Sampled(row=-1, token=token, logprob=logprob)

    def _adjust(self, logits: Row, position: int, mask: Mask | None = None) -> Row:
        """Penalties, bias and bans; the row itself when there are none, else a changed copy."""
        params = self.params
        too_early = len(self._end_ids) > 0 and position - self.num_prompt < params.min_tokens
        bans = too_early or mask is not None or bool(params.allowed_token_ids or params.bad_words)
        if not (self._penalized or params.logit_bias or bans):
            return logits
        out = logits.copy()
        if self._penalized:
            self._penalize(out)
        for token, bias in params.logit_bias.items():
            out[token] += np.float32(bias)
        if too_early:
            out[self._end_ids] = -np.inf
        if params.bad_words:
            out[self._never] = -np.inf
            out[self._last_of_bad_words()] = -np.inf
        if mask is not None:
            out[~allowed_by(mask, len(out))] = -np.inf
        return self._only_allowed(out) if params.allowed_token_ids else out

    def _last_of_bad_words(self) -> list[TokenId]:
        """The last token of each spelling whose others end the output now."""
        out = self._output
        return [word[-1] for word in self._spelled if tuple(out[1 - len(word) :]) == word[:-1]]

    def _only_allowed(self, out: Row) -> Row:
        kept = np.full_like(out, -np.inf)
        kept[self._allowed] = out[self._allowed]
        return kept

    def _penalize(self, out: Row) -> None:
        """Repetition: arXiv:1909.05858, section 4.1; the others: OpenAI's API reference."""
        params = self.params
        if params.repetition_penalty != 1.0 and self._seen:
            ids = np.fromiter(self._seen, dtype=np.int64)
            seen, factor = out[ids], np.float32(params.repetition_penalty)
            out[ids] = np.where(seen > 0, seen / factor, seen * factor)
        if self._output_counts:
            ids = np.fromiter(self._output_counts.keys(), dtype=np.int64)
            counts = np.fromiter(self._output_counts.values(), dtype=np.float32)
            out[ids] -= np.float32(params.frequency_penalty) * counts + np.float32(
                params.presence_penalty
            )


def allowed_by(mask: Mask, vocab: int) -> NDArray[np.bool_]:
    """[words] -> [vocab]."""
    allowed = np.zeros(vocab, dtype=np.bool_)
    bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")[:vocab]
    allowed[: len(bits)] = bits
    return allowed


def draw(logits: Row, params: SamplingParams, u: float) -> TokenId:
    """One token by inverting the cumulative distribution, in order of id, at `u` in [0, 1)."""
    # The best is at 0 whatever the temperature, and a tiny one cannot overflow.
    inverse = min(1 / params.temperature, LARGEST_INVERSE)
    scaled = (logits.astype(np.float64) - float(logits.max())) * inverse  # [vocab]
    kept_ids = np.arange(len(scaled))
    if params.top_k > 0:
        kept_ids = np.sort(top_ids(logits, params.top_k))
    weights = np.exp(scaled[kept_ids])  # [kept]; 1 for the best
    if params.top_p < 1.0:
        inside = nucleus(logits[kept_ids], weights, params.top_p)
        kept_ids, weights = kept_ids[inside], weights[inside]
    if params.min_p > 0.0:
        inside = weights >= params.min_p
        kept_ids, weights = kept_ids[inside], weights[inside]
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    # u * total may round up to the total: then the last token that has any weight is meant.
    index = min(index, int(np.flatnonzero(weights)[-1]))
    return int(kept_ids[index])


def top_ids(logits: Row, k: int) -> Ids:
    """The k largest, best first, ties to the lower id; all of them when k exceeds the row."""
    k = min(k, len(logits))
    threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
    above = np.flatnonzero(logits > threshold)
    ties = np.flatnonzero(logits == threshold)[: k - len(above)]
    ids = np.concatenate([above, ties])
    return ids[np.lexsort((ids, -logits[ids]))]


def nucleus(
    logits: Row,  # [n]
    weights: NDArray[np.float64],  # [n], in the same order of size
    top_p: float,
) -> NDArray[np.bool_]:  # [n]
    """The smallest set of the most probable tokens that reaches top_p (arXiv:1904.09751).

    All tokens below (1 - top_p) / n of the total hold less than 1 - top_p together, so the set is
    complete before it comes to them: only the others are sorted.
    """
    wanted = top_p * weights.sum()
    bound = 0.5 * (1.0 - top_p) * weights.sum() / len(weights)  # half: room for rounding
    candidates = np.flatnonzero(weights >= bound)
    order = candidates[np.lexsort((candidates, -logits[candidates]))]
    before = np.concatenate([[0.0], np.cumsum(weights[order])[:-1]])
    inside = np.zeros(len(weights), dtype=np.bool_)
    inside[order[before < wanted]] = True
    inside[order[0]] = True  # top_p = 0 keeps the best one
    return inside


def logprob_of(logits: Row, token: TokenId, num_top: int) -> Logprob:
    """Log-softmax of the raw logits at the chosen token and at the best `num_top` ones."""
    shifted = logits.astype(np.float64) - float(logits.max())  # [vocab]
    log_total = float(np.log(np.exp(shifted).sum()))
    best = top_ids(logits, num_top) if num_top > 0 else np.empty(0, dtype=np.int64)
    return Logprob(
        chosen=float(shifted[token]) - log_total,
        rank=1 + int(np.count_nonzero(logits > logits[token])),
        top=tuple((int(i), float(shifted[i]) - log_total) for i in best),
    )
