"""The key-values of a GGUF file -> ModelSpec.

Format and keys: ggml's docs/gguf.md. What the keys do not state is read off the tensors: biases,
tied embeddings (no output.weight), the vocabulary (rows of the embedding table, padding included;
the tokenizer may know fewer) and Llama 3.1's rotary factors (rope_freqs.weight).

As in `spec_hf`: keys in `CHANGES` are refused unless neutral, other unknown ones are descriptive,
and a sliding window lowers the context to its width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toque.errors import ModelError
from toque.model.keys import Keys
from toque.model.spec_hf import check_heads
from toque.types import ModelSpec, RopeSpec, StoredTensor

# Mistral's files say llama. Value: does the family normalise queries and keys?
ARCHITECTURES = {"llama": False, "qwen2": False, "qwen3": True}

# Key -> values beside null under which it does nothing.
CHANGES: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (1,),
    "attention.scale": (0,),
    "attention.sliding_window_pattern": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.dimension_sections": ([],),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}

YARN_NUMBERS = {
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def spec_from_gguf(
    source: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModelSpec:
    """The structure that a GGUF file describes.

    `source` names the file in errors. Raises ModelError that names the key or tensor at fault.
    """
    name = Keys(source, metadata).one_of("general.architecture", ARCHITECTURES)
    keys = Keys(source, metadata, f"{name}.")
    keys.require_neutral(CHANGES)
    heads = keys.count("attention.head_count")
    spec = ModelSpec(
        architecture=name,
        vocab_size=_vocab_size(source, tensors),
        hidden=keys.count("embedding_length"),
        layers=keys.count("block_count"),
        heads=heads,
        kv_heads=keys.count("attention.head_count_kv", heads),
        head_dim=_head_dim(keys),
        intermediate=keys.count("feed_forward_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(keys, tensors.get("rope_freqs.weight")),
        context=_context(keys),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=ARCHITECTURES[name],
        tied_embeddings="output.weight" not in tensors,
    )
    check_heads(keys, spec)
    return spec


def sliding_window(keys: Keys) -> int | None:
    """Tokens that a layer sees, or None where all layers see everything (a window of 0 is none)."""
    window = keys.get("attention.sliding_window")
    return keys.count("attention.sliding_window") if window else None


def _vocab_size(source: str, tensors: Mapping[str, StoredTensor]) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{source}: the tensor token_embd.weight is missing")
    return int(tensors["token_embd.weight"].shape[0])


def _head_dim(keys: Keys) -> int:
    usual = max(keys.count("embedding_length") // keys.count("attention.head_count"), 1)
    head_dim = keys.count("attention.key_length", usual)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key) is not None and keys.count(key) != head_dim:
            raise keys.refuse(key, f"only heads of {head_dim} rotated whole, keys as values, are")
    return head_dim


def _context(keys: Keys) -> int:
    """Tokens a sequence may have: what the model was trained for, yarn's extension included."""
    context = keys.count("context_length")
    if keys.get("rope.scaling.type") == "yarn":
        original = keys.count("rope.scaling.original_context_length", context)
        context = max(context, int(original * keys.number("rope.scaling.factor")))
    return min(context, sliding_window(keys) or context)


def _rope(keys: Keys, factors: StoredTensor | None) -> RopeSpec:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.one_of("rope.scaling.type", ("none", "linear", "yarn"), "linear")
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    divisors = _frequency_factors(keys, factors)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeSpec(theta=theta, frequency_factors=divisors)
    found = {"factor": float(factor)}
    if kind == "yarn":
        original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
        found["original_max_position_embeddings"] = float(original)
        found |= {ours: keys.number(key) for ours, key in YARN_NUMBERS.items() if keys.get(key)}
    return RopeSpec(theta=theta, kind=kind, parameters=found, frequency_factors=divisors)


def _frequency_factors(keys: Keys, tensor: StoredTensor | None) -> tuple[float, ...]:
    if tensor is None:
        return ()
    pairs = _head_dim(keys) // 2
    if tensor.kind != "F32" or tensor.shape != (pairs,):
        raise ModelError(
            f"{keys.source}: rope_freqs.weight is {tensor.kind} {tensor.shape}, not F32 ({pairs},)"
        )
    values = np.frombuffer(tensor.data, np.float32)  # [head_dim / 2]
    return tuple(float(value) for value in values)
