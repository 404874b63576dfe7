"""Logprobs of prompt tokens: complete, the model's own, the same bits however they come about."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_equivalence import CONFIG, STEM
from toque.build import Loaded, assemble, load
from toque.config import EngineConfig
from toque.ipc import InProcess
from toque.kernels.api import ForwardBatch
from toque.options import EngineOptions
from toque.types import (
    Event,
    Finished,
    FinishReason,
    Logprob,
    PromptScores,
    Request,
    SamplingParams,
    StepReport,
    Tokens,
)


@pytest.fixture(scope="module")
def loaded(tiny_config: Path) -> Loaded:
    return load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))


def requests() -> list[Request]:
    """Scoring ones and others, of one stem, so that a cache would have much to give."""
    made = []
    for number in range(9):
        prompt = STEM[: [70, 64, 65, 8, 1][number % 5]]
        scored = None if number % 3 == 2 else number % 3 * 2
        sampling = SamplingParams(
            temperature=0.0,
            seed=0,
            ignore_eos=True,
            prompt_logprobs=scored,
            max_tokens=[0, 50, 50][number % 3],
        )
        made.append(Request(id=f"r{number}", prompt=tuple(prompt), sampling=sampling, arrived_s=0))
    return made


def run(loaded: Loaded, config: EngineConfig, wanted: list[Request], gap: int = 0) -> list[Event]:
    channel = InProcess()
    engine = assemble(loaded, config, "tiny", channel.engine)
    pending, events = list(wanted), list[Event]()
    for step in itertools.count():
        while pending and (gap == 0 or step % gap == 0):
            channel.send(pending.pop(0))
            if gap:
                break
        engine.core.step()
        engine.core.scheduler.check()
        for message in channel.drain():
            if isinstance(message, StepReport):
                events += message.events
                preempted = message.counters.preemptions
        if not pending and not engine.core.scheduler.has_work:
            break
        assert step < 2000
    if config.total_pages < 256:
        assert preempted > 0, "the tight pool was meant to preempt"
    return events


def scores(events: list[Event], name: str) -> list[Logprob]:
    return [
        logprob
        for event in events
        if isinstance(event, PromptScores) and event.id == name
        for logprob in event.logprobs
    ]


def own_logprobs(loaded: Loaded, prompt: tuple[int, ...]) -> np.ndarray:  # [tokens, vocab]
    """Every row of one plain forward pass through the model, in float64."""
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
    logits = loaded.model.forward(batch, kv).astype(np.float64)
    exponents = np.exp(logits)
    return np.log(exponents / exponents.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("pages", [256, 18])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("budget", [16, 512])
def test_scores_are_the_models_and_do_not_depend_on_the_way(
    loaded: Loaded, budget: int, caching: bool, pages: int, gap: int
) -> None:
    config = replace(
        CONFIG, max_num_batched_tokens=budget, enable_prefix_caching=caching, total_pages=pages
    )
    events = run(loaded, config, requests(), gap)
    alone = {r.id: run(loaded, CONFIG, [r]) for r in requests()}
    for request in requests():
        got = scores(events, request.id)
        assert got == scores(alone[request.id], request.id), "the bits depend on the way"
        if request.sampling.prompt_logprobs is None:
            assert not got
            continue
        rows = own_logprobs(loaded, request.prompt)
        assert len(got) == len(request.prompt) - 1
        for place, (score, token) in enumerate(zip(got, request.prompt[1:], strict=True)):
            assert score.chosen == pytest.approx(rows[place, token], abs=1e-9)
            assert score.rank == 1 + int((rows[place] > rows[place, token]).sum())
            best = np.argsort(-rows[place], kind="stable")[: request.sampling.prompt_logprobs]
            assert [token for token, _ in score.top] == best.tolist()


def test_scores_come_before_the_first_token_and_max_tokens_0_gives_none(loaded: Loaded) -> None:
    config = replace(CONFIG, max_num_batched_tokens=16, enable_prefix_caching=True)
    events = run(loaded, config, requests())
    for request in requests():
        kinds = [type(event) for event in events if event.id == request.id]
        assert kinds == sorted(kinds, key=[PromptScores, Tokens, Finished].index)
        end = next(e for e in events if isinstance(e, Finished) and e.id == request.id)
        assert end.reason is FinishReason.LENGTH
        assert end.usage.completion_tokens == request.sampling.max_tokens
        assert kinds.count(Tokens) == request.sampling.max_tokens
        if request.sampling.prompt_logprobs is not None:
            assert end.usage.cached_tokens == 0


def test_prompt_scores_do_not_change_the_answer(loaded: Loaded) -> None:
    config = replace(CONFIG, max_num_batched_tokens=16, enable_prefix_caching=True)
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=20, ignore_eos=True, logprobs=2)
    plain = Request(id="plain", prompt=tuple(STEM), sampling=sampling, arrived_s=0)
    scored = Request(
        id="scored",
        prompt=tuple(STEM),
        sampling=SamplingParams(**{**_fields(sampling), "prompt_logprobs": 1}),
        arrived_s=0,
    )
    events = run(loaded, config, [plain, scored], gap=30)
    tokens = {
        name: [(e.ids, e.logprobs) for e in events if isinstance(e, Tokens) and e.id == name]
        for name in ("plain", "scored")
    }
    assert tokens["plain"] == tokens["scored"]


def _fields(sampling: SamplingParams) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
