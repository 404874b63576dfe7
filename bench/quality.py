"""`python -m bench.quality`: what packed kernels and a smaller KV cache cost in accuracy.

The logits at every position of a fixed text (bench/quality_text.txt, one sequence) are compared
with a float32 reference: the same file's weights dequantized, plain numpy, float32 keys and values.
Mean KL divergence in nats, how often the likeliest token is the same, the largest difference of a
logit; for each type of KV cache, with its bytes per token. The reference is computed once and kept
in a temporary file (vocabulary x 4 bytes per token: 1.2 GB for the default model).

With --llama-perplexity, llama.cpp's KL against the same reference over the second half of the text,
and ours over the same positions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.divergence import SLICE_ROWS, Divergence, Logits
from bench.forward import kv_bytes_per_token, logits_by_chunk
from bench.llama_kl import kl_by_row, run_llama, scored_positions, write_base
from bench.machine import describe_machine
from bench.ops import kv_dtypes
from bench.reference import cache_folder, reference_logits
from toque.build import Loaded, load
from toque.files.checkpoint import open_checkpoint
from toque.files.fetch import locate
from toque.kernels import physical_cores
from toque.options import EngineOptions
from toque.serve.tokenizer import load_tokenizer

TEXT = Path(__file__).parent / "quality_text.txt"
LLAMA_KV = "f16"  # its default


@dataclass(frozen=True, slots=True)
class Quality:
    """One KV cache type. KL in nats per token; `late` is over the second half of the text, whose
    tokens attend to the most keys, `rounded` the same against llama.cpp's rounded reference."""

    kv_cache_dtype: str
    kv_bytes_per_token: int
    mean_kl: float
    late_kl: float
    top1_agreement: float
    max_logit_difference: float
    late_rounded_kl: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    path = locate(options.model).path
    checkpoint = open_checkpoint(path)
    tokens = load_tokenizer(checkpoint).encode(TEXT.read_text())[: options.tokens]
    folder = options.cache or cache_folder()
    reference = reference_logits(path, checkpoint.identity, tokens, folder)
    threads = options.threads or physical_cores()
    engine = EngineOptions(kernels=options.kernels, threads=threads, max_model_len=len(tokens))
    loaded = load(path, engine)
    llama: Path | None = options.llama_perplexity
    rows = []
    for dtype in options.kv_cache_dtype:
        rows.append(judge(loaded, tokens, reference, dtype, rounded=llama is not None))
        print(f"{dtype}: KL {rows[-1].mean_kl:.3g}", file=sys.stderr)
    llama_kl = None if llama is None else judge_llama(llama, path, tokens, reference, threads)
    show(f"{path.name}, {loaded.ops.name}, {len(tokens)} tokens", rows, llama_kl)
    print(
        json.dumps(
            {
                "bench": "quality",
                "model": path.name,
                "identity": checkpoint.identity,
                "kernels": loaded.ops.name,
                "tokens": len(tokens),
                "kv": [asdict(row) for row in rows],
                "llama": None if llama_kl is None else {"kv": LLAMA_KV, "late_kl": llama_kl},
                "machine": describe_machine(),
            }
        )
    )
    return 0


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    out.add_argument("model", nargs="?", default="qwen2.5-coder-0.5b", help="file, folder or name")
    out.add_argument("--kernels", default="auto", help="what is judged: auto (cpu), cpu or ref")
    out.add_argument("--kv-cache-dtype", nargs="+", default=kv_dtypes(), help="[all there are]")
    out.add_argument("--threads", type=int, help="[the physical cores]")
    out.add_argument("--tokens", type=int, help="only the first ones of the text [all]")
    out.add_argument("--cache", type=Path, help="folder of the reference [a temporary one]")
    out.add_argument("--llama-perplexity", type=Path, help="llama.cpp's program, to compare with")
    return out


def judge(
    loaded: Loaded, tokens: Sequence[int], reference: Logits, dtype: str, *, rounded: bool
) -> Quality:
    """Run the whole text with one type of KV cache. `rounded`: compare with llama.cpp's rows too
    (see bench/llama_kl.py)."""
    divergence = Divergence()
    late = scored_positions(len(tokens))
    late_rounded: list[float] = []
    for positions, logits in logits_by_chunk(loaded.model, loaded.ops, tokens, dtype):
        expected = np.asarray(reference[positions])
        divergence.add(expected, logits)
        first = max(late.start - positions.start, 0)
        for begin in range(first, late.stop - positions.start, SLICE_ROWS) if rounded else ():
            rows = slice(begin, min(begin + SLICE_ROWS, late.stop - positions.start))
            late_rounded.extend(kl_by_row(expected[rows], logits[rows]).tolist())
    return Quality(
        kv_cache_dtype=dtype,
        kv_bytes_per_token=kv_bytes_per_token(loaded.model, dtype),
        mean_kl=divergence.mean_kl,
        late_kl=float(np.mean(divergence.kl[late.start : late.stop])),
        top1_agreement=divergence.top1_agreement,
        max_logit_difference=divergence.max_logit_difference,
        late_rounded_kl=float(np.mean(late_rounded)) if rounded else None,
    )


def judge_llama(
    binary: Path, model: Path, tokens: Sequence[int], reference: Logits, threads: int
) -> float:
    """llama.cpp's mean KL over the second half. Raises RuntimeError with what it said instead."""
    print("running llama-perplexity", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="toque-bench-") as folder:
        base = Path(folder) / "reference.kld"
        write_base(base, tokens, reference)
        return run_llama(binary, model, base, len(tokens), LLAMA_KV, threads)


def show(title: str, rows: Sequence[Quality], llama_kl: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 140)
    columns = ("KV cache", "bytes/token", "mean KL", "KL, 2nd half", "same top", "max difference")
    table = Table(
        *columns, *(["KL as llama.cpp counts"] if llama_kl is not None else []), title=title
    )
    for row in rows:
        cells = [
            row.kv_cache_dtype,
            f"{row.kv_bytes_per_token}",
            f"{row.mean_kl:.3g}",
            f"{row.late_kl:.3g}",
            f"{row.top1_agreement:.2%}",
            f"{row.max_logit_difference:.3g}",
        ]
        extra = [] if row.late_rounded_kl is None else [f"{row.late_rounded_kl:.6f}"]
        table.add_row(*cells, *extra)
    if llama_kl is not None:
        table.add_row(f"llama.cpp, {LLAMA_KV}", *[""] * 5, f"{llama_kl:.6f}")
    console.print(table)
    console.print("KL in nats per token, to the same weights in float32 with float32 KV")


if __name__ == "__main__":
    sys.exit(main())
