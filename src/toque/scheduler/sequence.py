"""A request on its way through the engine.

Owns: nothing but its own fields. Knows: tokens and progress. Does not know: pages, rows of others.

    tokens:   |<------ prompt ------>|<-- output -->|
              |<-- num_computed -->|<---- to do --->|        computed = K and V stand in its pages

A decode is the case of one token to do, a prompt (or a sequence that comes back after preemption)
the case of many. The scheduler is the only one who changes a Sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from toque.memory.radix import Node
from toque.scheduler.diary import Diary
from toque.types import FinishReason, Request, Slo, Times, TokenId, Usage


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    order: int  # of arrival: unique, smaller came first
    tokens: list[TokenId] = field(default_factory=list)
    num_computed: int = 0
    status: Status = Status.WAITING
    row: int | None = None
    waits_for: Node | None = None  # a pending node of the radix tree, see Scheduler._admit
    cached_tokens: int = 0  # of the prompt, at first admission
    num_scored: int = 0  # prompt tokens whose logprobs have been reported
    last_on_worker: bool = False  # the row's last token was sampled there, no need to send it
    lost_tokens: int = 0  # computed before the last preemption and not again yet
    spent_tokens: int = 0  # run through the model for it, each counted once
    preemptions: int = 0
    chunk_tokens: int = 0  # in the step planned last
    key: tuple[float, ...] = ()  # the policy's, as of when it began to wait
    hit_tokens: int = 0  # of its tokens, how many the prefix cache had when last asked
    downgraded: bool = False  # nothing is promised any more
    promised_s: float | None = None  # predicted time from arrival to its first token
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    diary: Diary = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.output]
        self.diary = Diary(self.request.arrived_s)

    @property
    def slo(self) -> Slo | None:
        """What is promised to it still."""
        return None if self.downgraded else self.request.slo

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_to_do(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_expected(self) -> int:
        """`num_to_do`, less what the prefix cache will probably spare a waiting one."""
        return self.num_to_do - (self.hit_tokens if self.status is Status.WAITING else 0)

    @property
    def num_to_score(self) -> int:
        """Prompt tokens whose logprobs are still owed; the first token has none."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return self.num_prompt - 1 - self.num_scored if wanted else 0

    @property
    def generates(self) -> bool:
        return self.request.sampling.max_tokens != 0

    @property
    def is_decoding(self) -> bool:
        """Only the token that was sampled last is left to compute."""
        return self.num_to_do == 1 and self.num_output > 0

    def finish_reason(self, end_ids: frozenset[TokenId], max_model_len: int) -> FinishReason | None:
        """Whether the token appended last ends the sequence."""
        sampling, last = self.request.sampling, self.tokens[-1]
        if self.num_output > sampling.min_tokens and last in self.stop_ids(end_ids):
            return FinishReason.STOP
        limit = sampling.max_tokens
        if (limit is not None and self.num_output >= limit) or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def stop_ids(self, end_ids: frozenset[TokenId]) -> frozenset[TokenId]:
        """Tokens that end this sequence; the sampler bans them until min_tokens are out."""
        own = frozenset(self.request.sampling.stop_token_ids)
        return own if self.request.sampling.ignore_eos else own | end_ids

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt,
            completion_tokens=self.num_output,
            cached_tokens=self.cached_tokens,
        )

    def times(self, finished_s: float) -> Times:
        return Times(
            arrived_s=self.request.arrived_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            finished_s=finished_s,
        )
