"""From the chunks of a plan to the flat arrays that layers and kernels read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toque.kernels.api import ForwardBatch, Ints
from toque.types import Chunk
from toque.worker.state import DeviceState


def build_batch(chunks: Sequence[Chunk], state: DeviceState) -> ForwardBatch:
    """Lay the chunks one after another. See ForwardBatch for shapes."""
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)  # [chunks]
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)  # [chunks]
    rows = np.array([chunk.row for chunk in chunks], dtype=np.int32)  # [chunks]
    chunk_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=chunk_starts[1:])
    of_chunk = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]
    within = np.arange(chunk_starts[-1], dtype=np.int32) - chunk_starts[of_chunk]  # [tokens]
    positions = starts[of_chunk] + within  # [tokens]
    page_table = state.page_table[rows, : int(state.num_pages[rows].max())]  # [chunks, pages]
    page = page_table[of_chunk, positions // state.block_size].astype(np.int64)  # [tokens]
    return ForwardBatch(
        ids=np.array([t for chunk in chunks for t in state.tokens_of(chunk)], dtype=np.int32),
        positions=positions.astype(np.int32),
        chunk_starts=chunk_starts,
        context_lens=starts + lengths,
        page_table=np.ascontiguousarray(page_table),
        write_at=page * state.block_size + positions % state.block_size,
        output_rows=_output_rows(chunks, chunk_starts),
    )


def _output_rows(chunks: Sequence[Chunk], chunk_starts: Ints) -> Ints:  # [outputs]
    """Chunk by chunk: the tokens before its targets, those whose states are pooled, then the one
    that chooses the next token."""
    rows: list[int] = []
    for chunk, begin, end in zip(chunks, chunk_starts[:-1], chunk_starts[1:], strict=True):
        first = int(begin) + chunk.targets_from
        rows.extend(range(first, first + len(chunk.targets)))
        rows.extend(range(int(end) - chunk.pooled, int(end)))
        if chunk.sample:
            rows.append(int(end) - 1)
    return np.array(rows, dtype=np.int32)
