"""Vectors of prompts against the last hidden states of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_oracle import transformers_model
from model_oracle import DEFAULT_ROPE, prompt, tiny_model

from tests.engine.test_equivalence import CONFIG
from tests.engine.test_scoring import run
from toque import LLM
from toque.build import load
from toque.files.checkpoint import open_checkpoint
from toque.options import EngineOptions
from toque.types import Pooling, PromptVector, Request, SamplingParams


def reference(model: Any, ids: list[int], pooling: str) -> np.ndarray:  # [hidden]
    """Behind the last norm, pooled, of length 1."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].double()
    pooled = states[-1] if pooling == "last" else states.mean(dim=0)
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("config_class", ["Qwen2Config", "Qwen3Config", "LlamaConfig"])
def test_tiny_models(config_class: str, pooling: Pooling, tmp_path: Path) -> None:
    model = tiny_model(config_class, rope_parameters=DEFAULT_ROPE)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, EngineOptions(kernels="cpu"))
    for length in (1, 8, 60):
        ids = prompt(length)
        request = Request(
            id="r",
            prompt=tuple(ids),
            sampling=SamplingParams(max_tokens=0, seed=0),
            arrived_s=0,
            pooling=pooling,
        )
        (event,) = (e for e in run(loaded, CONFIG, [request]) if isinstance(e, PromptVector))
        got = np.frombuffer(event.vector, "<f4")
        np.testing.assert_allclose(got, reference(model, ids, pooling), atol=2e-5)


def test_smollm2(smollm2_path: Path) -> None:
    """The catalogue's model, quantized as it is, against transformers on the same weights."""
    llm = LLM(str(smollm2_path), max_num_seqs=8, max_model_len=256, kv_cache_memory_bytes=64 << 20)
    model = transformers_model(open_checkpoint(smollm2_path))
    texts = ["The capital of France is Paris.", "def fib(n):", "首都是", "a"]
    for pooling in ("last", "mean"):
        got = llm.embed(texts, pooling)
        for vector, text in zip(got, texts, strict=True):
            expected = reference(model, llm.tokenizer.encode(text), pooling)
            assert float(vector.astype(np.float64) @ expected) > 0.9999
            np.testing.assert_allclose(vector, expected, atol=5e-3)
