"""Tiny random transformers models as oracles, and a helper that feeds prompts to our decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from toque.files.checkpoint import open_checkpoint
from toque.kernels import select
from toque.kernels.api import Floats, ForwardBatch, LayerKV
from toque.model.dense import DenseDecoder
from toque.model.registry import load_model, model_spec

COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def tiny_model(config_class: str, seed: int = 0, **options: Any) -> Any:
    """A random model whose every weight matters: transformers starts biases at 0 and norms at 1,
    which would hide a weight that is not applied, and matrices so small that logits hardly differ.
    """
    config = getattr(transformers, config_class)(**{**COMMON, **options})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5.0)
            else:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def hf_logits(model: Any, ids: Sequence[int]) -> Floats:
    """Teacher-forced, the whole prompt in one forward: [tokens, vocab].

    On one thread: the first forward of a process on several was once off by 1e-4 from the second
    position on, in torch (ours had the bits that it always has, a float64 forward's to 3e-6)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            logits: Floats = model(torch.tensor([list(ids)])).logits[0].numpy()
    finally:
        torch.set_num_threads(threads)
    return logits


def prompt(length: int, vocab_size: int = COMMON["vocab_size"], seed: int = 3) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(3, vocab_size, length)]


def load(path: Path, max_model_len: int = 128, load_format: str = "auto") -> DenseDecoder:
    checkpoint = open_checkpoint(path, load_format)
    return load_model(checkpoint, model_spec(checkpoint), select("ref"), max_model_len)


@dataclass
class Pages:
    """A KV pool and the page lists of a few sequences in it, in an order that is not sorted."""

    kv: list[LayerKV]
    tables: np.ndarray  # [sequences, pages per sequence]
    block_size: int

    @classmethod
    def of(cls, model: DenseDecoder, sequences: int, max_tokens: int, block_size: int) -> Pages:
        each = -(-max_tokens // block_size)
        order = np.random.default_rng(7).permutation(sequences * each)
        kv = select("ref").kv_pages(model.kv_specs("float32"), sequences * each, block_size)
        for layer in kv:  # whatever is read before it is written shows
            layer.pages.view(np.float32)[:] = np.nan
        return cls(kv, order.reshape(sequences, each).astype(np.int32), block_size)

    def batch(
        self, chunks: Sequence[tuple[int, int, Sequence[int]]], rows: Sequence[int] | None = None
    ) -> ForwardBatch:
        """chunks: (sequence, start, tokens). rows: None = the logits of every token."""
        positions = [np.arange(start, start + len(tokens)) for _, start, tokens in chunks]
        write_at = [
            self.tables[sequence][where // self.block_size] * self.block_size
            + where % self.block_size
            for (sequence, _, _), where in zip(chunks, positions, strict=True)
        ]
        lengths = [len(tokens) for _, _, tokens in chunks]
        outputs = np.arange(sum(lengths)) if rows is None else np.array(rows)
        return ForwardBatch(
            ids=np.concatenate([tokens for _, _, tokens in chunks]).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            chunk_starts=np.cumsum([0, *lengths]).astype(np.int32),
            context_lens=np.array([start + len(t) for _, start, t in chunks], np.int32),
            page_table=self.tables[[sequence for sequence, _, _ in chunks]],
            write_at=np.concatenate(write_at).astype(np.int64),
            output_rows=outputs.astype(np.int32),
        )


def our_logits(
    model: DenseDecoder, ids: Sequence[int], cuts: Sequence[int] = (), block_size: int = 16
) -> Floats:
    """The prompt in one forward, or in several that begin at `cuts`: [tokens, vocab]."""
    pages = Pages.of(model, 1, len(ids), block_size)
    edges = [0, *cuts, len(ids)]
    parts = [
        model.forward(pages.batch([(0, start, ids[start:end])]), pages.kv)
        for start, end in pairwise(edges)
    ]
    return np.concatenate(parts)


def assert_close(ours: Floats, theirs: Floats, relative: float = 1e-4) -> None:
    """Largest difference over the largest logit: a mismatch in any row shows."""
    assert ours.shape == theirs.shape
    assert ours.dtype == np.float32
    spread = float(np.abs(theirs).max())
    assert spread > 0.5, "the oracle's logits are too flat to tell anything"
    assert float(np.abs(ours - theirs).max()) <= relative * spread
