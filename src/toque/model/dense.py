"""One decoder for all dense models: Llama, Mistral, Qwen2 and Qwen3 differ in options only.

Owns: the weights. Knows: the order of the layers. Does not know: file formats, names of tensors,
sequences, sampling, whose pages it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from toque.kernels.api import (
    QKV,
    Floats,
    ForwardBatch,
    LayerKV,
    Matrix,
    Ops,
    PagedKV,
    RopeTable,
    WeightSource,
)
from toque.layers.attention import Attention
from toque.layers.embedding import Embedding
from toque.layers.ffn import FeedForward
from toque.layers.linear import Linear
from toque.layers.norm import RmsNorm
from toque.layers.rope import rope_table
from toque.model.weights import Weights
from toque.types import ModelSpec, StoredTensor


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: attention and feed-forward, each behind its norm and around the residual."""

    attention_norm: RmsNorm
    attention: Attention
    ffn_norm: RmsNorm
    ffn: FeedForward

    def __call__(self, x: Floats, batch: ForwardBatch, kv: LayerKV) -> Floats:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = self.attention(self.attention_norm(x), x, batch, kv)
        return self.ffn(self.ffn_norm(x), x)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.attention.matrices + self.ffn.matrices


@dataclass(frozen=True, slots=True)
class DenseDecoder:
    """A model ready to run; frozen, so that several batches may be in flight."""

    spec: ModelSpec
    ops: Ops
    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: RmsNorm
    head: Linear  # [vocab, hidden]

    def kv_specs(self, dtype: str) -> list[PagedKV]:
        """The memory each layer asks for, in the order in which `forward` takes it."""
        return [block.attention.kv_spec(dtype) for block in self.blocks]

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Floats:
        """Logits of batch.output_rows: [outputs, vocab]. Writes every token's K and V into `kv`."""
        return self.logits(self.hidden(batch, kv))

    def hidden(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Floats:
        """`forward` without the head: the normed states of batch.output_rows, [outputs, hidden]."""
        x = self.embedding(batch.ids)  # [tokens, hidden]
        for block, pages in zip(self.blocks, kv, strict=True):
            x = block(x, batch, pages)
        return self.norm(self.ops.output_rows(x, batch))

    def logits(self, hidden: Floats) -> Floats:
        """[rows, hidden] -> [rows, vocab]."""
        return self.head(hidden)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those that one step reads whole; of the embedding only rows are read, so its table
        counts only where it is the head too."""
        return (*chain.from_iterable(block.matrices for block in self.blocks), self.head.weight)

    @property
    def weight_bytes(self) -> int:
        """What one step reads of its matrices, as they are packed."""
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def weight_count(self) -> int:
        """The weights in those bytes: each takes one multiply-add per token."""
        return sum(math.prod(matrix.shape) for matrix in self.matrices)


def build_dense(
    spec: ModelSpec,
    weights: Weights,
    ops: Ops,
    max_model_len: int,
    source: WeightSource | None = None,
) -> DenseDecoder:
    """Give each weight to its layer in the form that the kernel set wants.

    `max_model_len` (tokens) sizes the rotary table; weights are taken from `source`, or else from
    `ops` itself. Raises ModelError for a kind of weight that the kernel set does not know.
    """
    source = source or ops
    rope = rope_table(spec.rope, spec.head_dim, max_model_len)
    table = source.matrix(weights.top["embedding"])
    head = table if spec.tied_embeddings else source.matrix(weights.top["head"])
    return DenseDecoder(
        spec=spec,
        ops=ops,
        embedding=Embedding(ops, table),
        blocks=tuple(_Parts(spec, ops, source, layer).block(rope) for layer in weights.layers),
        norm=RmsNorm(ops, source.vector(weights.top["norm"]), spec.rms_eps),
        head=Linear(ops, head),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The weights of one layer on their way into a Block."""

    spec: ModelSpec
    ops: Ops
    source: WeightSource
    weights: Mapping[str, StoredTensor]

    def block(self, rope: RopeTable) -> Block:
        return Block(
            attention_norm=self.norm("attention_norm"),
            attention=Attention(self.ops, self.qkv(), self.linear("output"), rope),
            ffn_norm=self.norm("ffn_norm"),
            ffn=FeedForward(self.ops, self.linear("gate"), self.linear("up"), self.linear("down")),
        )

    def qkv(self) -> QKV:
        return QKV(
            query=self.matrix("query"),
            key=self.matrix("key"),
            value=self.matrix("value"),
            query_bias=self.vector("query_bias"),
            key_bias=self.vector("key_bias"),
            value_bias=self.vector("value_bias"),
            query_norm=self.vector("query_norm"),
            key_norm=self.vector("key_norm"),
            norm_eps=self.spec.rms_eps,
            head_dim=self.spec.head_dim,
        )

    def matrix(self, role: str) -> Matrix:
        return self.source.matrix(self.weights[role])

    def vector(self, role: str) -> Floats | None:
        """None where the spec has no such weight: `bind` left it out."""
        return self.source.vector(self.weights[role]) if role in self.weights else None

    def linear(self, role: str) -> Linear:
        return Linear(self.ops, self.matrix(role), self.vector(f"{role}_bias"))

    def norm(self, role: str) -> RmsNorm:
        return RmsNorm(self.ops, self.source.vector(self.weights[role]), self.spec.rms_eps)
