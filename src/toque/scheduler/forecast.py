"""When a request will get its first token, as far as can be said now.

Owns: running means of outputs and of how far off its own forecasts were. Knows: the queue's order,
the cost model. Does not know: what anybody was promised.

Prompts are computed in the share of each step that the running streams leave, in order. So a first
token comes when the prompts in front and the own one are computed, and not before a row is free.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from toque.scheduler.cost import StepCost, decode_work
from toque.scheduler.sequence import Sequence

SHARE_MIN = 0.05  # of a step, for prompts: streams alone never take all of it for long
MEMORY = 0.05  # weight of the newest observation
BIAS_RANGE = (0.5, 3.0)


@dataclass(frozen=True, slots=True)
class Pace:
    """What the running batch leaves for prompts."""

    share: float  # of the time
    decode_ms: float  # a step of the streams alone
    row_every_s: float  # how often a sequence ends and leaves its row, in the mean


class Forecast:
    def __init__(self, cost: StepCost, step_tokens: int) -> None:
        self._cost = cost
        self._step_tokens = step_tokens
        self._output_tokens = 0.0  # mean of those who finished; 0 = nobody has yet
        self._bias = 1.0  # measured over predicted

    def pace(self, running: Collection[Sequence], limit_ms: float) -> Pace:
        """`limit_ms`: the longest that a step may take for the streams' sake."""
        decode = decode_work(len(sequence.tokens) for sequence in running)
        decode_ms = self._cost.predicted_ms(decode)
        full_ms = decode_ms + self._cost.prompt_ms(0, self._step_tokens)
        step_ms = max(min(limit_ms, full_ms), 1e-3)
        share = max(SHARE_MIN, 1.0 - decode_ms / step_ms)
        left = [self.output_left(sequence) for sequence in running]
        stream_s = sum(left) / len(left) * step_ms / 1e3 if left else 0.0
        return Pace(share, decode_ms, stream_s / max(1, len(left)))

    def output_left(self, sequence: Sequence) -> float:
        """Tokens that it will probably still generate."""
        most = sequence.request.sampling.max_tokens or 0
        usual = self._output_tokens or most
        return max(1.0, min(most, usual) - sequence.num_output)

    def need_ms(self, sequence: Sequence) -> float:
        """What the rest of its prompt adds to the steps."""
        todo = sequence.num_expected
        return self._cost.prompt_ms(len(sequence.tokens) - todo, todo)

    def first_token_s(
        self, sequence: Sequence, ahead: Iterable[Sequence], rows_ahead: int, pace: Pace
    ) -> float:
        """Seconds from now. `rows_ahead`: how many must end before it can have a row."""
        work_ms = self.need_ms(sequence) + sum(self.need_ms(other) for other in ahead)
        computed_s = (work_ms / pace.share + pace.decode_ms) / 1e3
        return self._bias * max(computed_s, rows_ahead * pace.row_every_s)

    def came(self, sequence: Sequence, now_s: float) -> None:
        """A first token was computed: learn from what had been predicted for it."""
        if sequence.promised_s is None or sequence.promised_s <= 0:
            return
        ratio = (now_s - sequence.request.arrived_s) / sequence.promised_s
        low, high = BIAS_RANGE
        aim = min(max(self._bias * min(max(ratio, 0.5), 2.0), low), high)
        self._bias += MEMORY * (aim - self._bias)

    def finished(self, sequence: Sequence) -> None:
        if self._output_tokens == 0.0:
            self._output_tokens = float(sequence.num_output)
        self._output_tokens += MEMORY * (sequence.num_output - self._output_tokens)
