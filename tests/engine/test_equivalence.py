"""The same tokens, and the same bits, however a request is computed.

{alone, batched} x {one chunk, many} x {cold, hit, in flight} x {roomy, preempted}, on a small
random model with the compiled kernels, once with float32 weights and once with every packed kind of
weight. The oracle is the simplest of all ways: each
request alone, in one chunk, with the cache off. Logits are recorded where the worker samples.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.engine.quantized_model import quantized_model
from toque.build import Loaded, assemble, load
from toque.config import EngineConfig
from toque.ipc import InProcess
from toque.kernels.api import KV_NUMBER_BYTES, Decode, Floats, ForwardBatch, LayerKV, Sampler
from toque.options import EngineOptions
from toque.types import Finished, Request, Sampled, SamplingParams, Slo, StepReport, Tokens

CONFIG = EngineConfig(
    max_model_len=128,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    enable_chunked_prefill=True,
    enable_prefix_caching=False,
    kv_cache_dtype="float32",
    kv_bytes_per_token=1,
    block_size=8,
    total_pages=256,
)
CHAT = Slo(name="chat", ttft_s=0.02, itl_s=0.004, downgrade=True)
BATCH = Slo(name="batch", deadline_s=0.2, downgrade=True)
STEM = [(7 * i) % 250 + 3 for i in range(70)]


def requests() -> list[Request]:
    """Twelve: greedy and seeded, with penalties, sharing beginnings of several lengths."""
    made = []
    for number in range(12):
        prompt = STEM[: [70, 40, 33, 8, 1][number % 5]] + [number % 4 + 3] * (number % 3)
        sampling = SamplingParams(
            temperature=0.0 if number % 2 else 0.9,
            top_p=0.9 if number % 4 == 0 else 1.0,
            top_k=20 if number % 6 == 0 else 0,
            repetition_penalty=1.2 if number % 3 == 0 else 1.0,
            seed=number // 4,
            max_tokens=24,
            ignore_eos=True,
        )
        made.append(Request(id=f"r{number}", prompt=tuple(prompt), sampling=sampling, arrived_s=0))
    return made


@dataclass
class Answers:
    tokens: dict[str, list[int]]
    logits: dict[tuple[str, int], bytes]  # (request, position) -> the row that chose its token
    preemptions: int
    hits: int


class Recorder:
    """The model, with its logits kept by what they were computed from: the tokens before them."""

    def __init__(self, model: object) -> None:
        self._model = model
        self.rows: list[tuple[int, bytes]] = []  # (position, logits) in order of computation
        self.native_decodes = 0

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Floats:
        logits = self._model.forward(batch, kv)  # type: ignore[attr-defined]
        for row, values in zip(batch.output_rows, logits, strict=True):
            self.rows.append((int(batch.positions[row]) + 1, values.tobytes()))
        return logits

    def decode(
        self, step: Decode, kv: Sequence[LayerKV], sampler: Sampler, known: int
    ) -> list[Sampled]:
        """The logits of the one native call are where the program keeps its results."""
        sampled: list[Sampled] = self._model.decode(step, kv, sampler, known)  # type: ignore[attr-defined]
        room = self._model._recorded["forward"]._room  # type: ignore[attr-defined]
        for position, values in zip(step.positions, room, strict=False):
            self.rows.append((position + 1, values.tobytes()))
        self.native_decodes += 1
        return sampled


def answer(loaded: Loaded, config: EngineConfig, wanted: list[Request], gap: int = 0) -> Answers:
    """Run requests through one engine, a new one every `gap` steps (0: all at once)."""
    channel = InProcess()
    engine = assemble(loaded, config, "tiny", channel.engine)
    recorder = Recorder(engine.core._executor._model)  # type: ignore[attr-defined]
    engine.core._executor._model = recorder  # type: ignore[attr-defined]
    tokens: dict[str, list[int]] = {request.id: [] for request in wanted}
    logits: dict[tuple[str, int], bytes] = {}
    lengths = {request.id: len(request.prompt) for request in wanted}
    pending, report = list(wanted), StepReport()
    for step in itertools.count():
        while pending and (gap == 0 or step % gap == 0):
            channel.send(pending.pop(0))
            if gap:
                break
        recorder.rows.clear()
        engine.core.step()
        for message in channel.drain():
            if isinstance(message, StepReport):
                report = message
                _book(message, recorder, tokens, logits, lengths)
        engine.core.scheduler.check()
        if not pending and not engine.core.scheduler.has_work:
            break
        assert step < 3000
    assert report.load.held_pages == 0
    assert recorder.native_decodes > 0  # or the way that is usual is not compared at all
    return Answers(tokens, logits, report.counters.preemptions, report.counters.prefix_hits)


def _book(
    report: StepReport,
    recorder: Recorder,
    tokens: dict[str, list[int]],
    logits: dict[tuple[str, int], bytes],
    lengths: dict[str, int],
) -> None:
    """Token events come in the order of the batch's output rows."""
    events = [event for event in report.events if isinstance(event, Tokens)]
    assert len(events) == len(recorder.rows)
    for event, (position, values) in zip(events, recorder.rows, strict=True):
        assert position == lengths[event.id] + len(tokens[event.id])
        logits[event.id, position] = values
        tokens[event.id] += event.ids
    assert all(not isinstance(event, Finished) or event.error is None for event in report.events)


@pytest.fixture(scope="module", params=["float32", "quantized"])
def loaded(
    request: pytest.FixtureRequest, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    """Weights that multiply in float32, and weights of every packed kind."""
    if request.param == "quantized":
        return quantized_model(tiny_config, tmp_path_factory.mktemp("quantized"))
    return load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> Answers:
    """The reference: one engine per request."""
    parts = [answer(loaded, CONFIG, [request]) for request in requests()]
    return Answers(
        {name: tokens for part in parts for name, tokens in part.tokens.items()},
        {place: row for part in parts for place, row in part.logits.items()},
        0,
        0,
    )


def ways() -> list[object]:
    return list(_ways())


def _ways() -> Iterator[object]:
    for chunked, caching, roomy, gap in itertools.product(
        (False, True), (False, True), (True, False), (0, 3)
    ):
        config = replace(
            CONFIG,
            max_num_batched_tokens=16 if chunked else 512,
            enable_prefix_caching=caching,
            total_pages=256 if roomy else 20,
        )
        name = "-".join(
            (
                "chunks" if chunked else "whole",
                "shared" if caching else "cold",
                "roomy" if roomy else "tight",
                "together" if gap == 0 else "one-by-one",
            )
        )
        yield pytest.param(config, gap, id=name)


@pytest.mark.parametrize(("config", "gap"), ways())
def test_every_way_of_computing_gives_the_same_bits(
    loaded: Loaded, alone: Answers, config: EngineConfig, gap: int
) -> None:
    got = answer(loaded, config, requests(), gap)
    assert got.tokens == alone.tokens
    different = [place for place, row in got.logits.items() if row != alone.logits[place]]
    assert not different, f"logits differ in {len(different)} of {len(got.logits)} places"
    if config.total_pages < 256:
        assert got.preemptions > 0, "the tight pool was meant to preempt"
    if config.enable_prefix_caching:
        assert got.hits > 0, "the shared stem was meant to be found"


@pytest.mark.parametrize("policy", ["priority", "slo"])
@pytest.mark.parametrize("gap", [0, 3])
def test_no_order_changes_an_answer(loaded: Loaded, alone: Answers, policy: str, gap: int) -> None:
    """The policies that reorder, cut chunks to the running streams' targets and choose victims by
    cost: in small steps and a tight pool, where they have most to decide."""
    config = replace(
        CONFIG,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
        total_pages=20,
        scheduling_policy=policy,
    )
    classes = (None, CHAT, BATCH)
    wanted = [
        structs.replace(
            request, priority=-number, slo=classes[number % 3], arrived_s=time.monotonic()
        )
        for number, request in enumerate(requests())
    ]
    got = answer(loaded, config, wanted, gap)
    assert got.tokens == alone.tokens
    assert all(row == alone.logits[place] for place, row in got.logits.items())
    assert got.preemptions > 0


@pytest.mark.parametrize("dtype", [dtype for dtype in KV_NUMBER_BYTES if dtype != "float32"])
def test_smaller_pages_are_just_as_invariant(loaded: Loaded, alone: Answers, dtype: str) -> None:
    """With rounded KV the bits differ from float32's, and still not between ways of computing."""
    base = replace(CONFIG, kv_cache_dtype=dtype)
    parts = [answer(loaded, base, [request]) for request in requests()]
    reference = {place: row for part in parts for place, row in part.logits.items()}
    tight = replace(base, max_num_batched_tokens=16, enable_prefix_caching=True, total_pages=20)
    got = answer(loaded, tight, requests(), gap=2)
    assert all(row == reference[place] for place, row in got.logits.items())
    assert any(row != reference[place] for place, row in alone.logits.items() if place in reference)
    assert got.preemptions > 0


def test_the_matrix_would_notice(loaded: Loaded, alone: Answers) -> None:
    """Answers of different requests differ: equality above is not that of constants."""
    by_prompt: defaultdict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
    for request in requests():
        by_prompt[request.prompt].add(tuple(alone.tokens[request.id]))
    assert len({t for texts in by_prompt.values() for t in texts}) >= 10
    assert max(len(set(tokens)) for tokens in alone.tokens.values()) > 8
    assert np.isfinite(np.frombuffer(next(iter(alone.logits.values())), np.float32)).all()
