"""Who is let in, who is told to come later, and who may start to run now.

Owns: the forecast. Knows: limits, the queue, the running batch, the policy's promises.
Does not know: pages, how a step is planned. It changes nothing but a sequence's own promise.

A refusal is a request's first and only event. `Retry-After` is the time after which the same
request would have been taken, by the same prediction.
"""

from __future__ import annotations

from itertools import takewhile
from math import inf

from toque.scheduler.cost import StepCost, decode_work
from toque.scheduler.forecast import Forecast
from toque.scheduler.policy import Policy
from toque.scheduler.queue import Queue
from toque.scheduler.rows import Rows
from toque.scheduler.sequence import Sequence
from toque.scheduler.step import Limits
from toque.types import NoteKind, RefusalCause, Refused, Request

JOIN_SHARE = 0.8  # of the shortest inter-token target, for a step of streams alone
RETRY_MIN_S = 1.0
STREAMS_SHARE = 0.5  # of the time while a sequence answers; the rest is for others' prompts


class Door:
    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        cost: StepCost,
        queue: Queue,
        rows: Rows,
    ) -> None:
        """`queue` and `rows` are the scheduler's own, to look at."""
        self.forecast = Forecast(cost, limits.max_num_batched_tokens)
        self._limits = limits
        self._policy = policy
        self._cost = cost
        self._queue = queue
        self._rows = rows

    def why_not(self, request: Request, taken: bool) -> Refused | None:
        """What does not depend on time: the request itself, and the length of the queue."""
        reason = self._limits.why_not(request)
        if taken:
            reason = "a request with this id is already running"
        if reason is not None:
            return Refused(id=request.id, message=reason)
        full = self._queue.full(len(request.prompt), len(self._rows.free))
        if full is None:
            return None
        cause, text = full
        return self._later(request, cause, f"the queue is full: {text}", self._drained_s())

    def late(self, sequence: Sequence, now_s: float) -> Refused | None:
        """Whether it can be served as promised. If not: refused, or without a promise from now on,
        as its class says."""
        if sequence.slo is None or not self._policy.promises:
            return None
        first_s, last_s = self._predict(sequence, now_s)
        sequence.promised_s = first_s
        late_s = self._policy.late_s(sequence, first_s, last_s)
        if late_s <= 0:
            return None
        if sequence.slo.downgrade:
            sequence.downgraded = True
            sequence.diary.add(NoteKind.DOWNGRADED, now_s)
            return None
        text = (
            f"the class '{sequence.slo.name}' cannot be kept now: the first token is expected "
            f"{first_s:.1f} s after the request's arrival"
        )
        return self._later(sequence.request, RefusalCause.SLO, text, late_s)

    def hopeless(self, now_s: float) -> list[Sequence]:
        """Those in the queue whose last moment to start has passed."""
        if not self._policy.promises:
            return []
        overdue = takewhile(lambda sequence: sequence.key[:2] < (0.0, now_s), self._queue)
        return [s for s in overdue if s.slo is not None and s.admitted_s is None and s.key[0] == 0]

    def timed_out(self, sequence: Sequence, now_s: float) -> Refused:
        waited_s = now_s - sequence.request.arrived_s
        text = f"nothing of it could be computed within {waited_s:.1f} s (--queue-timeout)"
        cause = RefusalCause.QUEUE_TIMEOUT
        return self._later(sequence.request, cause, text, self._drained_s())

    def may_run(self, sequence: Sequence, now_s: float) -> bool:
        """Whether one more stream leaves all running ones (and itself) within their targets."""
        streams = [*self._rows.running.values(), sequence]
        limit_ms = self._policy.limit_ms(streams, now_s)
        if limit_ms == inf or len(streams) == 1:
            return True
        step = decode_work(len(stream.tokens) for stream in streams)
        return self._cost.predicted_ms(step) <= JOIN_SHARE * limit_ms

    def ms_per_queued_token(self) -> float:
        if not len(self._queue):
            return 0.0
        pace = self.forecast.pace(self._rows.running.values(), inf)
        return self._cost.prompt_ms(0, 256) / 256 / pace.share

    def _predict(self, sequence: Sequence, now_s: float) -> tuple[float, float]:
        """First and last token, seconds after its arrival."""
        running = self._rows.running.values()
        limit_ms = self._policy.limit_ms([*running, sequence], now_s)
        pace = self.forecast.pace(running, limit_ms)
        if not sequence.key:
            sequence.key = self._policy.key(sequence)
        waiting = self._queue.before(sequence)
        reading = [s for s in running if s.num_to_do > 1 and s.key < sequence.key]
        rows_ahead = len(running) + len(waiting) + 1 - self._limits.max_num_seqs
        wait_s = self.forecast.first_token_s(sequence, [*reading, *waiting], rows_ahead, pace)
        first_s = now_s - sequence.request.arrived_s + wait_s
        step = decode_work(len(stream.tokens) for stream in (*running, sequence))
        token_ms = self._cost.predicted_ms(step) / STREAMS_SHARE
        return first_s, first_s + self.forecast.output_left(sequence) * token_ms / 1e3

    def _drained_s(self) -> float:
        return self._queue.tokens * self.ms_per_queued_token() / 1e3

    def _later(self, request: Request, cause: RefusalCause, text: str, after_s: float) -> Refused:
        wait_s = max(RETRY_MIN_S, after_s)
        return Refused(id=request.id, message=text, status=429, retry_after_s=wait_s, cause=cause)
