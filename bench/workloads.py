"""The named workloads, and their prompts as token ids: the same on every machine and server."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass

import numpy as np

# Control tokens stand at one end of every vocabulary that we know; byte tokens at the lower one.
MARGIN_TOKENS = 1000
DEFAULT_VOCAB_SIZE = 32000  # ids below this exist in every model of the catalogue


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` by `clients` that each send the next one when the last is answered (closed loop).

    Every prompt begins with the same `shared_tokens` and has `prompt_tokens` in all.
    """

    name: str
    requests: int
    clients: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    @property
    def length_tokens(self) -> int:
        """What one sequence takes of the context."""
        return self.prompt_tokens + self.output_tokens

    @property
    def headline(self) -> str:
        """The rate that this workload is about."""
        return "prompt_tok_per_s" if self.output_tokens == 1 else "out_tok_per_s"

    def shortened(self, requests: int | None) -> Workload:
        """The same with another number of requests, never more clients than those."""
        if requests is None:
            return self
        return dataclasses.replace(self, requests=requests, clients=min(self.clients, requests))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", requests=4, clients=1, prompt_tokens=128, output_tokens=128),
        Workload("batch16", requests=32, clients=16, prompt_tokens=128, output_tokens=128),
        Workload("batch32", requests=64, clients=32, prompt_tokens=64, output_tokens=128),
        Workload("prefill", requests=4, clients=1, prompt_tokens=1024, output_tokens=1),
        Workload(
            "prefix",
            requests=32,
            clients=8,
            prompt_tokens=1088,
            output_tokens=32,
            shared_tokens=1024,
        ),
    )
}


def make_prompts(workload: Workload, seed: int, vocab_size: int) -> list[list[int]]:
    """[requests][prompt_tokens] ids, the same for the same arguments; no control tokens.

    Two prompts have nothing in common but the shared beginning, and two workloads nothing at all,
    so that a prefix cache finds what the workload means it to find.
    """
    low = min(MARGIN_TOKENS, vocab_size // 4)
    rng = np.random.default_rng([seed, zlib.crc32(workload.name.encode())])
    own_tokens = workload.prompt_tokens - workload.shared_tokens
    shared = rng.integers(low, vocab_size - low, workload.shared_tokens)
    own = rng.integers(low, vocab_size - low, (workload.requests, own_tokens))
    # Random first tokens could agree by chance; consecutive ones cannot.
    own[:, 0] = low + (rng.integers(vocab_size) + np.arange(workload.requests)) % (
        vocab_size - 2 * low
    )
    return [[*map(int, shared), *map(int, row)] for row in own]
