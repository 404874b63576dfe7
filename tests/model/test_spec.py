"""What configs and GGUF keys become, and that whatever we do not compute is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toque.errors import ModelError
from toque.files.checkpoint import Checkpoint
from toque.kernels import select
from toque.model.dummy import dummy_tensors
from toque.model.registry import load_model, model_spec
from toque.types import ModelSpec, RopeSpec, StoredTensor

LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
}
LLAMA31_ROPE = RopeSpec(
    theta=500000.0,
    kind="llama3",
    parameters={
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    },
)
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "max_window_layers": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 128,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
MISTRAL = {
    **{key: value for key, value in QWEN2.items() if "window" not in key},
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 32,
}


def checkpoint(config: dict[str, Any], form: str = "dummy") -> Checkpoint:
    return Checkpoint(Path("folder"), form, config, {}, {}, "0" * 16)


def spec_of(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_spec(checkpoint({**config, **changes}))


def test_llama31_config() -> None:
    assert spec_of(LLAMA31) == ModelSpec(
        architecture="llama",
        vocab_size=128256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        rms_eps=1e-5,
        rope=LLAMA31_ROPE,
        context=131072,
    )


def test_old_and_new_rope_forms_mean_the_same() -> None:
    """transformers 5 puts theta and scaling into one object."""
    new = {key: value for key, value in LLAMA31.items() if not key.startswith("rope")}
    new["rope_parameters"] = {**LLAMA31["rope_scaling"], "rope_theta": 500000.0}
    assert spec_of(new) == spec_of(LLAMA31)


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (LLAMA31, set()),
        ({**LLAMA31, "attention_bias": True}, {"qkv_bias", "output_bias"}),
        (QWEN2, {"qkv_bias", "tied_embeddings"}),
        (MISTRAL, {"tied_embeddings"}),
        ({**QWEN2, "model_type": "qwen3", "architectures": None}, {"qk_norm", "tied_embeddings"}),
    ],
)
def test_what_a_family_fixes(config: dict[str, Any], flags: set[str]) -> None:
    spec = spec_of(config)
    names = ("qkv_bias", "output_bias", "mlp_bias", "qk_norm", "tied_embeddings")
    assert {name for name in names if getattr(spec, name)} == flags


def test_yarn_extends_the_context() -> None:
    """The recipe of Qwen2.5's model cards: four times the trained 32768 tokens."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    spec = spec_of(QWEN2, max_position_embeddings=32768, rope_scaling=scaling)
    assert spec.rope.kind == "yarn"
    assert spec.context == 131072


def test_the_original_context_of_a_scaled_rotation() -> None:
    """Dynamic grows from max_position_embeddings, whatever else is stated; for the others that is
    only the default, and a number outside the rope object goes before one inside (Phi's form)."""
    original = "original_max_position_embeddings"
    dynamic = {"rope_type": "dynamic", "factor": 2.0, original: 64}
    assert spec_of(QWEN2, rope_scaling=dynamic).rope.parameters[original] == 256.0
    yarn = {"rope_type": "yarn", "factor": 2.0}
    assert spec_of(QWEN2, rope_scaling=yarn).rope.parameters[original] == 256.0
    outer = spec_of(QWEN2, rope_scaling={**yarn, original: 64}, **{original: 128})
    assert outer.rope.parameters[original] == 128.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("model_type", "phi3"),
        ("model_type", None),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Custom"}),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "gptq"}),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention_multiplier", 0.0078125),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 16.0),
        ("num_local_experts", 8),
        ("num_experts", 64),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", 0.0),
        ("hidden_size", 64.0),
        ("num_hidden_layers", 0),
        ("tie_word_embeddings", "no"),
        ("attention_bias", 1),
        ("rope_theta", -1.0),
    ],
)
def test_unsupported_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as refusal:
        spec_of(LLAMA31, **{key: value})
    assert key in str(refusal.value)
    assert repr(value) in str(refusal.value) or value is None
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "longrope", "factor": 2.0}, "rope_scaling.type = 'longrope'"),
        ({"rope_type": "mrope"}, "rope_scaling.rope_type = 'mrope'"),
        ({"rope_type": "linear"}, "rope_scaling.factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor"),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 3.0}, "rope_scaling.alpha = 3.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({**LLAMA31["rope_scaling"], "high_freq_factor": 1.0}, "rope_scaling.high_freq_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling.full_attention"),
        ({"rope_type": "linear", "factor": float("inf")}, "rope_scaling.factor = inf"),
    ],
)
def test_unsupported_rotations_are_refused_by_name(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError) as refusal:
        spec_of(LLAMA31, rope_scaling=scaling)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_attention_heads", "rms_norm_eps", "max_position_embeddings"],
)
def test_a_missing_key_is_named(key: str) -> None:
    config = {name: value for name, value in LLAMA31.items() if name != key}
    with pytest.raises(ModelError, match=f"{key} is missing"):
        spec_of(config)


def test_unknown_architectures_list_the_supported_ones() -> None:
    with pytest.raises(ModelError) as refusal:
        spec_of(LLAMA31, model_type="mamba")
    for name in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"):
        assert name in str(refusal.value)


def test_heads_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(ModelError, match="32 attention heads cannot share 5 KV heads"):
        spec_of(LLAMA31, num_key_value_heads=5)
    with pytest.raises(ModelError, match="head_dim 31 is odd"):
        spec_of(LLAMA31, head_dim=31)


SLIDING = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "context"),
    [
        (QWEN2, 256),
        ({**QWEN2, "use_sliding_window": True}, 128),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 2}, 256),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, 128),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, 256),
        ({**QWEN2, "use_sliding_window": True, "layer_types": SLIDING}, 128),
        (MISTRAL, 32),
        ({**MISTRAL, "sliding_window": None}, 256),
        ({**MISTRAL, "sliding_window": 4096}, 256),
    ],
)
def test_a_sliding_window_bounds_the_context(config: dict[str, Any], context: int) -> None:
    """Within the window a sliding layer equals a full one, beyond it we would be wrong."""
    assert spec_of(config).context == context


def test_a_longer_max_model_len_than_the_window_is_refused() -> None:
    opened = checkpoint(MISTRAL)
    spec = model_spec(opened)
    assert load_model(opened, spec, select("ref"), 32).spec == spec
    with pytest.raises(ModelError, match=r"sliding_window = 32 .*--max-model-len 32"):
        load_model(opened, spec, select("ref"), 33)


# ------------------------------------------------------------------------------------- weights


def weights_error(change: Any, config: dict[str, Any] = QWEN2) -> str:
    """What loading says after `change(tensors)` of a complete set of weights."""
    opened = checkpoint(config)
    spec = model_spec(opened)
    tensors = dummy_tensors(spec)
    change(tensors)
    with pytest.raises(ModelError) as refusal:
        load_model(replace(opened, format="safetensors", tensors=tensors), spec, select("ref"), 16)
    return str(refusal.value)


def stored(name: str, *shape: int, value: float = 0.0) -> StoredTensor:
    data = np.full(shape, value, np.float32).reshape(-1).view(np.uint8)
    return StoredTensor(name, "F32", shape, data)


def test_a_missing_weight_is_named() -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    assert name in weights_error(lambda tensors: tensors.pop(name))


def test_a_weight_without_a_place_is_named() -> None:
    name = "model.layers.1.self_attn.q_norm.weight"
    assert name in weights_error(lambda tensors: tensors.update({name: stored(name, 16)}))


def test_a_weight_of_another_shape_is_named_with_both_shapes() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    message = weights_error(lambda tensors: tensors.update({name: stored(name, 96, 64)}))
    assert name in message
    assert "(96, 64)" in message
    assert "(64, 96)" in message


def test_a_head_that_contradicts_tied_embeddings_is_refused() -> None:
    name = "lm_head.weight"
    message = weights_error(lambda tensors: tensors.update({name: stored(name, 400, 64)}))
    assert "tie_word_embeddings" in message
    assert name in message


def test_known_extras_are_ignored() -> None:
    """Rotary tables that old checkpoints carry, and a head that repeats the tied embeddings."""
    opened = checkpoint(QWEN2)
    spec = model_spec(opened)
    tensors = dummy_tensors(spec)
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        tensors[name] = stored(name, 8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    full = replace(opened, format="safetensors", tensors=tensors)
    assert load_model(full, spec, select("ref"), 16).spec == spec


# ---------------------------------------------------------------------------------------- GGUF

LLAMA_GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 300,
    "general.file_type": 2,
    "tokenizer.ggml.model": "gpt2",
}


def gguf_spec(extra: tuple[StoredTensor, ...] = (), **changes: Any) -> ModelSpec:
    """`changes` name keys behind "llama." with __ for dots."""
    keys = {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    tensors = (stored("token_embd.weight", 320, 64), *extra)
    named = {tensor.name: tensor for tensor in tensors}
    path = Path("file.gguf")
    return model_spec(Checkpoint(path, "gguf", {**LLAMA_GGUF, **keys}, {}, named, ""))


def test_gguf_keys() -> None:
    """The vocabulary is the embedding's, padding included, whatever the keys say."""
    assert gguf_spec() == ModelSpec(
        architecture="llama",
        vocab_size=320,
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
        rms_eps=1e-5,
        rope=RopeSpec(theta=500000.0),
        context=4096,
        tied_embeddings=True,
    )


def test_gguf_options_are_read_off_the_tensors() -> None:
    names = ("output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias")
    spec = gguf_spec(tuple(stored(name, 1) for name in names))
    assert (spec.tied_embeddings, spec.qkv_bias, spec.output_bias) == (False, True, True)


def test_gguf_rope_factors() -> None:
    factors = stored("rope_freqs.weight", 8, value=2.5)
    assert gguf_spec((factors,)).rope.frequency_factors == (2.5,) * 8
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        gguf_spec((stored("rope_freqs.weight", 16),))


def test_gguf_rope_scaling() -> None:
    """A factor without a type is linear: that is how files from before yarn say it."""
    linear = gguf_spec(rope__scaling__factor=4.0).rope
    assert (linear.kind, linear.parameters) == ("linear", {"factor": 4.0})
    assert gguf_spec(rope__scaling__factor=0.0).rope.kind == "default"
    assert gguf_spec(rope__scaling__type="none", rope__scaling__factor=4.0).rope.kind == "default"
    yarn = gguf_spec(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=4096,
        rope__scaling__yarn_beta_fast=16.0,
    )
    assert yarn.rope.parameters == {
        "factor": 4.0,
        "original_max_position_embeddings": 4096.0,
        "beta_fast": 16.0,
    }
    assert yarn.context == 16384


def test_gguf_sliding_window_bounds_the_context() -> None:
    assert gguf_spec(attention__sliding_window=1024).context == 1024
    assert gguf_spec(attention__sliding_window=0).context == 4096


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("rope__scaling__type", "longrope"),
        ("rope__scaling__attn_factor", 1.2),
        ("rope__scaling__yarn_log_multiplier", 0.1),
        ("rope__dimension_count", 8),
        ("attention__value_length", 32),
        ("attention__head_count", [4, 8]),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 0.5),
        ("attention__scale", 0.01),
        ("block_count", 0),
    ],
)
def test_unsupported_gguf_keys_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ModelError) as refusal:
        gguf_spec(**{key: value})
    assert f"llama.{key.replace('__', '.')} = {value!r}" in str(refusal.value)
    assert "file.gguf" in str(refusal.value)


def test_unknown_gguf_architectures_list_the_supported_ones() -> None:
    path = Path("file.gguf")
    with pytest.raises(ModelError, match=r"general\.architecture = 'gemma'.*llama, qwen2, qwen3"):
        model_spec(Checkpoint(path, "gguf", {"general.architecture": "gemma"}, {}, {}, ""))
