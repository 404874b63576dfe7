"""From the chunks of a plan to the flat arrays that layers and kernels read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toque.kernels.api import Decode, ForwardBatch, Ints
from toque.types import Chunk
from toque.worker.state import DeviceState


def build_batch(chunks: Sequence[Chunk], state: DeviceState) -> ForwardBatch:
    """Lay the chunks one after another. See ForwardBatch for shapes."""
    if all(chunk.num_tokens == 1 for chunk in chunks):
        return batch_of_ones(chunks, state)
    return batch_of_any(chunks, state)


def decode_of(chunks: Sequence[Chunk], state: DeviceState) -> Decode | None:
    """The chunks as a Decode; None if one of them is more than a token that chooses the next."""
    for chunk in chunks:
        if chunk.num_tokens != 1 or not chunk.sample or chunk.targets or chunk.pooled:
            return None
    return Decode(
        [chunk.tokens[0] if chunk.tokens else state.last_token[chunk.row] for chunk in chunks],
        [chunk.row for chunk in chunks],
        [chunk.start for chunk in chunks],
        state.page_table,
        state.block_size,
    )


def batch_of_any(chunks: Sequence[Chunk], state: DeviceState) -> ForwardBatch:
    lengths = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)  # [chunks]
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)  # [chunks]
    chunk_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=chunk_starts[1:])
    of_chunk = np.repeat(np.arange(len(chunks)), lengths)  # [tokens]
    within = np.arange(chunk_starts[-1], dtype=np.int32) - chunk_starts[of_chunk]  # [tokens]
    positions = starts[of_chunk] + within  # [tokens]
    page_table = _page_table(chunks, state)
    page = page_table[of_chunk, positions // state.block_size].astype(np.int64)  # [tokens]
    return ForwardBatch(
        ids=np.array([t for chunk in chunks for t in state.tokens_of(chunk)], dtype=np.int32),
        positions=positions.astype(np.int32),
        chunk_starts=chunk_starts,
        context_lens=starts + lengths,
        page_table=page_table,
        write_at=page * state.block_size + positions % state.block_size,
        output_rows=np.array(_output_rows(chunks, chunk_starts.tolist()), dtype=np.int32),
    )


def batch_of_ones(chunks: Sequence[Chunk], state: DeviceState) -> ForwardBatch:
    """The same for chunks of one token each, which most steps are: half the time, since it uses
    few of numpy's functions, each of which has left the caches while the kernels ran."""
    n, block_size, table = len(chunks), state.block_size, state.page_table
    starts = [chunk.start for chunk in chunks]
    ids = [state.tokens_of(chunk)[0] for chunk in chunks]
    contexts = [start + 1 for start in starts]
    outputs = _output_rows(chunks, range(n + 1))
    pages = [table.item(chunk.row, chunk.start // block_size) for chunk in chunks]
    places = [page * block_size + at % block_size for page, at in zip(pages, starts, strict=True)]
    whole = np.array([*ids, *starts, *contexts, *range(n + 1), *outputs], dtype=np.int32)
    return ForwardBatch(
        ids=whole[:n],
        positions=whole[n : 2 * n],
        chunk_starts=whole[3 * n : 4 * n + 1],
        context_lens=whole[2 * n : 3 * n],
        page_table=_page_table(chunks, state),
        write_at=np.array(places, dtype=np.int64),
        output_rows=whole[4 * n + 1 :],
    )


def _page_table(chunks: Sequence[Chunk], state: DeviceState) -> Ints:
    """[chunks, most pages of any chunk]."""
    rows = [chunk.row for chunk in chunks]
    width = max(state.num_pages[row] for row in rows)
    if len(rows) == 1:  # a view: nothing to gather
        return state.page_table[rows[0] : rows[0] + 1, :width]
    return state.page_table[rows, :width]


def _output_rows(chunks: Sequence[Chunk], starts: Sequence[int]) -> list[int]:  # [outputs]
    """Chunk by chunk: the tokens before its targets, those whose states are pooled, then the one
    that chooses the next token."""
    rows: list[int] = []
    for chunk, begin, end in zip(chunks, starts[:-1], starts[1:], strict=True):
        if chunk.targets:
            first = begin + chunk.targets_from
            rows.extend(range(first, first + len(chunk.targets)))
        if chunk.pooled:
            rows.extend(range(end - chunk.pooled, end))
        if chunk.sample:
            rows.append(end - 1)
    return rows
