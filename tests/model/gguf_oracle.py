"""transformers' models with the weights of a GGUF file, dequantized by the gguf package."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch
import transformers

from toque.files.checkpoint import Checkpoint

Kind = gguf.GGMLQuantizationType
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KEYS = {  # ours in transformers' config -> GGUF's
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    stem, ending = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{ending}"
    return f"{NAMES[stem]}.{ending}"


def deinterleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The converter's reordering of llama's query and key rows, undone."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def transformers_model(file: Checkpoint) -> Any:
    """A Llama or Qwen2 with the file's weights, in float32."""
    family = file.metadata["general.architecture"]
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[family]
    config = config_class(
        **{ours: file.metadata[f"{family}.{key}"] for ours, key in KEYS.items()},
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        rms_norm_eps=file.metadata[f"{family}.attention.layer_norm_rms_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": file.metadata[f"{family}.rope.freq_base"],
        },
        tie_word_embeddings="output.weight" not in file.tensors,
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    with torch.device("meta"):
        model = model_class(config)
    stored = dict(file.tensors)
    state = {}
    for name, _ in model.named_parameters():
        tensor = stored.pop(gguf_name(name))
        rows = tensor.data.reshape(tensor.shape[0], -1)  # one row of a vector is one number
        values = gguf.quants.dequantize(rows, Kind[tensor.kind]).reshape(tensor.shape)
        part = tensor.name.split(".")[-2]
        if family == "llama" and part in heads:
            values = deinterleave(values, heads[part])
        state[name] = torch.from_numpy(np.array(values, np.float32))
    assert not stored, f"the file has more: {list(stored)}"
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not weights
    return model.eval()
