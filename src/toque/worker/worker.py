"""The worker: runs a step plan on a model and samples.

Owns: the DeviceState. Knows: the model's forward, the sampler. Does not know: requests, the
scheduler's lists, whether a sequence goes on after this step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from msgspec import structs

from toque.errors import NOT_NUMBERS, EngineError, ToqueError
from toque.kernels.api import Decode, Floats, ForwardBatch, LayerKV, Mask, Sampler
from toque.types import (
    Chunk,
    Logprob,
    RowSetup,
    Sampled,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenId,
)
from toque.worker.batch import build_batch, decode_of
from toque.worker.state import DeviceState

log = logging.getLogger(__name__)

PROBES, PROBES_S = 3, 0.6  # how often the prefill is measured, and until when
VOCABULARY = 1 << 31  # more than any has
SCORE_ROWS = 64  # logits of prompt tokens that are held at a time


class Model(Protocol):
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Floats:
        """Logits [outputs, vocab] of batch.output_rows; writes K and V of all tokens into kv."""

    def hidden(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Floats:
        """`forward` in two parts: the states [outputs, hidden] …"""

    def decode(
        self, step: Decode, kv: Sequence[LayerKV], sampler: Sampler, known: int
    ) -> list[Sampled]:
        """`forward` and `sampler.sample` at once, where a step allows it: see Recorded.decode."""

    def logits(self, hidden: Floats) -> Floats:
        """… and their logits, [rows, hidden] -> [rows, vocab]."""


class Constraints(Protocol):
    """What rows may choose, where their requests say so."""

    def begin(self, setup: RowSetup) -> None:
        """A sequence takes a row, with the output that it may have had already."""

    def free(self, rows: Sequence[int]) -> bool:
        """Nothing needs to be asked or told about any of these rows."""

    def mask(self, row: int) -> Mask | None:
        """What the row may choose next; None = anything. Raises ToqueError for the client."""

    def accept(self, row: int, token: TokenId) -> bool:
        """The row chose a token of its mask. True: nothing may follow. Raises ToqueError."""


class Unconstrained:
    """Constraints of an engine without grammars."""

    def begin(self, setup: RowSetup) -> None: ...

    def free(self, rows: Sequence[int]) -> bool:
        return True

    def mask(self, row: int) -> Mask | None:
        return None

    def accept(self, row: int, token: TokenId) -> bool:
        return False


class Worker:
    """An engine.Executor on this machine."""

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        known_tokens: int | None = None,
        constraints: Constraints | None = None,
    ) -> None:
        """Logits from `known_tokens` on are padding: no token stands for them."""
        self._model = model
        self._state = state
        self._constraints = constraints or Unconstrained()
        self._known_tokens = known_tokens

    def run(self, plan: StepPlan) -> StepResult:
        self._state.apply(plan)
        for setup in plan.setups:
            self._constraints.begin(setup)
        return StepResult(step=plan.step, sampled=tuple(self._compute(plan.chunks)))

    def _compute(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """In one native call if all chunks decode and nothing binds their rows. If that call fails,
        `_compute_in_parts` finds out whose fault it is."""
        step = decode_of(chunks, self._state)
        if step is None or not self._constraints.free(step.rows):
            return self._compute_in_parts(chunks)
        try:
            sampled = self._model.decode(
                step, self._state.kv, self._state.sampler, self._known_tokens or VOCABULARY
            )
        except Exception:  # noqa: BLE001  it comes again, alone, and is told there
            return self._compute_in_parts(chunks)
        for entry in sampled:
            self._state.last_token[entry.row] = entry.token
        return sampled

    def _compute_in_parts(self, chunks: Sequence[Chunk]) -> list[Sampled]:
        """Forward and sample. If the batch fails, each chunk is tried alone, so that whatever is
        wrong with one stays there. Trying again is harmless: K and V are written to the same
        places with the same values, and random numbers hang on positions, not on tries."""
        scoring = any(chunk.targets or chunk.pooled for chunk in chunks)
        try:
            batch = build_batch(chunks, self._state)
            forward = self._model.hidden if scoring else self._model.forward
            rows = forward(batch, self._state.kv)
        except Exception as error:
            if len(chunks) == 1:
                log.exception("a sequence failed in the forward pass")
                return [
                    Sampled(row=chunks[0].row, error=f"the model failed: {type(error).__name__}")
                ]
            return [sampled for chunk in chunks for sampled in self._compute_in_parts([chunk])]
        if scoring:
            return self._score_and_sample(chunks, rows)
        self._forget_padding(rows)
        return self._sample([chunk for chunk in chunks if chunk.sample], rows)

    def _score_and_sample(
        self,
        chunks: Sequence[Chunk],
        hidden: Floats,  # [outputs, hidden]
    ) -> list[Sampled]:
        out: list[Sampled] = []
        begin = 0
        for chunk in chunks:
            end = begin + len(chunk.targets) + chunk.pooled + chunk.sample
            try:
                out += self._score_one(chunk, hidden[begin:end])
            except Exception as error:
                log.exception("a sequence failed in scoring")
                failed = f"scoring failed: {type(error).__name__}"
                out.append(Sampled(row=chunk.row, error=failed))
            begin = end
        return out

    def _score_one(self, chunk: Chunk, hidden: Floats) -> list[Sampled]:
        """`hidden`: [targets (+ 1 where the chunk samples), hidden], or [pooled, hidden]."""
        if chunk.pooled:
            return self._pool(chunk, hidden)
        targets = len(chunk.targets)
        scores = self._score(chunk, hidden[:targets])
        if isinstance(scores, Sampled):
            return [scores]  # it failed
        if not chunk.sample:
            return [Sampled(row=chunk.row, scores=scores)] if scores else []
        logits = self._model.logits(hidden[targets:])  # [1, vocab]
        self._forget_padding(logits)
        return [structs.replace(self._sample([chunk], logits)[0], scores=scores)]

    def _pool(self, chunk: Chunk, hidden: Floats) -> list[Sampled]:  # [pooled, hidden]
        pool = self._state.pools[chunk.row]
        pool.add(hidden)
        return [Sampled(row=chunk.row, vector=pool.vector())] if chunk.embed else []

    def _forget_padding(self, logits: Floats) -> None:  # [rows, vocab]
        if self._known_tokens is not None and self._known_tokens < logits.shape[1]:
            logits[:, self._known_tokens :] = -np.inf

    def _score(self, chunk: Chunk, hidden: Floats) -> tuple[Logprob, ...] | Sampled:
        """Logprobs of the chunk's targets, or its failure. `hidden`: [targets, hidden]."""
        num_top = self._state.prompt_logprobs[chunk.row]
        scores: list[Logprob] = []
        # In blocks: the logits of a whole chunk would be [tokens, vocab], gigabytes.
        for first in range(0, len(chunk.targets), SCORE_ROWS):
            logits = self._model.logits(hidden[first : first + SCORE_ROWS])  # [block, vocab]
            self._forget_padding(logits)
            targets = chunk.targets[first : first + SCORE_ROWS]
            for score in self._state.sampler.score(logits, targets, num_top):
                if score is None:
                    return Sampled(row=chunk.row, error=NOT_NUMBERS)
                scores.append(score)
        return tuple(scores)

    def _sample(self, chunks: Sequence[Chunk], logits: Floats) -> list[Sampled]:
        """`logits`: [chunks, vocab]. As in `_compute`: what is wrong with one stays there. Masks
        may be asked for again, and no sampler has changed if the call for all was refused."""
        if not chunks:
            return []
        rows = [chunk.row for chunk in chunks]
        positions = [chunk.start + chunk.num_tokens for chunk in chunks]
        try:
            masks = [self._constraints.mask(row) for row in rows]
            sampled = self._state.sampler.sample(logits, rows, positions, masks)
        except Exception as error:  # noqa: BLE001  logged by _failed, or tried again alone
            if len(chunks) == 1:
                return [_failed(rows[0], error)]
            apart = zip(chunks, np.split(logits, len(chunks)), strict=True)
            return [one for chunk, row in apart for one in self._sample([chunk], row)]
        for entry in sampled:
            self._state.last_token[entry.row] = entry.token
        return [self._accepted(entry) for entry in sampled]

    def _accepted(self, sampled: Sampled) -> Sampled:
        """With what its row's constraint says of the token."""
        if sampled.error is not None:
            return sampled
        try:
            complete = self._constraints.accept(sampled.row, sampled.token)
        except Exception as error:  # noqa: BLE001  logged by _failed
            return _failed(sampled.row, error)
        return structs.replace(sampled, complete=True) if complete else sampled


def _failed(row: int, error: Exception) -> Sampled:
    if isinstance(error, ToqueError):  # made for the client
        return Sampled(row=row, error=str(error))
    log.error("a sequence failed in sampling", exc_info=error)
    return Sampled(row=row, error=f"sampling failed: {type(error).__name__}")


def measure_prefill(worker: Worker, num_tokens: int, block_size: int) -> float:
    """Tokens per second of a short prompt, run in row 0 and pages 0.. before anybody is served.

    A shorter one goes first: it touches the weights for the first time. The best of a few counts,
    since other programs can only slow it down; on a slow machine one is enough. Raises EngineError.
    """
    _probe(worker, max(1, num_tokens // 4), block_size)
    taken_s = [_probe(worker, num_tokens, block_size)]
    while len(taken_s) < PROBES and sum(taken_s) < PROBES_S:
        taken_s.append(_probe(worker, num_tokens, block_size))
    return num_tokens / min(taken_s)


def _probe(worker: Worker, num_tokens: int, block_size: int) -> float:
    """Seconds that a prompt takes."""
    setup = RowSetup(
        row=0,
        sampling=SamplingParams(temperature=0.0, seed=0),
        choice=0,
        num_prompt=num_tokens,
        pages=tuple(range(-(-num_tokens // block_size))),
        end_token_ids=(),
    )
    chunk = Chunk(row=0, start=0, num_tokens=num_tokens, tokens=(0,) * num_tokens, sample=True)
    t0 = time.perf_counter()
    result = worker.run(StepPlan(step=0, setups=(setup,), chunks=(chunk,)))
    if result.sampled[0].error is not None:
        raise EngineError(result.sampled[0].error)
    return time.perf_counter() - t0
