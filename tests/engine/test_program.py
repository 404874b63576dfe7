"""A recorded program against its slow twin, the same ops called one by one: the same bits.

Over drawn models (every kind of weight, biases, norms of query and key, tied heads, group sizes),
every kind of page, and drawn batches that follow one another through the same program.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.quantized_model import packed
from tests.kernels.cases import KV_DTYPES, forward_batch, nan_pages
from toque.kernels import select
from toque.kernels.api import Decode, Floats, ForwardBatch, LayerKV, Ops, Sampler
from toque.kernels.ref.dequantize import KINDS
from toque.model.dense import DenseDecoder, build_dense
from toque.model.dummy import dummy_tensors
from toque.model.weights import HF, bind
from toque.types import ModelSpec, RopeSpec, RowSetup, SamplingParams
from toque.worker.program import Program

CONTEXT, VOCAB = 96, 67  # an odd vocabulary: the last panel is not full
OPS = select("cpu", 2)

specs = st.builds(
    ModelSpec,
    architecture=st.just("llama"),
    vocab_size=st.just(VOCAB),
    hidden=st.just(256),
    layers=st.integers(1, 2),
    heads=st.sampled_from([4, 8]),
    kv_heads=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([64, 128]),
    intermediate=st.just(256),
    rms_eps=st.just(1e-6),
    rope=st.just(RopeSpec()),
    context=st.just(CONTEXT),
    qkv_bias=st.booleans(),
    output_bias=st.booleans(),
    mlp_bias=st.booleans(),
    qk_norm=st.booleans(),
    tied_embeddings=st.booleans(),
)


def decoder(spec: ModelSpec, seed: int, ops: Ops = OPS) -> DenseDecoder:
    """Matrices of drawn kinds, of which one model mixes several."""
    rng = np.random.default_rng(seed)
    kinds = list(KINDS)
    tensors = {
        name: tensor
        if len(tensor.shape) == 1
        else packed(tensor, kinds[int(rng.integers(len(kinds)))], rng)
        for name, tensor in dummy_tensors(spec, seed).items()
    }
    return build_dense(spec, bind("drawn", tensors, spec, HF), ops, CONTEXT)


def pages_of(model: DenseDecoder, dtype: str, num_pages: int, block_size: int) -> list[LayerKV]:
    return [nan_pages(spec, num_pages, block_size) for spec in model.kv_specs(dtype)]


def drawn_batches(rng: np.random.Generator, block_size: int) -> tuple[list[ForwardBatch], int]:
    """A few steps of three sequences, each continuing where it stood; chunks of 1 to 30 tokens and
    outputs anywhere or nowhere. Also how many pages they take."""
    per_row = -(-CONTEXT // block_size)
    table = rng.permutation(3 * per_row).astype(np.int32).reshape(3, per_row)
    done = np.zeros(3, dtype=int)
    batches = []
    for _ in range(4):
        rows = np.flatnonzero(rng.random(3) < 0.7)
        new = [int(rng.choice([1, 1, 2, 7, 20])) for _ in rows]
        if not len(rows):
            continue
        done[rows] += new
        chunks = [(int(done[row]), count) for row, count in zip(rows, new, strict=True)]
        batch = forward_batch(chunks, table[rows], block_size)
        tokens = len(batch.ids)
        outputs = np.flatnonzero(rng.random(tokens) < rng.choice([0, 0.2, 1])).astype(np.int32)
        ids = rng.integers(0, VOCAB, tokens, dtype=np.int32)
        batches.append(replace(batch, ids=ids, output_rows=outputs))
    return batches, table.size


def same_pages(left: list[LayerKV], right: list[LayerKV]) -> bool:
    return all(np.array_equal(a.pages, b.pages) for a, b in zip(left, right, strict=True))


@settings(max_examples=25, deadline=None)
@given(specs, st.integers(0, 2**32 - 1), st.sampled_from(KV_DTYPES), st.sampled_from([8, 16, 24]))
def test_the_program_and_its_slow_twin_agree_bit_for_bit(
    spec: ModelSpec, seed: int, dtype: str, block_size: int
) -> None:
    model = decoder(spec, seed)
    program = Program(model)
    batches, num_pages = drawn_batches(np.random.default_rng(seed), block_size)
    fast, slow = (pages_of(model, dtype, num_pages, block_size) for _ in range(2))
    for batch in batches:
        for method in ("forward", "hidden"):
            got: Floats = getattr(program, method)(batch, fast)
            expected: Floats = getattr(model, method)(batch, slow)
            assert got.tobytes() == expected.tobytes() and got.shape == expected.shape
            assert same_pages(fast, slow)
        assert np.isfinite(expected).all()


def sampler_of(ops: Ops, rows: list[int], seed: int) -> Sampler:
    """Rows of many kinds: greedy, nucleus, penalties, logprobs, bans."""
    rng = np.random.default_rng(seed)
    sampler = ops.sampler(max(rows) + 1)
    for row in rows:
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([0, 5])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            logprobs=int(rng.integers(3)) if rng.random() < 0.5 else None,
            min_tokens=int(rng.choice([0, 50])),
            seed=row,
        )
        setup = RowSetup(
            row=row, sampling=params, choice=0, num_prompt=3, pages=(), end_token_ids=(5,)
        )
        sampler.set_up(setup)
    return sampler


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 16]), st.sampled_from([VOCAB, 40, 1 << 31]))
def test_decoding_in_one_call_is_forward_and_then_the_sampler(
    seed: int, block_size: int, known: int
) -> None:
    """The same tokens and logprobs, the same pages, the same logits to the bit, over steps that
    follow one another; also as ref's own twin has it, fed by the same Decode."""
    rng = np.random.default_rng(seed)
    model = float_model(OPS)
    per_row = CONTEXT // block_size
    rows = rng.permutation(6)[: rng.integers(1, 5)].tolist()
    table = rng.permutation(6 * per_row).astype(np.int32).reshape(6, per_row)
    program = Program(model)
    one_call, two_calls = sampler_of(OPS, rows, seed), sampler_of(OPS, rows, seed)
    fast, slow = (OPS.kv_pages(model.kv_specs("float16"), table.size, block_size) for _ in range(2))
    positions = [int(rng.integers(0, CONTEXT - 4)) for _ in rows]
    ids = rng.integers(0, VOCAB, len(rows)).tolist()
    for _ in range(4):
        step = Decode(ids, rows, positions, table, block_size)
        got = program.decode(step, fast, one_call, known)
        logits = model.forward(decode_by_hand(step), slow)
        logits[:, known:] = -np.inf
        after = [position + 1 for position in positions]
        expected = two_calls.sample(logits, rows, after, [None] * len(rows))
        assert got == expected and all(entry.token < known for entry in got)
        assert program._recorded["forward"]._room[: len(rows)].tobytes() == logits.tobytes()
        assert same_pages(fast, slow)
        for left, right in zip(arrays(step.batch()), arrays(decode_by_hand(step)), strict=True):
            assert np.array_equal(left, right) and left.dtype == right.dtype
        ids, positions = [entry.token for entry in got], after


def arrays(batch: ForwardBatch) -> list[np.ndarray]:
    return [getattr(batch, field.name) for field in fields(batch)]


def decode_by_hand(step: Decode) -> ForwardBatch:
    size, n = step.block_size, len(step.rows)
    pages = [
        int(step.page_table[r, p // size]) for r, p in zip(step.rows, step.positions, strict=True)
    ]
    places = [page * size + p % size for page, p in zip(pages, step.positions, strict=True)]

    def ints(values: Any) -> Any:
        return np.array(list(values), dtype=np.int32)

    return ForwardBatch(
        ids=ints(step.ids),
        positions=ints(step.positions),
        chunk_starts=ints(range(n + 1)),
        context_lens=ints(p + 1 for p in step.positions),
        page_table=np.stack([step.page_table[row] for row in step.rows]),
        write_at=np.array(places, dtype=np.int64),
        output_rows=ints(range(n)),
    )


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (IndexError, {"rows": [0, 2]}),
        (IndexError, {"rows": [-1, 1]}),
        (IndexError, {"positions": [3, 24]}),
        (IndexError, {"positions": [-1, 3]}),
        (IndexError, {"ids": [VOCAB, 0]}),
        (IndexError, {"page_table": np.array([[0, 1, 2], [99, 4, 5]], dtype=np.int32)}),
        (IndexError, {"page_table": np.array([[0, 1, 2], [-1, 4, 5]], dtype=np.int32)}),
        (ValueError, {"positions": [3]}),
        (ValueError, {"ids": [3]}),
        (TypeError, {"page_table": np.zeros((2, 3), dtype=np.int64)}),
    ],
)
def test_a_wrong_decode_is_an_exception_and_the_next_one_runs(
    error: type[Exception], wrong: dict[str, Any]
) -> None:
    model = float_model(OPS)
    program, kv = Program(model), pages_of(model, "float32", 6, 8)
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    right = Decode([1, 2], [0, 1], [0, 0], table, 8)
    with pytest.raises(error):
        program.decode(replace(right, **wrong), kv, sampler_of(OPS, [0, 1], 1), VOCAB)
    got = program.decode(right, kv, sampler_of(OPS, [0, 1], 1), VOCAB)
    assert [entry.error for entry in got] == [None, None]
    with pytest.raises(ValueError, match="belongs to one row"):
        program.decode(replace(right, rows=[1, 1]), kv, sampler_of(OPS, [0, 1], 1), VOCAB)


def test_ref_decodes_as_it_forwards_and_samples() -> None:
    ops = select("ref")
    model = float_model(ops)
    fast, slow = (pages_of(model, "float32", 6, 8) for _ in range(2))
    step = Decode([1, 2], [1, 0], [0, 0], np.arange(6, dtype=np.int32).reshape(2, 3), 8)
    got = Program(model).decode(step, fast, sampler_of(ops, [0, 1], 1), 40)
    logits = model.forward(decode_by_hand(step), slow)
    logits[:, 40:] = -np.inf
    assert got == sampler_of(ops, [0, 1], 1).sample(logits, [1, 0], [1, 1], [None, None])
    assert same_pages(fast, slow)


SPEC = ModelSpec(
    architecture="llama",
    vocab_size=VOCAB,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    rms_eps=1e-6,
    rope=RopeSpec(),
    context=CONTEXT,
    qkv_bias=True,
)


def float_model(ops: Ops) -> DenseDecoder:
    return build_dense(SPEC, bind("drawn", dummy_tensors(SPEC), SPEC, HF), ops, CONTEXT)


def two_chunks() -> ForwardBatch:
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = forward_batch([(20, 20), (9, 9)], table, 8)
    return replace(batch, output_rows=np.array([19, 28], dtype=np.int32))


def test_float_weights_and_the_ref_set_have_programs_too() -> None:
    for ops in (OPS, select("ref")):
        model = float_model(ops)
        program = Program(model)
        fast, slow = (pages_of(model, "float32", 6, 8) for _ in range(2))
        got, expected = program.forward(two_chunks(), fast), model.forward(two_chunks(), slow)
        assert got.tobytes() == expected.tobytes() and same_pages(fast, slow)


def test_other_pages_are_another_recording() -> None:
    model = float_model(OPS)
    program = Program(model)
    first, second = (pages_of(model, "float32", 6, 8) for _ in range(2))
    expected = program.forward(two_chunks(), first).copy()
    before = [layer.pages.copy() for layer in first]
    assert program.forward(two_chunks(), second).tobytes() == expected.tobytes()
    assert same_pages(first, second)
    assert all(np.array_equal(a, b.pages) for a, b in zip(before, first, strict=True))


def changed(array: np.ndarray, index: Any, value: int) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


def broken_batches() -> list[tuple[type[Exception], ForwardBatch]]:
    b = two_chunks()
    return [
        (IndexError, replace(b, ids=changed(b.ids, 3, VOCAB))),
        (IndexError, replace(b, ids=changed(b.ids, 3, -1))),
        (IndexError, replace(b, positions=changed(b.positions, 3, CONTEXT))),
        (IndexError, replace(b, write_at=changed(b.write_at, 3, 6 * 8))),
        (IndexError, replace(b, output_rows=changed(b.output_rows, 0, 29))),
        (IndexError, replace(b, page_table=changed(b.page_table, (0, 1), 6))),
        (ValueError, replace(b, positions=changed(b.positions, 3, 5))),
        (ValueError, replace(b, ids=b.ids[:-1].copy())),
        (ValueError, replace(b, write_at=b.write_at[:-1].copy())),
        (ValueError, replace(b, context_lens=changed(b.context_lens, 0, 1000))),
        (ValueError, replace(b, chunk_starts=changed(b.chunk_starts, 1, 100))),
        (ValueError, replace(b, page_table=b.page_table[:1].copy())),
        (TypeError, replace(b, ids=b.ids.astype(np.int64))),
    ]


@pytest.mark.parametrize(("error", "batch"), broken_batches())
def test_a_wrong_batch_is_an_exception_and_the_next_one_runs(
    error: type[Exception], batch: ForwardBatch
) -> None:
    model = float_model(OPS)
    program = Program(model)
    kv = pages_of(model, "float32", 6, 8)
    with pytest.raises(error):
        program.forward(batch, kv)
    assert np.isfinite(program.forward(two_chunks(), kv)).all()


def test_nan_stays_in_its_chunk() -> None:
    model = float_model(OPS)
    program = Program(model)
    kv = pages_of(model, "float32", 6, 8)
    expected = program.forward(two_chunks(), kv).copy()
    kv[0].pages[:3].view(np.float32)[:] = np.nan
    decode = forward_batch([(21, 1), (9, 9)], two_chunks().page_table, 8)
    decode = replace(decode, output_rows=np.array([0, 9], dtype=np.int32))
    got = program.forward(decode, kv)
    assert np.isnan(got[0]).all()
    assert got[1].tobytes() == expected[1].tobytes()


def test_what_cannot_be_recorded_is_refused() -> None:
    """A layer that computes on its arrays, or takes them from elsewhere."""
    model = float_model(OPS)
    norm = model.norm

    def outside(ops: Ops, batch: ForwardBatch) -> Floats:
        return ops.rms_norm(np.ones((1, 64), dtype=np.float32), norm.weight, norm.eps)

    def arithmetic(ops: Ops, batch: ForwardBatch) -> Floats:
        return ops.rms_norm(ops.embed(model.embedding.table, batch.ids) * 2, norm.weight, norm.eps)

    def other_ids(ops: Ops, batch: ForwardBatch) -> Floats:
        return ops.embed(model.embedding.table, batch.ids.copy())

    for trace in (outside, arithmetic, other_ids):
        with pytest.raises(ValueError, match="an op was given"):
            OPS.record(trace)
