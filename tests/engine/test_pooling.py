"""Vectors of prompts: the pooled states of the model, the same bits however they come about."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.engine.quantized_model import quantized_model
from tests.engine.test_equivalence import CONFIG, STEM
from tests.engine.test_scoring import run
from tests.kernels.cases import stored
from toque import LLM
from toque.build import Loaded, load
from toque.kernels.api import Floats, ForwardBatch
from toque.layers.embedding import Embedding
from toque.options import EngineOptions
from toque.scheduler.step import Limits
from toque.types import (
    Event,
    Finished,
    FinishReason,
    Pooling,
    PromptVector,
    Request,
    SamplingParams,
    Tokens,
)
from toque.worker.pooling import StatePool

READ_ONLY = SamplingParams(max_tokens=0, temperature=0.0, seed=0)


@pytest.fixture(scope="module", params=["float32", "quantized"])
def loaded(
    request: pytest.FixtureRequest, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    if request.param == "quantized":
        return quantized_model(tiny_config, tmp_path_factory.mktemp("quantized"))
    return load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))


def requests() -> list[Request]:
    """Of both kinds and generating ones between them, of one stem: a cache has much to give."""
    made = []
    for number in range(12):
        prompt = STEM[: [70, 64, 65, 8, 1][number % 5]] + [number % 4 + 3] * (number % 2)
        pooling = [Pooling.LAST, Pooling.MEAN, None][number % 3]
        sampling = READ_ONLY
        if pooling is None:
            sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)
        made.append(
            Request(
                id=f"r{number}",
                prompt=tuple(prompt),
                sampling=sampling,
                arrived_s=0,
                pooling=pooling,
            )
        )
    return made


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> dict[str, list[object]]:
    """The reference: one engine per request."""
    return {r.id: answers(run(loaded, CONFIG, [r]))[r.id] for r in requests()}


def answers(events: list[Event]) -> dict[str, list[object]]:
    """What each request got but its end: vectors, or tokens one by one."""
    got: dict[str, list[object]] = {}
    for event in events:
        if isinstance(event, PromptVector):
            got.setdefault(event.id, []).append(event.vector)
        elif isinstance(event, Tokens):
            got.setdefault(event.id, []).extend(event.ids)
    return got


def states(loaded: Loaded, prompt: tuple[int, ...]) -> Floats:  # [tokens, hidden]
    """Every row of one plain forward pass through the model."""
    count, block = len(prompt), 8
    pages = -(-count // block)
    kv = loaded.ops.kv_pages(loaded.model.kv_specs("float32"), pages, block)
    batch = ForwardBatch(
        ids=np.array(prompt, dtype=np.int32),
        positions=np.arange(count, dtype=np.int32),
        chunk_starts=np.array([0, count], dtype=np.int32),
        context_lens=np.array([count], dtype=np.int32),
        page_table=np.arange(pages, dtype=np.int32)[None],
        write_at=np.arange(count, dtype=np.int64),
        output_rows=np.arange(count, dtype=np.int32),
    )
    return loaded.model.hidden(batch, kv)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("pages", [256, 17])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [16, 512])
def test_vectors_are_the_models_and_do_not_depend_on_the_way(
    loaded: Loaded,
    alone: dict[str, list[object]],
    budget: int,
    caching: bool,
    pages: int,
    gap: int,
) -> None:
    config = replace(
        CONFIG, max_num_batched_tokens=budget, enable_prefix_caching=caching, total_pages=pages
    )
    events = run(loaded, config, requests(), gap)
    got = answers(events)
    for request in requests():
        assert got[request.id] == alone[request.id]
        end = next(e for e in events if isinstance(e, Finished) and e.id == request.id)
        assert end.reason is FinishReason.LENGTH
        if request.pooling is None:
            assert len(got[request.id]) == 40
            continue
        (vector,) = got[request.id]
        assert isinstance(vector, bytes)
        rows = states(loaded, request.prompt).astype(np.float64)
        pooled = rows[-1] if request.pooling is Pooling.LAST else rows.mean(axis=0)
        expected = pooled / np.linalg.norm(pooled)
        np.testing.assert_allclose(np.frombuffer(vector, "<f4"), expected, atol=1e-6)
        assert end.usage.completion_tokens == 0
        if request.pooling is Pooling.MEAN:
            assert end.usage.cached_tokens == 0, "a mean over what was never computed"


def test_a_mean_that_is_preempted_begins_again(loaded: Loaded) -> None:
    """Two earlier ones decode into the pages that it needs, in the middle of its prompt: without it
    the pool would hold both whole, so that whoever is preempted is the mean."""
    generating = SamplingParams(temperature=0.0, seed=0, max_tokens=60, ignore_eos=True)
    first, second = (
        Request(id=name, prompt=tuple(STEM[at : at + 20]), sampling=generating, arrived_s=0)
        for name, at in (("first", 0), ("second", 30))
    )
    long = Request(
        id="mean",
        prompt=tuple((11 * i) % 250 + 3 for i in range(120)),
        sampling=READ_ONLY,
        arrived_s=0,
        pooling=Pooling.MEAN,
    )
    tight = replace(
        CONFIG, max_num_batched_tokens=10, enable_prefix_caching=True, total_pages=3 + 3 + 15 + 2
    )
    events = run(loaded, tight, [first, second, long])  # which asserts that it preempts
    assert answers(events)["mean"] == answers(run(loaded, CONFIG, [long]))["mean"]


def test_the_last_tokens_vector_uses_the_cache(loaded: Loaded) -> None:
    config = replace(CONFIG, enable_prefix_caching=True)
    again = [structs.replace(requests()[0], id=name) for name in ("first", "second")]
    events = run(loaded, config, again, gap=5)
    ends = {event.id: event for event in events if isinstance(event, Finished)}
    assert ends["first"].usage.cached_tokens == 0
    assert ends["second"].usage.cached_tokens == 64  # all full pages of 70 tokens
    assert answers(events)["first"] == answers(events)["second"]


def test_prompts_and_poolings_have_vectors_of_their_own(alone: dict[str, list[object]]) -> None:
    vectors = {
        (request.prompt, request.pooling): alone[request.id][0]
        for request in requests()
        if request.pooling is not None and len(request.prompt) > 1
    }
    assert len(set(vectors.values())) == len(vectors) > 4


@pytest.mark.parametrize(
    "sampling", [{"max_tokens": 1}, {"max_tokens": None}, {"prompt_logprobs": 0}]
)
def test_a_request_for_a_vector_asks_for_nothing_else(sampling: dict[str, int | None]) -> None:
    limits = Limits(4, 64, 128, 259, True, frozenset())
    request = requests()[0]
    assert limits.why_not(request) is None
    wrong = structs.replace(request, sampling=structs.replace(READ_ONLY, **sampling))
    assert limits.why_not(wrong) is not None


def test_a_sum_does_not_depend_on_its_parts() -> None:
    """Magnitudes far apart, so that another order of adding gives other bits."""
    rng = np.random.default_rng(3)
    rows = (rng.standard_normal((100, 37)) * 10.0 ** rng.integers(-6, 7, (100, 1))).astype("f4")
    whole, parts = StatePool(), StatePool()
    whole.add(rows)
    for part in np.array_split(rows, [1, 2, 50, 51]):
        parts.add(part)
    assert whole.vector() == parts.vector()
    vector = np.frombuffer(whole.vector(), "<f4").astype(np.float64)
    assert math.isclose(float(np.linalg.norm(vector)), 1.0, abs_tol=1e-6)


@pytest.mark.parametrize("bad", [[], [[0.0, 0.0]], [[np.nan, 1.0]], [[np.inf, 1.0]]])
def test_what_has_no_direction_is_no_vector(bad: list[list[float]]) -> None:
    pool = StatePool()
    pool.add(np.array(bad, dtype=np.float32).reshape(-1, 2))
    with pytest.raises(ValueError, match="state"):
        pool.vector()


def test_states_that_are_not_numbers_fail_their_own_request(tiny_config: Path) -> None:
    """One token's embedding is broken: who has it gets an error, the neighbours their vectors."""
    loaded = load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))
    good = [r for r in requests() if r.pooling is not None]
    bad = structs.replace(good[1], id="bad", prompt=(5, 99, 5))
    ops, model = loaded.ops, loaded.model
    table = ops.embed(model.embedding.table, np.arange(259, dtype=np.int32))  # [vocab, hidden]
    table[99] = np.nan
    broken = replace(model, embedding=Embedding(ops, ops.matrix(stored(table))))
    quiet = answers(run(loaded, CONFIG, good))
    events = run(replace(loaded, model=broken), CONFIG, [*good[:3], bad, *good[3:]])
    assert answers(events) == quiet
    (end,) = (e for e in events if isinstance(e, Finished) and e.id == "bad")
    assert end.reason is FinishReason.ERROR and end.error


def test_embed_from_python(tiny_config: Path) -> None:
    llm = LLM(str(tiny_config), load_format="dummy", max_num_seqs=4, max_model_len=256)
    together = llm.embed(["one", [5, 6, 7], "three"])
    assert together.shape == (3, 64) and together.dtype == np.float32
    np.testing.assert_array_equal(together[1:2], llm.embed([5, 6, 7]))
    assert not np.array_equal(together[1:2], llm.embed([5, 6, 7], pooling="mean"))
    with pytest.raises(ValueError, match="median"):
        llm.embed("x", pooling="median")
