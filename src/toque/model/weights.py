"""Which weight of a file is which of ours, and whether the file has exactly those of its spec.

Owns: nothing. Knows: the names of Hugging Face's and of GGUF's tensors, and the shape of each.
Does not know: kernels, what a layer does with its weights.

`TOP` and `LAYER` are the only name tables. A weight is bound when the spec calls for it; one that
is missing, left over or of another shape is an error that names it, before any of it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toque.errors import ModelError
from toque.types import ModelSpec, StoredTensor

HF, GGUF = "hf", "gguf"


@dataclass(frozen=True, slots=True)
class Weight:
    """One row of a name table. `shape` names dimensions; `when` names the spec's flag, if any."""

    role: str
    hf: str
    gguf: str
    shape: tuple[str, ...]
    when: str | None = None


TOP = (
    Weight("embedding", "model.embed_tokens.weight", "token_embd.weight", ("vocab", "hidden")),
    Weight("norm", "model.norm.weight", "output_norm.weight", ("hidden",)),
    Weight("head", "lm_head.weight", "output.weight", ("vocab", "hidden"), "untied"),
)

# Names below stand behind "model.layers.N." and "blk.N.".
LAYER = (
    Weight("attention_norm", "input_layernorm.weight", "attn_norm.weight", ("hidden",)),
    Weight("query", "self_attn.q_proj.weight", "attn_q.weight", ("query", "hidden")),
    Weight("key", "self_attn.k_proj.weight", "attn_k.weight", ("kv", "hidden")),
    Weight("value", "self_attn.v_proj.weight", "attn_v.weight", ("kv", "hidden")),
    Weight("query_bias", "self_attn.q_proj.bias", "attn_q.bias", ("query",), "qkv_bias"),
    Weight("key_bias", "self_attn.k_proj.bias", "attn_k.bias", ("kv",), "qkv_bias"),
    Weight("value_bias", "self_attn.v_proj.bias", "attn_v.bias", ("kv",), "qkv_bias"),
    Weight("query_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", ("head",), "qk_norm"),
    Weight("key_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", ("head",), "qk_norm"),
    Weight("output", "self_attn.o_proj.weight", "attn_output.weight", ("hidden", "query")),
    Weight("output_bias", "self_attn.o_proj.bias", "attn_output.bias", ("hidden",), "output_bias"),
    Weight("ffn_norm", "post_attention_layernorm.weight", "ffn_norm.weight", ("hidden",)),
    Weight("gate", "mlp.gate_proj.weight", "ffn_gate.weight", ("inner", "hidden")),
    Weight("up", "mlp.up_proj.weight", "ffn_up.weight", ("inner", "hidden")),
    Weight("down", "mlp.down_proj.weight", "ffn_down.weight", ("hidden", "inner")),
    Weight("gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias", ("inner",), "mlp_bias"),
    Weight("up_bias", "mlp.up_proj.bias", "ffn_up.bias", ("inner",), "mlp_bias"),
    Weight("down_bias", "mlp.down_proj.bias", "ffn_down.bias", ("hidden",), "mlp_bias"),
)

# Tensors that repeat what the spec already says: rotary tables, read (or derived) by the spec.
IGNORED = {
    HF: re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|(cos|sin)_cached)"),
    GGUF: re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"),
}

Roles = dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """Every weight of a model by our own names, still packed; what the spec excludes is absent."""

    top: Roles
    layers: list[Roles]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a file belongs: `layer` is None for what stands outside the layers."""

    layer: int | None
    weight: Weight
    shape: tuple[int, ...]


def places(spec: ModelSpec, names: str) -> dict[str, Place]:
    """Every tensor that a file of this spec must have, by the file's own names (HF or GGUF)."""
    layer_prefix = {HF: "model.layers.{}.", GGUF: "blk.{}."}[names]
    sizes = _sizes(spec)
    found: dict[str, Place] = {}
    for layer, weight in _called_for(spec):
        prefix = "" if layer is None else layer_prefix.format(layer)
        shape = tuple(sizes[dimension] for dimension in weight.shape)
        found[prefix + getattr(weight, names)] = Place(layer, weight, shape)
    return found


def bind(source: str, tensors: Mapping[str, StoredTensor], spec: ModelSpec, names: str) -> Weights:
    """Sort a file's tensors by our names. Raises ModelError that names what is wrong."""
    wanted = places(spec, names)
    _check_names(source, tensors, wanted, spec, names)
    weights = Weights(top={}, layers=[{} for _ in range(spec.layers)])
    for name, place in wanted.items():
        tensor = tensors[name]
        if tensor.shape != place.shape:
            raise ModelError(
                f"{source}: tensor {name} has shape {tensor.shape}, the model needs {place.shape}"
            )
        roles = weights.top if place.layer is None else weights.layers[place.layer]
        roles[place.weight.role] = tensor
    if names == GGUF and spec.architecture == "llama":
        _restore_pairing(weights, spec)
    return weights


def never_four_bits() -> frozenset[str]:
    """The names, in either kind of file, of the tensors that stand next to the logits: embedding
    (which may be the head as well) and head."""
    return frozenset(name for weight in (TOP[0], TOP[2]) for name in (weight.hf, weight.gguf))


def half_split_order(heads: int, head_dim: int) -> NDArray[np.int64]:
    """Row order that undoes the interleaving of rotary pairs: [heads * head_dim].

    GGUF stores Llama's query and key rows with each rotary pair adjacent (0, d/2, 1, d/2 + 1, ...);
    the kernels rotate pairs (i, i + d/2).
    """
    rows = np.arange(heads * head_dim, dtype=np.int64)
    return rows.reshape(heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _restore_pairing(weights: Weights, spec: ModelSpec) -> None:
    for role, heads in (("query", spec.heads), ("key", spec.kv_heads)):
        order = half_split_order(heads, spec.head_dim)
        for layer in weights.layers:
            for name in (role, f"{role}_bias"):  # the converter permutes biases as well
                if name in layer:
                    layer[name] = layer[name].permute_rows(order)


def _called_for(spec: ModelSpec) -> Iterator[tuple[int | None, Weight]]:
    flags = {
        None: True,
        "untied": not spec.tied_embeddings,
        "qkv_bias": spec.qkv_bias,
        "output_bias": spec.output_bias,
        "mlp_bias": spec.mlp_bias,
        "qk_norm": spec.qk_norm,
    }
    for weight in TOP:
        if flags[weight.when]:
            yield None, weight
    for layer in range(spec.layers):
        for weight in LAYER:
            if flags[weight.when]:
                yield layer, weight


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden,
        "query": spec.heads * spec.head_dim,
        "kv": spec.kv_heads * spec.head_dim,
        "head": spec.head_dim,
        "inner": spec.intermediate,
    }


def _check_names(
    source: str,
    tensors: Mapping[str, StoredTensor],
    wanted: Mapping[str, Place],
    spec: ModelSpec,
    names: str,
) -> None:
    if missing := [name for name in wanted if name not in tensors]:
        raise ModelError(f"{source}: missing weights: {_some(missing)}")
    extra = [name for name in tensors if name not in wanted]
    extra = [name for name in extra if not IGNORED[names].fullmatch(name)]
    if spec.tied_embeddings and TOP[2].hf in extra and names == HF:
        _check_tied_copy(source, tensors)
        extra.remove(TOP[2].hf)
    if extra:
        raise ModelError(f"{source}: weights that the model has no place for: {_some(extra)}")


def _check_tied_copy(source: str, tensors: Mapping[str, StoredTensor]) -> None:
    """A head beside tied embeddings must be a copy, else config and file contradict each other."""
    embedding, head = tensors[TOP[0].hf], tensors[TOP[2].hf]
    if not np.array_equal(embedding.data, head.data):
        raise ModelError(
            f"{source}: tie_word_embeddings is true, but {head.name} differs from {embedding.name}"
        )


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + rest
