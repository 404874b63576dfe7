"""What a model is made of: its structure, and its tensors as they lie in a file.

Owns: nothing. Knows: dimensions, Hugging Face's and GGUF's names. Does not know: kernels, files.

These stand beside the values of `types.py`, which exports them too: import them from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from toque.telemetry import Wire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RopeSpec(Wire, frozen=True, kw_only=True):
    """Rotary embedding. `kind`: default, linear, dynamic, llama3 or yarn (names of Hugging Face).

    `parameters` keeps the scaling numbers under Hugging Face's config names (factor,
    original_max_position_embeddings, low_freq_factor, high_freq_factor, beta_fast, beta_slow,
    attention_factor, mscale, mscale_all_dim).
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, float] = msgspec.field(default_factory=dict)
    frequency_factors: tuple[float, ...] = ()  # GGUF's rope_freqs tensor: divides each frequency


class ModelSpec(Wire, frozen=True, kw_only=True):
    """A dense decoder's structure, from whichever file format. Dimensions in elements."""

    architecture: str  # llama, qwen2, qwen3, mistral
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rms_eps: float
    rope: RopeSpec
    context: int  # trained context, tokens
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in a file: still packed, mapped and not read yet.

    `kind` is GGUF's type name (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K);
    safetensors' types use the same names. `shape` is in numpy order: [out, in] for a matrix.
    Rows (the last axis) are contiguous byte runs, so rows may be selected or permuted while packed.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    stored: NDArray[np.uint8]  # [bytes], read-only view of the mapping
    order: NDArray[np.int64] | None = None  # [rows]: which stored row each row is; None = as stored

    @property
    def data(self) -> NDArray[np.uint8]:  # [bytes]
        """The packed bytes; a copy where rows are in another order than stored."""
        if self.order is None:
            return self.stored
        rows: NDArray[np.uint8] = self.stored.reshape(self.shape[0], -1)[self.order]
        return rows.reshape(-1)

    def permute_rows(self, order: NDArray[np.int64]) -> StoredTensor:
        """The same tensor with its first axis in another order; nothing is read yet."""
        combined = order if self.order is None else self.order[order]
        return StoredTensor(self.name, self.kind, self.shape, self.stored, combined)
