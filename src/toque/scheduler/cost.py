"""How long a step will take, learned from the steps before it.

Owns: the running sums of a least-squares fit. Knows: a step's sizes. Does not know: the hardware.

    ms = constant + a * tokens + b * pairs + c * context + d * outputs

*tokens* pass through the layers, *pairs* are queries x keys of attention, *context* the keys and
values that are read at all, *outputs* the rows whose logits are computed. No coefficient is below
zero. What the fit minimizes is the relative error, so that a decode of 20 ms counts as much as a
prompt's step of 500. A step far off the prediction (something else had the machine) counts less,
as in Huber's estimator, "Robust Estimation of a Location Parameter" (1964).

Steps fade: the last hundred or so count. Those with a prompt in them and those that only decode
fade apart, or an hour of decoding would make the model forget what a prompt costs.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from toque.types import Chunk, StepPlan

FADE = 0.99  # weight of the past at each step of a kind
PRIOR = 1e-3  # weight of what was measured at start-up
WIDE = 2.0  # an error beyond so many times the usual one counts in proportion, not squared
EAGER_STEPS, REFIT_STEPS = 64, 16  # a fit takes a while: after the first steps not after each
TERMS = 5
RATE_STEPS, RATE_TOKENS = 9, 32  # a rate is the median of so many steps, each of so many tokens
# A step's weight, its milliseconds, then what the terms after the first one count.
Observed = tuple[float, float, int, int, int, int]


@dataclass(slots=True)
class Work:
    """The sizes of a step, or of a part of one."""

    tokens: int = 0
    pairs: int = 0
    context: int = 0
    outputs: int = 0
    prompts: bool = False  # some of it is more than one token of a sequence

    def add(self, start: int, num_tokens: int, outputs: int, sign: int = 1) -> None:
        """A chunk of `num_tokens` from position `start` on; sign -1 takes it back."""
        self.tokens += sign * num_tokens
        self.pairs += sign * num_tokens * (start + num_tokens)
        self.context += sign * (start + num_tokens)
        self.outputs += sign * outputs
        self.prompts |= num_tokens > 1

    def add_chunk(self, chunk: Chunk, sign: int = 1) -> None:
        outputs = chunk.sample + len(chunk.targets)
        self.add(chunk.start, chunk.num_tokens, outputs, sign)


def work_of(chunks: Iterable[Chunk]) -> Work:
    work = Work()
    for chunk in chunks:
        work.add_chunk(chunk)
    return work


def decode_work(lengths_tokens: Iterable[int]) -> Work:
    """A step that gives one token to each sequence of these lengths."""
    work = Work()
    for length in lengths_tokens:
        work.add(length - 1, 1, 1)
    return work


class StepCost:
    """Predicts milliseconds; `observe` corrects it. Starts from one rate, measured at start-up."""

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._ms = [0.0, 1e3 / prefill_tokens_per_s, 0.0, 0.0, 0.0]  # per term
        self._start = np.array(self._ms)
        self._gram = np.zeros((2, TERMS, TERMS))  # by kind: decodes only, with prompts
        self._moment = np.zeros((2, TERMS))
        self._observed = 0
        self._unread: tuple[list[Observed], list[Observed]] = (
            [],
            [],
        )  # by kind, since the last fit
        self._rates: deque[float] = deque(maxlen=RATE_STEPS)
        self.error = 0.1  # the usual relative error, of late

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The usual rate of late steps with prompts; None until there were some."""
        return statistics.median(self._rates) if len(self._rates) == RATE_STEPS else None

    def predicted_ms(self, work: Work) -> float:
        one, tokens, pairs, context, outputs = self._ms
        return (
            one
            + tokens * work.tokens
            + pairs * work.pairs
            + context * work.context
            + outputs * work.outputs
        )

    def plan_ms(self, plan: StepPlan) -> float:
        return self.predicted_ms(work_of(plan.chunks))

    def prompt_ms(self, start: int, num_tokens: int) -> float:
        """What computing so many tokens from `start` on adds to steps that run anyway."""
        _, tokens, pairs, context, outputs = self._ms
        # Half of the pairs: an earlier token of a prompt sees fewer keys; chunks make up for some.
        per_token = tokens + pairs * (start + num_tokens / 2)
        return per_token * num_tokens + context * (start + num_tokens) + outputs

    def most_tokens(self, work: Work, start: int, limit_ms: float) -> int:
        """The longest chunk from `start` on with which a step of `work` stays within the limit."""
        if limit_ms == math.inf:
            return 1 << 30
        _, tokens, pairs, context, outputs = self._ms
        room_ms = limit_ms - self.predicted_ms(work) - outputs - context * start
        linear = tokens + pairs * start + context
        if room_ms <= 0:
            return 0
        if pairs * room_ms < 1e-9 * linear * linear:
            return int(room_ms / linear) if linear > 0 else 1 << 30
        return int((math.sqrt(linear * linear + 4 * pairs * room_ms) - linear) / (2 * pairs))

    def page_worth(self, depth: int, block_size: int) -> float:
        """How much dearer than a prompt's first page the one at `depth` is to compute, >= 1."""
        _, tokens, pairs, _, _ = self._ms
        first = tokens + pairs * block_size
        return 1.0 + pairs * block_size * depth / first if first > 0 else 1.0

    def observe(self, plan: StepPlan, measured_ms: float) -> None:
        work = work_of(plan.chunks)
        expected_ms = self.predicted_ms(work)
        measured_ms = max(measured_ms, 1e-3)
        error = abs(expected_ms - measured_ms) / measured_ms
        weight = min(1.0, WIDE * self.error / error) if error > 0 else 1.0
        self.error += 0.02 * (min(error, 1.0) - self.error)
        # Folded in when they are needed: numpy's small arrays take longer than all else here.
        observed = (weight, measured_ms, work.tokens, work.pairs, work.context, work.outputs)
        self._unread[work.prompts].append(observed)
        if work.prompts and work.tokens >= RATE_TOKENS:
            self._rates.append(work.tokens / measured_ms * 1e3)
        self._observed += 1
        if self._observed < EAGER_STEPS or self._observed % REFIT_STEPS == 0:
            self._fold()
            self._ms = self._fit()

    def _fold(self) -> None:
        """What was observed joins the sums; older steps fade with each newer one of their kind."""
        for kind, observed in enumerate(self._unread):
            if not observed:
                continue
            table = np.array(observed)
            weight = table[:, 0] * FADE ** np.arange(len(table) - 1, -1, -1)  # [steps]
            x = table[:, 1:] / table[:, 1:2]  # [steps, terms], relative: the aim is x @ ms = 1
            x[:, 0] = 1.0 / table[:, 1]
            faded = FADE ** len(table)
            self._gram[kind] = faded * self._gram[kind] + (weight[:, None] * x).T @ x
            self._moment[kind] = faded * self._moment[kind] + weight @ x
            observed.clear()

    def _fit(self) -> list[float]:
        """Least squares with no coefficient below zero, pulled a little towards the start."""
        gram, moment = self._gram[0] + self._gram[1], self._moment[0] + self._moment[1]
        scale = np.sqrt(np.maximum(gram.diagonal(), 1e-300))
        gram = gram / np.outer(scale, scale) + PRIOR * np.eye(TERMS)
        moment = moment / scale + PRIOR * self._start * scale
        kept = list(range(TERMS))
        while True:  # without the term that is furthest below zero, until there is none
            found = np.linalg.solve(gram[np.ix_(kept, kept)], moment[kept])
            worst = int(found.argmin())
            if found[worst] >= 0 or len(kept) == 1:
                break
            del kept[worst]
        ms = [0.0] * TERMS
        for term, value in zip(kept, found.tolist(), strict=True):
            ms[term] = max(0.0, value) / float(scale[term])
        return ms
