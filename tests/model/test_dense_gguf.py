"""GGUF files against transformers on the dequantized weights, and the real small model.

The file's rows are put in order as llama.cpp's converter does it; the oracle never is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_oracle import KEYS, gguf_name, transformers_model
from model_oracle import DEFAULT_ROPE, assert_close, hf_logits, load, our_logits, prompt, tiny_model

from toque.files.checkpoint import open_checkpoint
from toque.kernels import select
from toque.model.registry import load_model, model_spec

Kind = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
LLAMA_KINDS = {
    "token_embd": Kind.Q8_0,
    "output": Kind.Q6_K,
    "attn_q": Kind.Q4_K,
    "attn_k": Kind.Q4_0,
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.F16,
    "ffn_gate": Kind.Q4_K,
    "ffn_up": Kind.Q4_1,
    "ffn_down": Kind.Q5_K,
}
QWEN_KINDS = {
    "token_embd": Kind.Q4_0,
    "attn_q": Kind.Q8_0,
    "attn_k": Kind.Q6_K,
    "attn_v": Kind.Q5_0,
    "attn_output": Kind.Q5_1,
    "ffn_gate": Kind.Q4_0,
    "ffn_up": Kind.BF16,
    "ffn_down": Kind.Q4_K,
}


def random_blocks(kind: Kind, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Valid packed rows of a kind that the gguf package cannot quantize to: [out, bytes].

    Every bit of the payload is random; the scales (fp16) are such that weights are around 0.1.
    """
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // weights, size), np.uint8)
    scales = {  # (byte offset, scale); Q4_K and Q5_K subtract a minimum of about the mean
        Kind.Q4_K: [(0, 4e-4), (2, 3e-3)],
        Kind.Q5_K: [(0, 2e-4), (2, 3e-3)],
        Kind.Q6_K: [(208, 6e-5)],
    }[kind]
    for offset, scale in scales:
        blocks[..., offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def packed(kind: Kind, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows of bytes, or of numbers for the kinds that are not blocks."""
    if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return random_blocks(kind, values.shape, rng)
    return gguf.quants.quantize(values, kind)


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to Llama's query and key rows (weights and biases)."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, model: Any, arch: str, kinds: dict[str, Kind], factors: np.ndarray | None = None
) -> None:
    """Quantize the model into a file, and put the dequantized weights back into the model."""
    config, rng = model.config, np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, arch)
    for ours, theirs in KEYS.items():
        writer.add_uint32(f"{arch}.{theirs}", getattr(config, ours))
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        target = gguf_name(name)
        part = target.split(".")[-2]
        kind = kinds[part] if parameter.ndim == 2 else Kind.F32
        rows = packed(kind, parameter.detach().numpy(), rng)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(rows, kind).copy()))
        if arch == "llama" and part in heads:
            rows = interleave(rows, heads[part])
        writer.add_tensor(target, np.ascontiguousarray(rows), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_llama_untied(tmp_path: Path) -> None:
    """Query and key rows are stored interleaved, whatever their packing, and come back in order."""
    model = tiny_model("LlamaConfig", **SIZES, rope_parameters=DEFAULT_ROPE)
    write_gguf(tmp_path / "model.gguf", model, "llama", LLAMA_KINDS)
    ids = prompt(50)
    decoder = load(tmp_path / "model.gguf")
    assert_close(our_logits(decoder, ids), hf_logits(model, ids))
    assert_close(our_logits(decoder, ids, (3, 16, 49), 4), hf_logits(model, ids))


def test_llama_biases_and_rope_factors(tmp_path: Path) -> None:
    """Biases are interleaved as well; Llama 3.1's scaling comes as a tensor of divisors."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny_model(
        "LlamaConfig", **SIZES, rope_parameters=rope, attention_bias=True, mlp_bias=True
    )
    rotary = model.model.rotary_emb
    exponents = torch.arange(0, 64, 2) / 64
    factors = (500.0**-exponents / rotary.inv_freq).numpy().astype(np.float32)
    assert factors.max() == pytest.approx(8.0)
    write_gguf(tmp_path / "model.gguf", model, "llama", LLAMA_KINDS, factors)
    ids = prompt(100)
    assert_close(our_logits(load(tmp_path / "model.gguf"), ids), hf_logits(model, ids))


def test_qwen2_tied(tmp_path: Path) -> None:
    """Rows lie as transformers has them; no output.weight means tied; biases are found."""
    model = tiny_model(
        "Qwen2Config", **SIZES, rope_parameters=DEFAULT_ROPE, tie_word_embeddings=True
    )
    write_gguf(tmp_path / "model.gguf", model, "qwen2", QWEN_KINDS)
    ids = prompt(50)
    decoder = load(tmp_path / "model.gguf")
    assert decoder.spec.tied_embeddings
    assert decoder.spec.qkv_bias
    assert_close(our_logits(decoder, ids, (20,)), hf_logits(model, ids))


def test_qwen3(tmp_path: Path) -> None:
    options = {"rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True, "head_dim": 64}
    model = tiny_model("Qwen3Config", **SIZES, **options)
    write_gguf(tmp_path / "model.gguf", model, "qwen3", QWEN_KINDS)
    ids = prompt(50)
    assert_close(our_logits(load(tmp_path / "model.gguf"), ids), hf_logits(model, ids))


# A few sentences of English about kitchens and scheduling, in the tokens of SmolLM2's tokenizer.
TEXT = [
    *(504, 9902, 282, 253, 10229, 15238, 314, 253, 5040, 281, 20678, 30, 38330, 11296, 418, 750),
    *(3847, 28, 971, 3252, 5988, 624, 1114, 3318, 28, 284, 260, 827, 28196, 2419, 582, 23588),
    *(30, 1094, 502, 9199, 582, 3252, 1092, 502, 1956, 260, 1867, 28, 260, 14603, 418, 260),
    *(6644, 5847, 327, 354, 5353, 43, 588, 502, 1446, 1545, 30858, 335, 260, 2892, 284),
]


def test_the_real_small_model(smollm2_path: Path) -> None:
    """Teacher-forced logits of English text as transformers has them, and good ones: if rows were
    ordered wrongly in the same way on both sides, the model would not predict the text."""
    checkpoint = open_checkpoint(smollm2_path)
    theirs = hf_logits(transformers_model(checkpoint), TEXT)
    decoder = load_model(checkpoint, model_spec(checkpoint), select("ref"), 64)
    logits = our_logits(decoder, TEXT, (32,))
    assert_close(logits, theirs)
    assert np.array_equal(logits.argmax(-1), theirs.argmax(-1))
    log_sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    loss = log_sums[:-1] - logits[np.arange(len(TEXT) - 1), TEXT[1:]]
    assert loss.mean() < 4.8  # nats per token: 4.3; with rows in the file's order it is 5.3
