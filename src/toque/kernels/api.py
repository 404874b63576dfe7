"""The operations that layers are made of: one contract for every kernel set.

Owns: nothing. Knows: shapes, dtypes and who writes what. Does not know: models, schedulers.

A kernel set (`kernels/ref`, `kernels/cpu`, later `kernels/triton`) implements `Ops`; `select()` in
`kernels/__init__.py` returns one. Layers call these and nothing else on arrays, so that one layer
file serves every device. Ops are coarse where fusing pays: what a set can do in one pass over
memory is one op here.

Contract for every op: float32 in and out unless said; inputs are not changed; a row of the result
depends on that row of the input only, and in the `cpu` set its bits do not depend on how many other
rows there are, on threads, nor on how a sequence was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from toque.types import Logprob, RowSetup, Sampled, StoredTensor, TokenId

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]


class Matrix(Protocol):
    """A weight matrix [out, in] in the form that its kernel set wants."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Packing(Protocol):
    """A kernel set's matrices as bytes: how they go to a file and come back with no work."""

    @property
    def layout(self) -> str:
        """Changes whenever the bytes of the same matrix do."""

    def packed(self, matrix: Matrix) -> tuple[str, Bytes]:
        """Kind and bytes of a matrix; the view keeps it alive."""

    def matrix_of(self, kind: str, packed: Bytes, shape: tuple[int, ...]) -> Matrix:
        """The inverse, on those very bytes (at a multiple of 64), not copied."""

    def checksums(self, data: Bytes, begins: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """XXH64 of each part of `data`, which pages it in."""


class WeightSource(Protocol):
    """Where a model gets its weights, in the form that the kernel set wants; any Ops is one."""

    def matrix(self, tensor: StoredTensor) -> Matrix:
        """Take a [out, in] weight from a file. Raises ModelError for a kind it does not know."""

    def vector(self, tensor: StoredTensor) -> Floats:
        """Take a norm weight or a bias from a file, as float32 [n]."""


KV_NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1}
KV_SCALE_GROUP = 32  # neighbouring numbers of one key or value that share a scale; int8 only
KV_SCALE_BYTES = 2  # a bfloat16


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Memory that an attention layer asks for: what one token of one layer keeps."""

    kv_heads: int
    head_dim: int
    dtype: str  # a key of KV_NUMBER_BYTES

    @property
    def groups(self) -> int:
        """Scales of one key or value."""
        return -(-self.head_dim // KV_SCALE_GROUP) if self.dtype == "int8" else 0

    @property
    def leaves_bias_out(self) -> bool:
        """Whether keys are kept without their bias where they have one: a bias may be a hundred
        times larger than what it is added to, and would cost the rest its digits."""
        return KV_NUMBER_BYTES[self.dtype] == 1

    def bytes_per_token(self) -> int:
        """K and V of one layer, scales included."""
        numbers = self.head_dim * KV_NUMBER_BYTES[self.dtype]
        return 2 * self.kv_heads * (numbers + KV_SCALE_BYTES * self.groups)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The pages of one layer, as bytes: a page is one run of them, the same in every kernel set.

        page      | head 0 | head 1 | ...                               kv_heads times
        head      | keys | key scales | values | value scales |
        keys      [head_dim, block_size] numbers        key scales    [groups, block_size]
        values    [block_size, head_dim] numbers        value scales  [block_size, groups]

    Keys lie across so that neighbouring ones are multiplied together. Nothing is padded: numbers of
    several bytes may lie at any address. Numbers are little-endian: float32, float16, bfloat16
    (the upper half of a float32), int8, or fp8 E4M3 (sign, 4 bits of exponent, 3 of fraction; the
    largest is 448, to which larger ones are cut). An int8 is multiplied by its group's scale, a
    bfloat16. numpy has neither bfloat16 nor fp8: `kernels/ref/pages.py` shows them as uint16 and
    uint8, and reads and writes all of them.
    """

    pages: NDArray[np.uint8]  # [pages, block_size * spec.bytes_per_token()]
    spec: PagedKV
    block_size: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's tokens, chunk after chunk. `chunks` sequences, `tokens` tokens in all.

    Chunk c owns tokens chunk_starts[c] : chunk_starts[c + 1]; its last token stands at position
    context_lens[c] - 1; a token at position p sees the keys at positions 0..p of its own sequence.
    """

    ids: Ints  # [tokens]
    positions: Ints  # [tokens]
    chunk_starts: Ints  # [chunks + 1]
    context_lens: Ints  # [chunks]
    page_table: Ints  # [chunks, most pages of any chunk]; unused places are 0
    write_at: NDArray[np.int64]  # [tokens]: page * block_size + offset of this token's K and V
    output_rows: Ints  # [outputs]: indices of the tokens whose logits are wanted


@dataclass(frozen=True, slots=True)
class Decode:
    """The commonest step as it comes: one more token for each of n rows, in lists, since numpy's
    small arrays cost more than a short native loop. n >= 1."""

    ids: list[int]  # [n]: the tokens to be computed
    rows: list[int]  # [n] of the worker's state, each once
    positions: list[int]  # [n] of those tokens
    page_table: Ints  # [rows of the state, most pages]
    block_size: int

    def batch(self) -> ForwardBatch:
        """The same as arrays; every token has an output."""
        n, pages = len(self.ids), self.page_table[self.rows]
        positions = np.array(self.positions, dtype=np.int32)
        page = pages[np.arange(n), positions // self.block_size].astype(np.int64)
        return ForwardBatch(
            ids=np.array(self.ids, dtype=np.int32),
            positions=positions,
            chunk_starts=np.arange(n + 1, dtype=np.int32),
            context_lens=positions + np.int32(1),
            page_table=pages,
            write_at=page * self.block_size + positions % self.block_size,
            output_rows=np.arange(n, dtype=np.int32),
        )


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotation of dimension pair (i, i + head_dim/2) at each position (the "NeoX" pairing)."""

    cos: Floats  # [positions, head_dim / 2]
    sin: Floats  # [positions, head_dim / 2]


@dataclass(frozen=True, slots=True)
class QKV:
    """The input side of attention. Biases and norms are None where the model has none."""

    query: Matrix  # [heads * head_dim, hidden]
    key: Matrix  # [kv_heads * head_dim, hidden]
    value: Matrix  # [kv_heads * head_dim, hidden]
    query_bias: Floats | None
    key_bias: Floats | None
    value_bias: Floats | None
    query_norm: Floats | None  # [head_dim], RMS norm per head before the rotation
    key_norm: Floats | None
    norm_eps: float
    head_dim: int

    def bias_left_out(self, spec: PagedKV) -> Floats | None:
        """The key bias, if pages of this kind hold keys without it: [kv_heads * head_dim]. A norm
        comes after the bias, so that the two cannot be told apart any more."""
        apart = spec.leaves_bias_out and self.key_norm is None
        return self.key_bias if apart else None


@dataclass(frozen=True, slots=True)
class RotatedBias:
    """What pages leave out of each key: a bias, rotated by the key's position. The table's angles
    must be proportional to the position (the kinds of layers/rope.py all are)."""

    bias: Floats  # [kv_heads * head_dim]
    rope: RopeTable


class Recorded(Protocol):
    """A forward pass that was written down, see `Ops.record`."""

    def run(self, batch: ForwardBatch) -> Floats:
        """What the recorded calls return for this batch. The array is theirs and holds until the
        next run."""

    def decode(self, step: Decode, sampler: Sampler, known: int) -> list[Sampled]:
        """`run`, and `sampler.sample` of what it returns, in one call: for rows that may choose any
        token. Logits from `known` on are padding. A sampler of the same Ops."""


Mask = NDArray[np.uint32]  # [words]: token i is allowed where bit i % 32 of word i // 32 is set

NOTHING_LEFT = "the request forbids every token that could follow"


class Sampler(Protocol):
    """From rows of logits to tokens. A row's choice is a function of its logits, parameters,
    history, seed, choice, position and mask alone; ties go to the lower id."""

    def set_up(self, setup: RowSetup) -> None:
        """A sequence takes the row setup.row; what was there is forgotten."""

    def sample(
        self,
        logits: Floats,  # [n, vocab]
        rows: Sequence[int],  # of the worker's state; n different ones
        positions: Sequence[int],  # at which each row's token will stand
        masks: Sequence[Mask | None],  # what has no bit set, or lies beyond the end, is forbidden
    ) -> list[Sampled]:
        """One entry per row, in order: its token, or the reason why it failed. A token that was
        chosen counts for the row's penalties from then on."""

    def score(
        self, logits: Floats, targets: Sequence[TokenId], num_top: int
    ) -> list[Logprob | None]:
        """Logprobs of given tokens, one per row of logits [n, vocab], and of the `num_top` best;
        None where the logits are not numbers. Changes nothing."""


class Ops(Protocol):
    """See the module's docstring for the contract that holds for all of them."""

    name: str  # "ref" or "cpu/avx2/a14": part of the fingerprint
    packing: Packing | None  # None: this set's matrices are made anew at each start

    def matrix(self, tensor: StoredTensor) -> Matrix:
        """Take a [out, in] weight from a file. Raises ModelError for a kind it does not know."""

    def vector(self, tensor: StoredTensor) -> Floats:
        """Take a norm weight or a bias from a file, as float32 [n]."""

    def kv_pages(self, specs: Sequence[PagedKV], num_pages: int, block_size: int) -> list[LayerKV]:
        """Allocate the KV pool, one entry per layer. Pages are not touched until written."""

    def embed(self, table: Matrix, ids: Ints) -> Floats:
        """Rows of the table: [tokens, hidden]."""

    def rms_norm(self, x: Floats, weight: Floats, eps: float) -> Floats:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467)."""

    def linear(self, x: Floats, weight: Matrix, bias: Floats | None = None) -> Floats:
        """x @ weight.T + bias: [rows, in] -> [rows, out]."""

    def linear_add(
        self, x: Floats, weight: Matrix, bias: Floats | None, residual: Floats
    ) -> Floats:
        """residual + linear(x, weight, bias): the way back into the residual stream."""

    def gate_up_silu(
        self,
        x: Floats,
        gate: Matrix,
        up: Matrix,
        gate_bias: Floats | None = None,
        up_bias: Floats | None = None,
    ) -> Floats:
        """silu(x @ gate.T + gate_bias) * (x @ up.T + up_bias).

        [rows, in] -> [rows, intermediate]; biases are [intermediate].
        """

    def qkv_rope_write(
        self, x: Floats, qkv: QKV, rope: RopeTable, batch: ForwardBatch, kv: LayerKV
    ) -> Floats:
        """Project, norm and rotate; writes K and V into `kv` at batch.write_at, K without
        `qkv.bias_left_out(kv.spec)`; returns the rotated queries [tokens, heads, head_dim]. The
        only op that changes an argument."""

    def attention(
        self,
        q: Floats,
        kv: LayerKV,
        batch: ForwardBatch,
        scale: float,
        left_out: RotatedBias | None = None,
    ) -> Floats:
        """Causal attention of every token over its own sequence's pages, its own chunk's keys
        included (they have been written): [tokens, heads * head_dim]. Query head h uses KV head
        h // (heads / kv_heads) (grouped-query attention, arXiv:2305.13245). `left_out` is added to
        every key: what `qkv_rope_write` did not write (`QKV.bias_left_out`)."""

    def sampler(self, num_rows: int) -> Sampler:
        """For the rows 0 .. num_rows - 1 of a worker's state."""

    def output_rows(self, x: Floats, batch: ForwardBatch) -> Floats:
        """Rows batch.output_rows of x: [tokens, n] -> [outputs, n]."""

    def record(self, trace: Callable[[Ops, ForwardBatch], Floats]) -> Recorded:
        """Call `trace` once with Ops that write down what they are asked for, and a batch that
        stands for all batches; later runs do the same for others, with the same bits. `trace` must
        hand results from op to op as they are. A set that has no programs calls `trace` anew for
        each batch."""
