"""Logits at every position of one sequence, chunk by chunk, straight through a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.drawn import BLOCK_SIZE, forward_batch
from toque.kernels.api import Floats, Ops
from toque.model.dense import DenseDecoder

CHUNK_TOKENS = 128


def logits_by_chunk(
    model: DenseDecoder, ops: Ops, tokens: Sequence[int], kv_dtype: str
) -> Iterator[tuple[slice, Floats]]:
    """(positions, logits [chunk, vocab]) in order, over a fresh KV pool of `kv_dtype`."""
    num_pages = -(-len(tokens) // BLOCK_SIZE)
    kv = ops.kv_pages(model.kv_specs(kv_dtype), num_pages, BLOCK_SIZE)
    table = np.arange(num_pages, dtype=np.int32)[None, :]  # [1, pages]
    ids = np.asarray(tokens, dtype=np.int32)
    for begin in range(0, len(tokens), CHUNK_TOKENS):
        end = min(begin + CHUNK_TOKENS, len(tokens))
        batch = forward_batch(table, [end], end - begin)
        yield slice(begin, end), model.forward(replace(batch, ids=ids[begin:end]), kv)


def kv_bytes_per_token(model: DenseDecoder, kv_dtype: str) -> int:
    """K and V of all layers."""
    return sum(spec.bytes_per_token() for spec in model.kv_specs(kv_dtype))
