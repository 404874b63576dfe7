"""llama.cpp's KL divergence on the same file, tokens and reference as ours.

llama-perplexity compares against a file of log probabilities, which it usually writes itself from
an unquantized model. Here that file is written from our float32 reference, so that both engines are
judged by one ruler: the same weights in float32. The format (llama.cpp, tools/perplexity), numbers
little-endian:

    "_logits_" | context, vocabulary, chunks: int32 | chunks * context token ids: int32
    per chunk, for positions context/2 .. context - 2, one row:
        step: float32 | least: float32 | vocabulary values: uint16, one more if that is odd
    log probability of a token = least + step * value; what is below e^-16 of the likeliest is lost

Only the second half of the context is scored. The 16 bits cost some accuracy; ours is therefore
compared with the same rounded rows where the two stand side by side (`kl_by_row`).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.divergence import SLICE_ROWS, Doubles, Logits, log_softmax

MAGIC = b"_logits_"
RANGE_NATS = 16.0  # logits further below the best one are lost
LEVELS = 65535
BATCH_TOKENS = 512


def scored_positions(num_tokens: int) -> range:
    """Those whose next token is known and that have half the text before them."""
    return range(num_tokens // 2, num_tokens - 1)


def rounded(logits: Logits) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
    """Rows as the file keeps them: (step, least) [rows, 2] and values [rows, vocab]."""
    log_p = log_softmax(logits)
    most = log_p.max(axis=-1, keepdims=True)  # [rows, 1]
    least = np.maximum(log_p.min(axis=-1, keepdims=True), most - RANGE_NATS)
    step = ((most - least) / LEVELS).astype(np.float32)
    values = np.rint((np.maximum(log_p, least) - least) / np.where(step == 0, 1, step))
    return (
        np.concatenate([step, least.astype(np.float32)], axis=-1),
        np.minimum(values, LEVELS).astype(np.uint16),
    )


def write_base(path: Path, tokens: Sequence[int], reference: Logits) -> None:
    """One chunk that is the whole text. `reference` is [tokens, vocab] and may be mapped."""
    vocab = reference.shape[1]
    positions = scored_positions(len(tokens))
    with path.open("wb") as out:
        out.write(MAGIC)
        np.array([len(tokens), vocab, 1, *tokens], dtype="<i4").tofile(out)
        for begin in range(positions.start, positions.stop, SLICE_ROWS):
            rows = reference[begin : min(begin + SLICE_ROWS, positions.stop)]
            scale, values = rounded(rows)
            packed = np.zeros((len(rows), 4 + 2 * ((vocab + 1) // 2)), dtype="<u2")
            packed[:, :4] = scale.astype("<f4").view("<u2")
            packed[:, 4 : 4 + vocab] = values
            packed.tofile(out)


def kl_by_row(reference: Logits, other: Logits) -> Doubles:
    """KL divergence as llama-perplexity counts it, from the rounded rows: [rows]."""
    scale, values = rounded(reference)
    log_p = scale[:, :1].astype(np.float64) * values + scale[:, 1:]  # [rows, vocab]
    p = np.where(log_p > -RANGE_NATS, np.exp(log_p), 0.0)
    out: Doubles = (p * (log_p - log_softmax(other))).sum(axis=-1)
    return out


def run_llama(
    binary: Path, model: Path, base: Path, num_tokens: int, kv_dtype: str, threads: int
) -> float:
    """Mean KL divergence that llama-perplexity prints. Raises RuntimeError with the end of its
    output if it prints none."""
    flags = {
        "-m": model,
        "-c": num_tokens,
        "-b": BATCH_TOKENS,
        "-t": threads,
        "-fa": "on",
        "-ctk": kv_dtype,
        "-ctv": kv_dtype,
        "--kl-divergence-base": base,
    }
    argv = [str(binary), *(str(part) for flag in flags.items() for part in flag)]
    done = subprocess.run(
        [*argv, "--kl-divergence"], capture_output=True, text=True, errors="replace", check=False
    )
    found = list(mean_kl_lines(done.stdout + done.stderr))
    if done.returncode or not found:
        raise RuntimeError(f"{binary.name} printed no KL:\n{(done.stdout + done.stderr)[-2000:]}")
    return found[-1]


def mean_kl_lines(output: str) -> Iterator[float]:
    for match in re.finditer(r"^Mean\s+KLD:\s*(-?[\d.eE+-]+)", output, re.MULTILINE):
        yield float(match[1])
