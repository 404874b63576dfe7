"""Types of the compiled extension (csrc/bind.cpp). Shapes are those of `kernels/api.py`'s ops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toque.kernels.api import Floats, Ints, Mask

LAYOUT: int  # of `Matrix.packed`: bytes that were packed under another number are not these
ISAS: tuple[str, ...]  # instruction sets that were compiled and that this machine has, best first

class Matrix:
    """A weight matrix [out, in], packed as csrc/layout.h draws it. Immutable."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def packed(self) -> NDArray[np.uint8]:
        """[nbytes], a read-only view that keeps the matrix alive; for `Backend.matrix_of`."""

class Backend:
    """A thread pool and the kernels of one instruction set; results go into the last arguments."""

    def __init__(self, threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def set_threads(self, threads: int) -> None: ...
    def multiply_adds(self, rounds: int) -> float:
        """Does nothing but the integer products' own instruction, and says how many
        multiplications and additions that were: a ceiling, for `bench.ops`."""

    def pack(self, kind: str, data: NDArray[np.uint8], rows: int, columns: int) -> Matrix: ...
    def matrix_of(self, kind: str, packed: NDArray[np.uint8], out: int, in_: int) -> Matrix:
        """A matrix on the bytes of another's `packed`, not copied but kept alive. ValueError
        unless they have the size of that kind and shape and lie on a multiple of 64."""

    def checksums(
        self, data: NDArray[np.uint8], begins: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> list[int]:
        """XXH64, seed 0, of data[begin : begin + size] for each part."""

    def dequantize(self, kind: str, data: NDArray[np.uint8], result: Floats) -> None: ...
    def embed(self, table: Matrix, ids: Ints, result: Floats) -> None: ...
    def rms_norm(self, x: Floats, weight: Floats, eps: float, result: Floats) -> None: ...
    def linear(
        self,
        x: Floats,
        weight: Matrix,
        bias: Floats | None,
        residual: Floats | None,
        result: Floats,
    ) -> None: ...
    def linear3(
        self,
        x: Floats,
        a: Matrix,
        b: Matrix,
        c: Matrix,
        bias_a: Floats | None,
        bias_b: Floats | None,
        bias_c: Floats | None,
        to_a: Floats,
        to_b: Floats,
        to_c: Floats,
    ) -> None: ...
    def gate_up_silu(
        self,
        x: Floats,
        gate: Matrix,
        up: Matrix,
        gate_bias: Floats | None,
        up_bias: Floats | None,
        result: Floats,
    ) -> None: ...
    def rope_write(
        self,
        query: Floats,
        key: Floats,
        value: Floats,
        query_norm: Floats | None,
        key_norm: Floats | None,
        norm_eps: float,
        cos: Floats,
        sin: Floats,
        positions: Ints,
        write_at: NDArray[np.int64],
        type: str,
        block_size: int,
        pages: NDArray[np.uint8],
    ) -> None: ...
    def attention(
        self,
        q: Floats,
        type: str,
        kv_heads: int,
        block_size: int,
        pages: NDArray[np.uint8],
        positions: Ints,
        chunk_starts: Ints,
        context_lens: Ints,
        page_table: Ints,
        scale: float,
        key_bias: Floats | None,
        cos: Floats | None,
        sin: Floats | None,
        result: Floats,
    ) -> None: ...
    def run(
        self,
        recording: Recording,
        ids: Ints,
        positions: Ints,
        chunk_starts: Ints,
        context_lens: Ints,
        page_table: Ints,
        write_at: NDArray[np.int64],
        output_rows: Ints,
        result: Floats,
    ) -> None: ...
    def decode(
        self,
        recording: Recording,
        ids: list[int],
        rows: list[int],
        positions: list[int],
        page_table: Ints,
        result: Floats,
        samplers: list[RowSampler | None],
        known: int,
    ) -> list[Chosen]:
        """`run` for one more token of each row, then `sample` without masks; logits from `known` on
        are padding."""

    def sample(
        self,
        logits: Floats,
        samplers: list[RowSampler | None],
        positions: list[int],
        masks: list[Mask | None],
    ) -> list[Chosen]:
        """One per row; the samplers remember the tokens."""

    def score(self, logits: Floats, targets: list[int], num_top: int) -> list[Logprobs | None]: ...

# chosen, rank, ((token, logprob), ...)
Logprobs = tuple[float, int, tuple[tuple[int, float], ...]]
Chosen = tuple[int, int, Logprobs | None]  # outcome, token

def uniform(seed: int, choice: int, position: int) -> float: ...

class RowSampler:
    """The sampling state of one row."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        choice: int,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        logit_bias: Sequence[tuple[int, float]],
        allowed: Sequence[int],
        never: Sequence[int],
        spelled: Sequence[Sequence[int]],
        end_ids: Sequence[int],
        num_prompt: int,
        min_tokens: int,
        logprobs: int | None,
        history: Sequence[int],
    ) -> None: ...

class Recording:
    """A forward pass that is written down call by call, then run (`Backend.run`) for one batch
    after another. Values are numbers that these methods return; what they are given lives as long
    as this. ValueError where widths do not fit, and from the first `finish` on."""

    def __init__(self) -> None: ...
    def embed(self, table: Matrix) -> int: ...
    def output_rows(self, x: int) -> int: ...
    def rms_norm(self, x: int, weight: Floats, eps: float) -> int: ...
    def linear(self, x: int, weight: Matrix, bias: Floats | None, residual: int | None) -> int: ...
    def gate_up_silu(
        self,
        x: int,
        gate: Matrix,
        up: Matrix,
        gate_bias: Floats | None,
        up_bias: Floats | None,
    ) -> int: ...
    def qkv_rope_write(
        self,
        x: int,
        query: Matrix,
        key: Matrix,
        value: Matrix,
        query_bias: Floats | None,
        key_bias: Floats | None,
        value_bias: Floats | None,
        query_norm: Floats | None,
        key_norm: Floats | None,
        norm_eps: float,
        cos: Floats,
        sin: Floats,
        type: str,
        block_size: int,
        pages: NDArray[np.uint8],
        head_dim: int,
    ) -> int: ...
    def attention(
        self,
        q: int,
        type: str,
        kv_heads: int,
        block_size: int,
        pages: NDArray[np.uint8],
        head_dim: int,
        scale: float,
        key_bias: Floats | None,
        cos: Floats | None,
        sin: Floats | None,
    ) -> int: ...
    def finish(self, result: int) -> None: ...
    def width(self, value: int) -> int: ...
    def is_per_output(self, value: int) -> bool: ...
