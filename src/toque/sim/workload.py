"""Requests as they come: kinds of them, in a Poisson stream, the same for the same seed.

Owns: nothing. Knows: lengths, classes of service. Does not know: text, who serves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toque.types import Request, SamplingParams, Slo


@dataclass(frozen=True, slots=True)
class Kind:
    """Lengths are drawn evenly between two bounds, in tokens."""

    name: str
    share: float  # of the requests
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    slo: Slo | None = None


def arrivals(
    kinds: Sequence[Kind], per_s: float, until_s: float, seed: int, vocab_size: int
) -> Iterator[tuple[float, Request]]:
    """(time, request) in order of time, until `until_s`. No two prompts share a page."""
    rng = random.Random(seed)
    at_s, number = 0.0, 0
    while True:
        at_s += rng.expovariate(per_s)
        if at_s >= until_s:
            return
        number += 1
        kind = rng.choices(kinds, [kind.share for kind in kinds])[0]
        yield at_s, drawn(kind, number, at_s, rng, vocab_size)


def drawn(kind: Kind, number: int, at_s: float, rng: random.Random, vocab_size: int) -> Request:
    """One request of a kind. Its first tokens spell its number."""
    length = rng.randint(*kind.prompt_tokens)
    low = vocab_size // 4  # away from control and byte tokens
    width = vocab_size - 2 * low
    spelled = [low + (number // width**place) % width for place in range(3)]
    prompt = [*spelled, *(low + rng.randrange(width) for _ in range(length))][:length]
    sampling = SamplingParams(
        temperature=0.0,
        seed=number,
        max_tokens=rng.randint(*kind.output_tokens),
        ignore_eos=True,
    )
    return Request(
        id=f"{kind.name}-{number}",
        prompt=tuple(prompt),
        sampling=sampling,
        arrived_s=at_s,
        slo=kind.slo,
    )
