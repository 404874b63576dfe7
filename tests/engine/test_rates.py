"""The remembered prefill rate: what a busy machine measured at a first start does not stay."""

from __future__ import annotations

import itertools
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from toque.build import assemble, configure, correct_rate, load
from toque.files import rates
from toque.files.checkpoint import open_checkpoint
from toque.files.rates import RememberedRate
from toque.ipc import InProcess
from toque.model.dummy import dummy_tensors
from toque.model.registry import model_spec
from toque.options import EngineOptions
from toque.scheduler.cost import RATE_STEPS, StepCost
from toque.types import Chunk, Request, SamplingParams, Shutdown, StepPlan

OPTIONS = EngineOptions(kernels="cpu", threads=1, max_model_len=256, max_num_seqs=4)


@pytest.fixture
def folder(tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, beside an empty cache."""
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    shutil.copytree(tiny_config, folder)
    tensors = dummy_tensors(model_spec(open_checkpoint(folder, "dummy")), 0)
    save_file(
        {n: t.data.view(np.float32).reshape(t.shape) for n, t in tensors.items()},
        str(folder / "model.safetensors"),
    )
    return folder


def test_only_what_is_clearly_more_replaces_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = RememberedRate(tmp_path / "rates", ("a machine", "a model"))
    assert rate.known() is None and rate.raise_to(50.0)  # none is less than any
    assert not rate.raise_to(20.0) and not rate.raise_to(54.0)
    assert rate.known() == 50.0
    assert rate.raise_to(56.0) and rate.known() == 56.0
    assert RememberedRate(tmp_path / "rates", ("a machine", "another")).known() is None
    monkeypatch.setattr(rates, "VALID_S", -1.0)
    assert rate.known() is None and rate.raise_to(10.0)  # an old one is forgotten, however high


def plan(num_tokens: int) -> StepPlan:
    return StepPlan(step=0, chunks=(Chunk(row=0, start=0, num_tokens=num_tokens),))


def test_the_rate_is_that_of_most_late_prompts() -> None:
    cost = StepCost(10.0)
    for _ in range(50):
        cost.observe(plan(1), 0.01)  # decodes say nothing about prompts
        cost.observe(plan(8), 0.01)  # nor do a few tokens, which a clock can make look fast
    assert cost.prefill_tokens_per_s is None
    for number in range(RATE_STEPS):
        assert cost.prefill_tokens_per_s is None
        held_up = 50.0 if number % 3 == 0 else 1.0
        cost.observe(plan(64), 64 / 400 * 1e3 * held_up)
    assert cost.prefill_tokens_per_s == pytest.approx(400.0)
    correct_rate(None, cost)  # where nothing is kept, nothing happens


def test_prompts_correct_what_a_busy_start_had_measured(folder: Path) -> None:
    """The next start makes larger steps; the engine that noticed keeps its own."""
    loaded = load(folder, OPTIONS)
    assert loaded.rate is not None
    loaded.rate.remember(0.5)
    config = configure(loaded, OPTIONS)
    assert config.prefill_tokens_per_s == 0.5
    channel = InProcess()
    engine = assemble(loaded, config, "tiny", channel.engine)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
    for number in range(2 * RATE_STEPS):
        prompt = tuple(3 + (number * 31 + place) % 200 for place in range(100))
        request = Request(id=f"{number}", prompt=prompt, sampling=sampling, arrived_s=0)
        channel.send(request)
    asked = itertools.count()
    end_s = time.monotonic() + 120

    def going() -> bool:
        if next(asked) > 0 and not engine.core.scheduler.has_work:
            channel.send(Shutdown())
        return time.monotonic() < end_s

    engine.core.run(going)
    seen = loaded.rate.known()
    assert seen is not None and seen > 10
    again = configure(load(folder, OPTIONS), OPTIONS)
    assert again.prefill_tokens_per_s == seen
    assert again.max_num_batched_tokens > config.max_num_batched_tokens
