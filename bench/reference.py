"""The float32 reference's logits, computed once per model, text and code, and kept in a file.

Owns: the file in the cache folder. Knows: what the logits depend on. Does not know: what is
compared with them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import toque
from bench.divergence import Logits
from bench.forward import logits_by_chunk
from toque.build import load
from toque.options import EngineOptions

# The parts of the package whose code decides the reference's numbers.
PARTS = ("files", "kernels/ref", "layers", "model")


def reference_logits(model: Path, identity: str, tokens: Sequence[int], folder: Path) -> Logits:
    """[tokens, vocab], mapped from `folder`, where it is computed first if it is not there yet.

    The file appears whole or not at all: it is written beside its place and then renamed.
    """
    path = folder / f"reference-{key(identity, tokens)}.npy"
    if not path.exists():
        print("computing the float32 reference (once)", file=sys.stderr)
        part = folder / f"{path.name}.{os.getpid()}.part"
        try:
            compute(model, tokens, part)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return mapped(path, "r")


def compute(model: Path, tokens: Sequence[int], path: Path) -> None:
    loaded = load(model, EngineOptions(kernels="ref", max_model_len=len(tokens)))
    shape = (len(tokens), loaded.model.spec.vocab_size)
    out: NDArray[np.float32] = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32, shape=shape
    )
    for positions, logits in logits_by_chunk(loaded.model, loaded.ops, tokens, "float32"):
        out[positions] = logits


def mapped(path: Path, mode: Any) -> Logits:
    array: Logits = np.load(path, mmap_mode=mode, allow_pickle=False)
    return array


def key(identity: str, tokens: Sequence[int]) -> str:
    """16 hex digits that change with the model's weights, the tokens, and the reference's code."""
    digest = hashlib.sha256(f"{identity} {list(tokens)}".encode())
    package = Path(toque.__file__).parent
    for part in PARTS:
        for source in sorted((package / part).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """A folder of this user in the system's temporary one. Raises PermissionError if somebody
    else made it: what lies there could not be trusted."""
    folder = Path(tempfile.gettempdir()) / f"toque-bench-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is not ours: give another folder with --cache")
    return folder
