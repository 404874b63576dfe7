"""What the worker keeps per row between steps, and the pages of the KV pool.

Owns: KV pages, page tables, last sampled tokens, the sampler, pools. Knows: StepPlan.
Does not know: which page belongs to whom (the plan says), or when a sequence ends.
"""

from __future__ import annotations

import numpy as np

from toque.kernels.api import Ints, LayerKV, Sampler
from toque.types import Chunk, RowSetup, StepPlan
from toque.worker.pooling import StatePool


class DeviceState:
    def __init__(
        self, num_rows: int, max_pages_per_row: int, kv: list[LayerKV], sampler: Sampler
    ) -> None:
        self.kv = kv
        self.block_size = kv[0].block_size
        self.page_table: Ints = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self.num_pages = [0] * num_rows
        self.last_token = [0] * num_rows
        self.prompt_logprobs = [0] * num_rows  # how many alternatives a scored token reports
        self.sampler = sampler
        self.pools: list[StatePool] = [StatePool() for _ in range(num_rows)]

    def apply(self, plan: StepPlan) -> None:
        """Take over what the plan says about rows, before anything is computed. Not repeatable:
        new pages are appended."""
        for setup in plan.setups:
            self._set_up(setup)
        for chunk in plan.chunks:
            self._append_pages(chunk.row, chunk.new_pages)

    def _set_up(self, setup: RowSetup) -> None:
        self.num_pages[setup.row] = 0
        self._append_pages(setup.row, setup.pages)
        self.prompt_logprobs[setup.row] = setup.sampling.prompt_logprobs or 0
        self.sampler.set_up(setup)
        self.pools[setup.row] = StatePool()

    def _append_pages(self, row: int, pages: tuple[int, ...]) -> None:
        if not pages:
            return
        begin = self.num_pages[row]
        self.page_table[row, begin : begin + len(pages)] = pages
        self.num_pages[row] = begin + len(pages)

    def tokens_of(self, chunk: Chunk) -> tuple[int, ...]:
        """The chunk's token ids; a decode's is the one that was sampled here last."""
        return chunk.tokens or (self.last_token[chunk.row],)
