"""A model on disk, whichever format: metadata, mapped tensors and an identity.

Pickle checkpoints are refused by name: loading one runs whatever code it carries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import ConfigError, ModelError
from toque.files.gguf import read_gguf
from toque.files.mapping import map_file, read_json_object
from toque.files.safetensors import read_folder, shard_paths
from toque.types import StoredTensor

if TYPE_CHECKING:
    from toque.files.mapping import Bytes

CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
LOAD_FORMATS = ("auto", "dummy")
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
EDGE_BYTES = 1 << 20  # hashed whole at both ends of a file
SAMPLES, SAMPLE_BYTES = 64, 4096  # and spread over what lies between


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, opened. `tensors` are by the file's own names, mapped and not read yet."""

    path: Path  # the .gguf file or the folder
    format: str  # "gguf", "safetensors" or "dummy"
    metadata: Mapping[str, Any]  # GGUF's key-values, or the content of config.json
    generation: Mapping[str, Any]  # the content of generation_config.json, or nothing
    tensors: Mapping[str, StoredTensor]  # empty for dummy
    identity: str  # 16 hex digits that change with the weights: part of the fingerprint


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """Open a .gguf file, a folder that holds exactly one, or a folder of safetensors.

    With load_format "dummy" only config.json is needed (the file itself, or a folder with it) and
    there are no tensors. Raises ModelError, naming the file and what is wrong, for anything that
    is missing, damaged or not supported; ConfigError for an unknown load_format.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {load_format!r}; choose one of {', '.join(LOAD_FORMATS)}"
        )
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if load_format == "dummy":
        return _open_dummy(path)
    if path.is_file():
        return _open_file(path)
    if shard_paths(path):
        return _open_safetensors(path)
    return _open_gguf(_only_gguf(path))


def _open_dummy(path: Path) -> Checkpoint:
    config_path = path if path.is_file() else path / CONFIG_NAME
    if config_path.suffix != ".json" or not config_path.is_file():
        raise ModelError(
            f"{path}: random weights (load_format dummy) need the model's {CONFIG_NAME}: "
            "give that file or a folder with it"
        )
    metadata = read_json_object(config_path)
    identity = hashlib.sha256(b"dummy" + config_path.read_bytes()).hexdigest()[:16]
    generation = _read_generation(config_path.parent)
    return Checkpoint(config_path.parent, "dummy", metadata, generation, {}, identity)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in PICKLE_ENDINGS:
        raise _refuse_pickle(path)
    if path.suffix in (".safetensors", ".json"):
        raise ModelError(f"{path}: give the folder it lies in, {path.parent}")
    raise ModelError(f"{path}: not a model: expected a .gguf file or a folder of safetensors")


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    identity = _identity([path], file.header_bytes)
    return Checkpoint(path, "gguf", file.metadata, {}, file.tensors, identity)


def _open_safetensors(folder: Path) -> Checkpoint:
    config_path = folder / CONFIG_NAME
    if not config_path.is_file():
        raise ModelError(f"{folder}: {CONFIG_NAME} is missing beside the .safetensors files")
    metadata = read_json_object(config_path)
    tensors = read_folder(folder)
    identity = _identity([config_path, *shard_paths(folder)], EDGE_BYTES)
    return Checkpoint(folder, "safetensors", metadata, _read_generation(folder), tensors, identity)


def _read_generation(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION_NAME
    return read_json_object(path) if path.is_file() else {}


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{folder}: {len(files)} .gguf files, give one of them: {names}")
    for pickle in sorted(folder.iterdir()):
        if pickle.suffix in PICKLE_ENDINGS:
            raise _refuse_pickle(pickle)
    raise ModelError(f"{folder}: no .safetensors and no .gguf file in it")


def _refuse_pickle(path: Path) -> ModelError:
    return ModelError(
        f"{path}: pickle checkpoints are not loaded, because loading one runs the code in it; "
        "use the model's .safetensors or .gguf files"
    )


def _identity(paths: list[Path], header_bytes: int) -> str:
    """A hash that is cheap: sizes, headers, both ends and samples of what lies between."""
    digest = hashlib.sha256()
    for path in paths:
        data = map_file(path)
        digest.update(f"{path.suffix} {len(data)} ".encode())
        for piece in _pieces(data, max(header_bytes, EDGE_BYTES)):
            digest.update(piece.data)
    return digest.hexdigest()[:16]


def _pieces(data: Bytes, head_bytes: int) -> list[Bytes]:
    tail = max(head_bytes, len(data) - EDGE_BYTES)
    step = max(SAMPLE_BYTES, (tail - head_bytes) // SAMPLES)
    middle = range(head_bytes, tail, step)
    samples = [data[at : min(at + SAMPLE_BYTES, tail)] for at in middle]
    return [data[:head_bytes], *samples, data[tail:]]
