"""config.json of a Hugging Face checkpoint -> ModelSpec.

Three lists decide about a key. Those read below define the structure. Those in `CHANGES` are known
to alter the computation and are refused unless they hold a neutral value. All others (ids, dtypes,
cache and training settings) are taken to be descriptive; a model that needs more than the spec can
say is caught by its class name or by weights that are missing or left over.

Sliding windows are not implemented. A layer that sees only the last W tokens equals a full one as
long as no sequence is longer than W, so such a model is accepted with its context lowered to W,
and `load_model` refuses a max_model_len above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toque.errors import ModelError
from toque.model.keys import Keys
from toque.types import ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class Family:
    """What the class of a model fixes and its config does not say."""

    class_name: str
    qkv_bias: bool | None  # None: the config's attention_bias, for the output projection too
    qk_norm: bool = False
    head_dim: int | None = None  # where the config gives none; None: hidden / heads


FAMILIES = {
    "llama": Family("LlamaForCausalLM", qkv_bias=None),
    "mistral": Family("MistralForCausalLM", qkv_bias=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qkv_bias=None, qk_norm=True, head_dim=128),
}

# Key -> values beside null under which it does nothing.
CHANGES: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0,),
    "attn_temperature_tuning": (False, 0),
    "cross_attention_layers": ([],),
    "dim_model_base": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "moe_intermediate_size": (0,),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_experts_per_tok": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "q_lora_rank": (),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rotary_pct": (1,),
    "scale_depth": (),
    "scale_emb": (1,),
    "use_qk_norm": (False,),
}

ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
ROPE_MAY_HAVE = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
ROPE_KNOWN = {
    *("type", "rope_type", "rope_theta", "partial_rotary_factor", "truncate", "finetuned"),
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *ROPE_MAY_HAVE,
}


def spec_from_config(source: str, config: Mapping[str, Any]) -> ModelSpec:
    """The structure that a config.json describes.

    `source` names the file in errors. Raises ModelError that names the key at fault.
    """
    keys = Keys(source, config)
    name, family = _family(keys)
    keys.require_neutral(CHANGES)
    keys.one_of("hidden_act", ("silu", "swish"), "silu")
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    attention_bias = family.qkv_bias is None and keys.flag("attention_bias")
    spec = ModelSpec(
        architecture=name,
        vocab_size=keys.count("vocab_size"),
        hidden=hidden,
        layers=keys.count("num_hidden_layers"),
        heads=heads,
        kv_heads=keys.count("num_key_value_heads", heads),
        head_dim=keys.count("head_dim", family.head_dim or max(hidden // heads, 1)),
        intermediate=keys.count("intermediate_size"),
        rms_eps=keys.number("rms_norm_eps"),
        rope=_rope(keys),
        context=_context(keys),
        qkv_bias=bool(family.qkv_bias) or attention_bias,
        output_bias=attention_bias,
        mlp_bias=name == "llama" and keys.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        tied_embeddings=keys.flag("tie_word_embeddings"),
    )
    check_heads(keys, spec)
    return spec


def check_heads(keys: Keys, spec: ModelSpec) -> None:
    """Refuse head counts that the kernels' contract excludes."""
    if spec.heads % spec.kv_heads:
        raise ModelError(
            f"{keys.source}: {spec.heads} attention heads cannot share {spec.kv_heads} KV heads"
        )
    if spec.head_dim % 2:
        raise ModelError(f"{keys.source}: head_dim {spec.head_dim} is odd: rotation needs pairs")


def sliding_window(keys: Keys) -> int | None:
    """Tokens that the narrowest layer sees, or None where all layers see everything.

    Qwen has a switch and a list of layers; in the other families the window alone decides.
    """
    kinds = keys.get("layer_types") or []
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise keys.refuse("layer_types", f"no layer of kind {', '.join(sorted(unknown))} is known")
    used = True
    if keys.get("model_type") in ("qwen2", "qwen3"):
        used = keys.flag("use_sliding_window") and _some_layer_slides(keys, kinds)
    if used and keys.get("sliding_window") is not None:
        return keys.count("sliding_window")
    if "sliding_attention" in kinds:
        raise keys.refuse("layer_types", "it names sliding layers, but no window is in use")
    return None


def _some_layer_slides(keys: Keys, kinds: Sequence[str]) -> bool:
    if kinds:
        return "sliding_attention" in kinds
    first = keys.get("max_window_layers")  # layers from this one on slide; 0 is a valid number
    return keys.count("num_hidden_layers") > (28 if first is None else int(first))


def _family(keys: Keys) -> tuple[str, Family]:
    supported = ", ".join(family.class_name for family in FAMILIES.values())
    classes = keys.get("architectures") or []
    name = keys.get("model_type")
    family = FAMILIES.get(name)
    if family is None:
        raise keys.refuse("model_type", f"supported are {', '.join(FAMILIES)} ({supported})")
    if classes and family.class_name not in classes:
        raise keys.refuse("architectures", f"supported are {supported}")
    if "AutoModelForCausalLM" in (keys.get("auto_map") or {}):
        raise keys.refuse("auto_map", "code that comes with a checkpoint is never run")
    return name, family


def _context(keys: Keys) -> int:
    """Tokens a sequence may have: what the model was trained for, yarn's extension included."""
    context = keys.count("max_position_embeddings")
    rope = _rope(keys)
    if rope.kind == "yarn":
        stretched = rope.parameters["factor"] * rope.parameters["original_max_position_embeddings"]
        context = max(context, int(stretched))
    return min(context, sliding_window(keys) or context)


def _rope(keys: Keys) -> RopeSpec:
    """Both forms: rope_theta beside rope_scaling, and everything in rope_parameters."""
    where = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    values = keys.get(where) or {}
    if not isinstance(values, Mapping):
        raise keys.refuse(where, "it must be an object")
    named = {f"{where}.{key}": value for key, value in values.items()}
    inner = Keys(keys.source, named, f"{where}.")
    for key in values.keys() - ROPE_KNOWN:
        raise inner.refuse(key, "it is not known what it does to the rotation")
    inner.require_neutral({"partial_rotary_factor": (1,)})
    kind = inner.one_of("rope_type" if "rope_type" in values else "type", ROPE_NEEDS, "default")
    theta = inner.number("rope_theta", keys.number("rope_theta", 10000.0))
    return RopeSpec(theta=theta, kind=kind, parameters=_rope_parameters(keys, inner, kind))


def _rope_parameters(keys: Keys, inner: Keys, kind: str) -> dict[str, float]:
    """The numbers that `kind` uses. Raises ModelError for one that is missing."""
    if kind == "default":
        return {}
    found = {key: inner.number(key) for key in ROPE_NEEDS[kind]}
    if kind != "linear":
        found["original_max_position_embeddings"] = float(_original_context(keys, inner, kind))
    if kind == "llama3" and found["high_freq_factor"] <= found["low_freq_factor"]:
        raise inner.refuse("high_freq_factor", "it must be above low_freq_factor")
    if kind == "yarn":
        found |= {key: inner.number(key) for key in ROPE_MAY_HAVE if inner.get(key) is not None}
        found["truncate"] = float(inner.flag("truncate", True))
    return found


def _original_context(keys: Keys, inner: Keys, kind: str) -> int:
    """Tokens from which on scaling matters. Dynamic's definition knows the trained context only;
    for the others the number may stand inside or, going first, beside the rope object."""
    key, trained = "original_max_position_embeddings", keys.count("max_position_embeddings")
    return trained if kind == "dynamic" else keys.count(key, inner.count(key, trained))
