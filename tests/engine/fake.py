"""A model that is a hash function, run by an executor that has nothing but pages to remember with.

The next token is a function of *all tokens as they stand in the row's pages*. If the scheduler or
the cache ever hands out a wrong page, skips a token or computes one at another place, the text
differs from what `expected_tokens` gets by applying the function to the request alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from toque.types import Chunk, Request, Sampled, SamplingParams, StepPlan, StepResult

VOCAB = 64
END = 0


def next_token(tokens: Sequence[int], seed: int) -> int:
    return zlib.crc32(bytes(tokens) + seed.to_bytes(2, "little")) % VOCAB


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    """Apply the rules for ending a sequence to the function, one token after another."""
    sampling = request.sampling
    assert sampling.seed is not None
    tokens, output = list(request.prompt), list[int]()
    while True:
        token = next_token(tokens, sampling.seed)
        tokens.append(token)
        output.append(token)
        if token == END and not sampling.ignore_eos:
            return output
        if len(output) == sampling.max_tokens or len(tokens) == max_model_len:
            return output


class PageExecutor:
    """Rows, page tables and page contents; nothing is known of sequences."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.contents: dict[tuple[int, int], int] = {}  # (page, offset) -> token
        self.pages: dict[int, list[int]] = {}  # row -> page table
        self.seeds: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for setup in plan.setups:
            self.pages[setup.row] = list(setup.pages)
            assert setup.sampling.seed is not None
            self.seeds[setup.row] = setup.sampling.seed
            self.last.pop(setup.row, None)
        for chunk in plan.chunks:
            self.pages[chunk.row] += chunk.new_pages
            self._write(chunk)
        sampled = [self._sample(chunk) for chunk in plan.chunks if chunk.sample]
        return StepResult(step=plan.step, sampled=tuple(sampled))

    def _write(self, chunk: Chunk) -> None:
        tokens = chunk.tokens or (self.last[chunk.row],)
        assert len(tokens) == chunk.num_tokens
        for offset, token in enumerate(tokens):
            self.contents[self._place(chunk.row, chunk.start + offset)] = token

    def _place(self, row: int, position: int) -> tuple[int, int]:
        return self.pages[row][position // self.block_size], position % self.block_size

    def _sample(self, chunk: Chunk) -> Sampled:
        end = chunk.start + chunk.num_tokens
        seen = [self.contents[self._place(chunk.row, position)] for position in range(end)]
        self.last[chunk.row] = next_token(seen, self.seeds[chunk.row])
        return Sampled(row=chunk.row, token=self.last[chunk.row])


def request(
    name: str, prompt: Sequence[int], max_tokens: int = 8, seed: int = 0, **sampling: object
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(id=name, prompt=tuple(prompt), sampling=params, arrived_s=0.0)
