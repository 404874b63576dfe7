"""Our decoder against transformers: every family and option, one forward or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_oracle import (
    DEFAULT_ROPE,
    Pages,
    assert_close,
    hf_logits,
    load,
    our_logits,
    prompt,
    tiny_model,
)

from toque.kernels.api import PagedKV
from toque.model.dense import DenseDecoder

LENGTH = 100  # tokens: longer than the original contexts below
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_untied": ("Qwen2Config", {"rms_norm_eps": 1e-2}),
    "qwen2_yarn": ("Qwen2Config", {"rope_parameters": YARN, "max_position_embeddings": 32}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "rms_norm_eps": 1e-2}),
    "qwen3_biased": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mistral_window": ("MistralConfig", {"sliding_window": 128}),
    "llama_untied_llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama_biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama_no_groups": ("LlamaConfig", {"num_key_value_heads": 4, "head_dim": 24}),
    "llama_linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_dynamic": (
        "LlamaConfig",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "max_position_embeddings": 48,
        },
    ),
    "llama_yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
            "tie_word_embeddings": True,
        },
    ),
    "llama_yarn_attention_factor": (
        "LlamaConfig",
        {"rope_parameters": {**YARN, "attention_factor": 0.7}},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DenseDecoder, Any]:
    """(ours, transformers'): the same saved weights."""
    config_class, options = CASES[request.param]
    model = tiny_model(config_class, **{"rope_parameters": DEFAULT_ROPE, **options})
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return load(path, max_model_len=LENGTH), model


def test_one_forward_gives_transformers_logits(pair: tuple[DenseDecoder, Any]) -> None:
    ours, theirs = pair
    ids = prompt(LENGTH)
    assert_close(our_logits(ours, ids), hf_logits(theirs, ids))


@pytest.mark.parametrize(
    ("cuts", "block_size"), [((1, 2, 37, 99), 4), ((16, 48), 16), (tuple(range(80, LENGTH)), 4)]
)
def test_a_cut_prompt_gives_the_same_logits(
    pair: tuple[DenseDecoder, Any], cuts: tuple[int, ...], block_size: int
) -> None:
    """Chunked prefill and decode, pages shuffled, cuts on page edges and off them."""
    ours, theirs = pair
    ids = prompt(LENGTH)
    assert_close(our_logits(ours, ids, cuts, block_size), hf_logits(theirs, ids))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[DenseDecoder, Any, Path]:
    model = tiny_model("Qwen2Config", tie_word_embeddings=True, rope_parameters=DEFAULT_ROPE)
    path = tmp_path_factory.mktemp("small")
    model.save_pretrained(path)
    return load(path), model, path


def test_sequences_of_one_batch_do_not_see_each_other(
    small: tuple[DenseDecoder, Any, Path],
) -> None:
    """A prompt's chunk, a decode and a fresh prompt in one forward; logits of chosen rows only."""
    ours, theirs, _ = small
    texts = [prompt(length, seed=length) for length in (30, 13, 9)]
    pages = Pages.of(ours, 3, 40, block_size=4)
    ours.forward(pages.batch([(0, 0, texts[0][:17]), (1, 0, texts[1][:12])]), pages.kv)
    chunks = [(1, 12, texts[1][12:]), (2, 0, texts[2]), (0, 17, texts[0][17:])]
    logits = ours.forward(pages.batch(chunks, rows=[0, 9, 22]), pages.kv)
    wanted = [hf_logits(theirs, texts[index])[-1] for index in (1, 2, 0)]
    assert_close(logits, np.stack(wanted))


def test_no_output_row_gives_no_logits(small: tuple[DenseDecoder, Any, Path]) -> None:
    """A chunk in the middle of a prompt wants none: the head has nothing to do."""
    ours, _, _ = small
    pages = Pages.of(ours, 1, 8, block_size=4)
    logits = ours.forward(pages.batch([(0, 0, prompt(5))], rows=[]), pages.kv)
    assert logits.shape == (0, ours.spec.vocab_size)


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 39), unique=True, max_size=8).map(sorted),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_any_cut_gives_the_same_logits(
    small: tuple[DenseDecoder, Any, Path], cuts: list[int], block_size: int
) -> None:
    ours, theirs, _ = small
    ids = prompt(40)
    assert_close(our_logits(ours, ids, cuts, block_size), hf_logits(theirs, ids))


def test_dynamic_scaling_within_the_trained_context_is_plain(tmp_path: Path) -> None:
    """With max_model_len no longer than the trained context the base stays as it was."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    model = tiny_model("LlamaConfig", rope_parameters=rope, max_position_embeddings=64)
    model.save_pretrained(tmp_path)
    ids = prompt(50)
    assert_close(our_logits(load(tmp_path, max_model_len=64), ids), hf_logits(model, ids))


def test_kv_specs_and_weight_bytes(small: tuple[DenseDecoder, Any, Path], tmp_path: Path) -> None:
    """One KV spec per layer; the embedding counts exactly where it is the head."""
    tied, theirs, _ = small
    assert tied.kv_specs("float16") == [PagedKV(kv_heads=2, head_dim=16, dtype="float16")] * 3
    matrices = [p.numel() * 4 for p in theirs.parameters() if p.ndim == 2]  # the tied one once
    assert tied.weight_bytes == 4 * tied.weight_count == sum(matrices)
    untied = tiny_model("Qwen2Config", rope_parameters=DEFAULT_ROPE)
    untied.save_pretrained(tmp_path)
    assert load(tmp_path).weight_bytes == tied.weight_bytes


def test_dummy_weights_run_and_repeat(small: tuple[DenseDecoder, Any, Path]) -> None:
    """Same config, same weights; logits with enough spread that greedy choices differ."""
    _, _, path = small
    ids = prompt(40)
    first = our_logits(load(path, load_format="dummy"), ids)
    again = our_logits(load(path / "config.json", load_format="dummy"), ids)
    assert np.array_equal(first, again)
    assert 1.0 < first.std() < 10.0
    assert len(set(first.argmax(-1).tolist())) > 20


@pytest.mark.parametrize("name", ["qwen3_biased", "llama_no_groups"])
def test_dummy_weights_fit_every_option(name: str, tmp_path: Path) -> None:
    config_class, options = CASES[name]
    config = tiny_model(config_class, **{"rope_parameters": DEFAULT_ROPE, **options}).config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    logits = our_logits(load(tmp_path, load_format="dummy"), prompt(20))
    assert np.isfinite(logits).all()
    assert logits.std() > 1.0
