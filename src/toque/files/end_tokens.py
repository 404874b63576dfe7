"""Which tokens end an answer, according to a model's own files.

A chat model may end with another token than the one its file calls EOS (Qwen: `<|im_end|>` after an
answer, `<|endoftext|>` after a document), so every source is asked and the union is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from toque.errors import ModelError
from toque.files.checkpoint import Checkpoint
from toque.files.gguf_values import StringArray

GGUF_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
CONTROL = 3  # GGUF's token type for tokens that are never text
END_NAMES = frozenset(
    {
        "</s>",
        "<eos>",
        "<|eos|>",
        "<EOT>",
        "<|eot|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    }
)


def end_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Ids after which an answer is over, sorted; empty if the files name none.

    Hugging Face: `eos_token_id` of generation_config.json and config.json. GGUF: the eos, eot and
    eom keys, and control tokens with a well-known end name (files often lack the keys).
    Raises ModelError if a file gives something that is not a token id.
    """
    if checkpoint.format == "gguf":
        found = [*_from_keys(checkpoint, checkpoint.metadata, GGUF_KEYS), *_named(checkpoint)]
    else:
        keys = ("eos_token_id",)
        found = [
            *_from_keys(checkpoint, checkpoint.generation, keys),
            *_from_keys(checkpoint, checkpoint.metadata, keys),
        ]
    return tuple(sorted(set(found)))


def _from_keys(
    checkpoint: Checkpoint, values: Mapping[str, Any], keys: Iterable[str]
) -> Iterable[int]:
    for key in keys:
        value = values.get(key)
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or token_id < 0:
                raise ModelError(f"{checkpoint.path}: {key!r} is {value!r}, not a token id")
            yield token_id


def _named(checkpoint: Checkpoint) -> Iterable[int]:
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    types = checkpoint.metadata.get("tokenizer.ggml.token_type")
    if tokens is None or types is None:
        return []
    if not isinstance(tokens, StringArray) or np.shape(types) != (len(tokens),):
        raise ModelError(f"{checkpoint.path}: the vocabulary's tokens and types do not match")
    # Only control tokens are decoded: a vocabulary has some hundred thousand others.
    control = np.flatnonzero(np.asarray(types) == CONTROL).tolist()
    return [token_id for token_id in control if tokens[token_id] in END_NAMES]
