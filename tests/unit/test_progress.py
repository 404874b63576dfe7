"""What is shown while weights load: nothing in a log, a late bar in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toque.build import load
from toque.files import progress
from toque.files.progress import LateBar, passing_progress
from toque.model.watched import Watched
from toque.options import EngineOptions
from toque.types import StoredTensor


class Notes:
    def __init__(self) -> None:
        self.said: list[Any] = []

    def start(self, total_bytes: int, label: str) -> None:
        self.said.append((label, total_bytes))

    def advance(self, size_bytes: int) -> None:
        self.said.append(size_bytes)

    def done(self) -> None:
        self.said.append("done")


def test_what_is_quick_shows_no_bar_and_what_is_not_shows_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for pause_s, said in ((0.01, []), (0.2, [("x", 10), 8, 2, "done"])):
        notes = Notes()
        bar = LateBar(notes)  # type: ignore[arg-type]
        bar.start(10, "x")
        for size_bytes in (4, 4, 2):
            now[0] += pause_s
            bar.advance(size_bytes)
        bar.done()
        assert notes.said == said


def test_a_log_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert passing_progress() is None


def test_a_watched_source_gives_the_same_and_counts() -> None:
    class Source:
        def matrix(self, tensor: StoredTensor) -> Any:
            return ("matrix", tensor.name)

        def vector(self, tensor: StoredTensor) -> Any:
            return ("vector", tensor.name)

    seen: list[int] = []
    watched = Watched(Source(), seen.append)
    tensor = StoredTensor("t", "F32", (2,), np.zeros(8, dtype=np.uint8))
    assert watched.matrix(tensor) == ("matrix", "t") and watched.vector(tensor) == ("vector", "t")
    assert seen == [8, 16]


def test_loading_a_model_tells_of_every_byte(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    monkeypatch.setattr("toque.build.passing_progress", lambda: notes)
    load(tiny_config, EngineOptions(load_format="dummy"))
    assert notes.said[0][0] == "loading weights" and notes.said[-1] == "done"
