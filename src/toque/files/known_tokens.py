"""How many of a model's logits stand for tokens: matrices are padded beyond the vocabulary.

Qwen2.5 has 151,936 rows and 151,665 tokens. A padded row has no text and was never trained, so it
may not be chosen, however large its logit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from toque.files.checkpoint import Checkpoint
from toque.files.mapping import read_json_object

UNUSED = 5  # GGUF's token type for places that pad the vocabulary


def known_tokens(checkpoint: Checkpoint, vocab_size: int) -> int:
    """Ids from here on are padding; `vocab_size` where the files do not say.

    Raises ModelError for a tokenizer file that is damaged.
    """
    if checkpoint.format == "gguf":
        used = np.asarray(checkpoint.metadata.get("tokenizer.ggml.token_type", [])) != UNUSED
        return int(np.flatnonzero(used)[-1]) + 1 if used.any() else vocab_size
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    path = folder / "tokenizer.json"
    if not path.is_file():
        return vocab_size
    return min(vocab_size, _highest_id(read_json_object(path)) + 1)


def _highest_id(tokenizer: dict[str, Any]) -> int:
    """Of tokenizer.json: BPE and WordPiece list `vocab` by token, Unigram in order."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = (token["id"] for token in tokenizer.get("added_tokens", ()))
    return max((*ids, *added), default=-1)
