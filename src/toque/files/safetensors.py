"""Read safetensors: one file or a sharded model, tensors as views of the mapped files.

Format: https://huggingface.co/docs/safetensors, which asks a reader to refuse what is checked here:
an oversized header, and data that the tensors do not cover exactly once.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from toque.errors import ModelError
from toque.files.mapping import Bytes, map_file, read_json_object, stored_bytes
from toque.types import StoredTensor

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
KINDS = ("F32", "F16", "BF16")  # the format uses GGUF's names for them


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # begin and end, bytes from the end of the header


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name. Raises ModelError for a damaged file or another dtype."""
    data = map_file(path)
    header_bytes = _header_bytes(path, data)
    entries = _decode_header(path, bytes(data[8 : 8 + header_bytes]))
    payload = data[8 + header_bytes :]
    _check_cover(path, entries, len(payload))
    return {name: _map_tensor(path, name, entry, payload) for name, entry in entries.items()}


def read_sharded(index_path: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards that an index names; shards lie beside the index.

    Raises ModelError for a shard outside the folder, a missing shard or tensor, or one that two
    shards hold.
    """
    weight_map = _read_weight_map(index_path)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        found = read_safetensors(index_path.parent / shard)
        if twice := found.keys() & tensors.keys():
            raise ModelError(f"{index_path.parent}: two shards hold the tensor {min(twice)!r}")
        if lost := {name for name in weight_map if weight_map[name] == shard} - found.keys():
            raise ModelError(
                f"{index_path.parent / shard}: the tensor {min(lost)!r} is missing, "
                f"which {index_path.name} says is in it"
            )
        tensors |= found
    return tensors


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: the shards of its index, else the only file.

    Empty if there are none. Raises ModelError if it is not clear which files are the model.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return [folder / shard for shard in sorted(set(_read_weight_map(index_path).values()))]
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1:
        raise ModelError(
            f"{folder}: {len(files)} .safetensors files but no {INDEX_NAME} that says how they "
            "belong together (an incomplete download?)"
        )
    return files


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder. Raises ModelError as the other functions here do."""
    paths = shard_paths(folder)
    if not paths:
        raise ModelError(f"{folder}: no .safetensors file in it")
    index_path = folder / INDEX_NAME
    if paths[0].name != "model.safetensors" and index_path.is_file():
        return read_sharded(index_path)
    return read_safetensors(paths[0])


def _header_bytes(path: Path, data: Bytes) -> int:
    if len(data) < 8:
        raise ModelError(f"{path}: not a safetensors file: only {len(data)} bytes long")
    header_bytes = int.from_bytes(bytes(data[:8]), "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ModelError(
            f"{path}: damaged or not a safetensors file: the header is said to be {header_bytes} "
            f"bytes long (the file has {len(data)}, the limit is {MAX_HEADER_BYTES})"
        )
    return header_bytes


def _decode_header(path: Path, header: bytes) -> dict[str, _Entry]:
    name = "the header"
    try:
        # msgspec checks UTF-8 only in what it decodes; the format asks for it in the whole header.
        raw = msgspec.json.decode(header.decode("utf-8"), type=dict[str, msgspec.Raw])
        msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {}
        for name, content in raw.items():
            entries[name] = msgspec.json.decode(content, type=_Entry)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: damaged safetensors header: {name!r}: {error}") from error
    return entries


def _check_cover(path: Path, entries: dict[str, _Entry], payload_bytes: int) -> None:
    """Tensors lie one after the other: no overlap, no hole, none past the end of the file."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            raise ModelError(
                f"{path}: damaged safetensors file: the tensor {name!r} lies at {begin}..{end}, "
                f"but the one before it ends at {position}"
            )
        position = end
    if position != payload_bytes:
        raise ModelError(
            f"{path}: the tensors need {position} bytes of data, but the file has {payload_bytes} "
            "(an incomplete download?)"
        )


def _map_tensor(path: Path, name: str, entry: _Entry, payload: Bytes) -> StoredTensor:
    if entry.dtype not in KINDS:
        raise ModelError(
            f"{path}: tensor {name!r} is {entry.dtype}, which is not supported; "
            f"supported are {', '.join(KINDS)}"
        )
    begin, end = entry.data_offsets
    if min(entry.shape, default=0) < 0 or stored_bytes(entry.dtype, entry.shape) != end - begin:
        raise ModelError(
            f"{path}: damaged safetensors file: tensor {name!r} of {entry.dtype} "
            f"{list(entry.shape)} does not fill its {end - begin} bytes"
        )
    return StoredTensor(name, entry.dtype, entry.shape, payload[begin:end])


def _read_weight_map(index_path: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.convert(
            read_json_object(index_path).get("weight_map"), type=dict[str, str]
        )
    except msgspec.MsgspecError as error:
        raise ModelError(f"{index_path}: 'weight_map' is not usable: {error}") from error
    for shard in weight_map.values():
        # A plain name only: an index that was downloaded must not reach other folders. The file
        # itself may be a link; those are the user's own (the hub's cache is built of them).
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise ModelError(
                f"{index_path}: {shard!r} is not the name of a .safetensors file in this folder"
            )
    if not weight_map:
        raise ModelError(f"{index_path}: 'weight_map' names no tensors")
    return weight_map
