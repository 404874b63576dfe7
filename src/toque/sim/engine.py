"""A virtual engine in one call: sizes, an order of service and step times become an EngineCore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from toque.engine import EngineCore
from toque.memory.manager import CacheManager
from toque.memory.watch import PageWatch
from toque.scheduler.cost import StepCost, Work
from toque.scheduler.policy import Policy
from toque.scheduler.queue import NO_LIMITS, QueueLimits
from toque.scheduler.scheduler import Scheduler
from toque.scheduler.step import Limits
from toque.sim.device import Clock, Device
from toque.sim.run import Served, Timed, VirtualPort


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """An engine's, as in EngineConfig."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    total_pages: int = 8192
    block_size: int = 16
    vocab_size: int = 4096
    prefix_caching: bool = True
    prefill_tokens_per_s: float = 500.0  # what the cost model begins with
    queue: QueueLimits = NO_LIMITS
    watched_pages_share: float = 0.0


class Simulation:
    """`run` until nothing is to come and nobody is here."""

    def __init__(
        self,
        sizes: Sizes,
        policy: Callable[[StepCost], Policy],
        step_ms: Callable[[Work], float],
        arrivals: Iterator[Timed],
        on_end: Callable[[Served], None] = lambda served: None,
    ) -> None:
        limits = Limits(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            vocab_size=sizes.vocab_size,
            chunked_prefill=True,
            end_token_ids=frozenset({0}),
            queue=sizes.queue,
        )
        self.clock = Clock()
        self.cost = StepCost(sizes.prefill_tokens_per_s)
        self.cache = CacheManager(
            sizes.total_pages,
            sizes.block_size,
            sizes.prefix_caching,
            lambda depth: self.cost.page_worth(depth, sizes.block_size),
            watch=PageWatch(self.clock, share) if (share := sizes.watched_pages_share) else None,
        )
        self.scheduler = Scheduler(limits, self.cache, policy(self.cost), self.cost)
        self.device = Device(self.clock, step_ms, sizes.vocab_size)
        self.port = VirtualPort(self.clock, arrivals, on_end)
        self.core = EngineCore(self.scheduler, self.device, self.port, self.cost, self.clock)

    def run(self, until_s: float = float("inf")) -> None:
        while not self.port.over or self.scheduler.has_work:
            if self.clock.now_s >= until_s:
                return
            self.core.step(0.0 if self.scheduler.has_work else 1.0)
