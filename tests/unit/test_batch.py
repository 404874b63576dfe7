"""The flat arrays of a step, against plain loops; and the short way for steps of single tokens."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.kernels import select
from toque.kernels.api import ForwardBatch, PagedKV
from toque.types import Chunk, RowSetup, SamplingParams, StepPlan
from toque.worker.batch import batch_of_any, batch_of_ones, build_batch
from toque.worker.state import DeviceState

ROWS, BLOCK, PAGES = 6, 4, 16


def drawn_step(seed: int, longest: int) -> tuple[DeviceState, list[Chunk]]:
    """Rows at drawn places of their contexts, with pages anywhere; some have targets or pools."""
    rng = np.random.default_rng(seed)
    ops = select("ref")
    kv = ops.kv_pages([PagedKV(1, 2, "float32")], ROWS * PAGES, BLOCK)
    state = DeviceState(ROWS, PAGES, kv, ops.sampler(ROWS))
    pages = rng.permutation(ROWS * PAGES)
    setups, chunks = [], []
    for row in rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].tolist():
        count, start = int(rng.integers(1, longest + 1)), int(rng.integers(0, 30))
        known, pages = pages[: start // BLOCK], pages[start // BLOCK :]
        more = -(-(start + count) // BLOCK) - len(known)
        new, pages = pages[:more], pages[more:]
        tokens = tuple(int(t) for t in rng.integers(0, 99, count))
        targets = tokens[: int(rng.integers(count + 1))] if rng.random() < 0.3 else ()
        setups.append(
            RowSetup(
                row=row,
                sampling=SamplingParams(seed=0),
                choice=0,
                num_prompt=1,
                pages=tuple(known.tolist()),
                end_token_ids=(),
            )
        )
        chunks.append(
            Chunk(
                row=row,
                start=start,
                num_tokens=count,
                tokens=() if count == 1 and rng.random() < 0.5 else tokens,
                new_pages=tuple(new.tolist()),
                sample=bool(rng.random() < 0.5),
                targets=targets,
                targets_from=int(rng.integers(count - len(targets) + 1)) if targets else 0,
                pooled=int(rng.integers(count + 1)) if rng.random() < 0.3 else 0,
            )
        )
        state.last_token[row] = int(rng.integers(99))
    state.apply(StepPlan(step=0, setups=tuple(setups), chunks=tuple(chunks)))
    return state, chunks


def expected(chunks: list[Chunk], state: DeviceState) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {name: [] for name in ("ids", "positions", "write_at", "outputs")}
    for chunk in chunks:
        begin = len(out["ids"])
        for place in range(chunk.num_tokens):
            position = chunk.start + place
            page = int(state.page_table[chunk.row, position // BLOCK])
            last = state.last_token[chunk.row]
            out["ids"].append(chunk.tokens[place] if chunk.tokens else last)
            out["positions"].append(position)
            out["write_at"].append(page * BLOCK + position % BLOCK)
        end = begin + chunk.num_tokens
        out["outputs"] += [begin + chunk.targets_from + i for i in range(len(chunk.targets))]
        out["outputs"] += range(end - chunk.pooled, end)
        out["outputs"] += [end - 1] * chunk.sample
    return out


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 9]))
def test_every_token_stands_where_its_chunk_says(seed: int, longest: int) -> None:
    state, chunks = drawn_step(seed, longest)
    batch, wanted = build_batch(chunks, state), expected(chunks, state)
    assert batch.ids.tolist() == wanted["ids"]
    assert batch.positions.tolist() == wanted["positions"]
    assert batch.write_at.tolist() == wanted["write_at"]
    assert batch.output_rows.tolist() == wanted["outputs"]
    assert np.diff(batch.chunk_starts).tolist() == [chunk.num_tokens for chunk in chunks]
    assert batch.context_lens.tolist() == [chunk.start + chunk.num_tokens for chunk in chunks]
    for chunk, row in zip(chunks, batch.page_table, strict=True):
        used = state.num_pages[chunk.row]
        assert row[:used].tolist() == state.page_table[chunk.row, :used].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_short_way_gives_the_same_arrays(seed: int) -> None:
    state, chunks = drawn_step(seed, longest=1)
    short, long = batch_of_ones(chunks, state), batch_of_any(chunks, state)
    for field in fields(ForwardBatch):
        one, other = getattr(short, field.name), getattr(long, field.name)
        assert one.dtype == other.dtype and np.array_equal(one, other), field.name
        assert one.flags.c_contiguous
