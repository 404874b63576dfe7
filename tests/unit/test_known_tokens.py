"""Padded rows of the matrices are no tokens: never chosen, never listed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_equivalence import CONFIG
from tests.engine.test_scoring import run
from toque.build import load
from toque.files.checkpoint import Checkpoint
from toque.files.fetch import locate
from toque.files.known_tokens import known_tokens
from toque.kernels.api import Floats
from toque.options import EngineOptions
from toque.types import PromptScores, Request, SamplingParams, Tokens

QWEN_TOKENS = 151_665  # len(tokenizer) of the original; its matrices have 151,936 rows


def checkpoint(path: Path, kind: str, **metadata: object) -> Checkpoint:
    return Checkpoint(path, kind, metadata, {}, {}, "0")


def test_gguf_says_which_places_are_unused(tmp_path: Path) -> None:
    for types, known in (([1, 3, 5, 1, 5, 5], 4), ([1, 1], 2), ([5, 5], 9), ([], 9)):
        made = checkpoint(tmp_path, "gguf", **{"tokenizer.ggml.token_type": types})
        assert known_tokens(made, 9) == known


def test_the_default_model_s_padding_is_known() -> None:
    from toque.files.checkpoint import open_checkpoint

    assert known_tokens(open_checkpoint(locate("qwen2.5-coder-0.5b").path), 151_936) == QWEN_TOKENS


@pytest.mark.parametrize(
    ("model", "added", "known"),
    [
        ({"vocab": {"a": 0, "b": 4}}, [], 5),
        ({"vocab": {"a": 0}}, [{"id": 7}], 8),
        ({"vocab": [["a", -1.0], ["b", -2.0]]}, [], 2),
        ({"vocab": {"a": 30}}, [], 10),
    ],
)
def test_tokenizer_json_is_counted(
    tmp_path: Path, model: object, added: object, known: int
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    assert known_tokens(checkpoint(tmp_path, "safetensors"), 10) == known


def test_without_a_file_every_row_is_a_token(tmp_path: Path) -> None:
    assert known_tokens(checkpoint(tmp_path, "safetensors"), 10) == 10


def test_padding_is_never_chosen_nor_listed(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest logits of all stand on padded rows."""
    loaded = load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))
    monkeypatch.setattr("toque.build.known_tokens", lambda *_: 200)
    model = type(loaded.model)
    plain = model.logits

    def with_loud_padding(self: object, hidden: Floats) -> Floats:
        logits = plain(self, hidden)
        logits[:, 200:] = 1e6
        return logits

    monkeypatch.setattr(model, "logits", with_loud_padding)
    for scored in (None, 3):
        for temperature in (0.0, 2.0):
            sampling = SamplingParams(
                temperature=temperature, seed=1, max_tokens=20, logprobs=5, prompt_logprobs=scored
            )
            wanted = Request(id="r", prompt=(5, 6, 7), sampling=sampling, arrived_s=0)
            events = run(loaded, replace(CONFIG), [wanted])
            ids = [token for e in events if isinstance(e, Tokens) for token in e.ids]
            tops = [lp.top for e in events if isinstance(e, Tokens | PromptScores)
                    for lp in e.logprobs]  # fmt: skip
            assert len(ids) == 20 and max(ids) < 200
            assert all(token < 200 for top in tops for token, _ in top)
            assert all(np.isfinite(value) for top in tops for _, value in top)
