"""Read GGUF: metadata at once, tensors as views of the mapped file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Opening the default model takes a fraction of a second: nothing but the header is touched. The file
is not trusted: every count, length, offset and alignment is checked before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toque.errors import ModelError
from toque.files.gguf_values import MAX_KEY_BYTES, Cursor, read_value
from toque.files.mapping import KINDS, map_file, stored_bytes
from toque.types import StoredTensor

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 4
LEAST_KEY_VALUE_BYTES = 8 + 4 + 1  # key length, type, value
LEAST_TENSOR_INFO_BYTES = 8 + 4 + 4 + 8  # name length, dimensions, type, offset

# Type ids of the format, those that we refuse included so that the refusal can name them.
TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata values are int, float, bool, str, numpy arrays of numbers (views of the mapping) or
    lazy sequences of str; tensors are by the file's own names, in the file's order."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    header_bytes: int  # where the tensor data begins


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    type_id: int
    shape: tuple[int, ...]  # numpy order
    offset_bytes: int  # from the beginning of the tensor data


def read_gguf(path: Path) -> GgufFile:
    """Map and check a GGUF file. Shapes are in numpy order: [out, in] for a matrix.

    Raises ModelError, naming the file and what is wrong, for a damaged file, an unknown version,
    one part of a split model, or tensors of a kind that no kernel here reads.
    """
    cursor = Cursor(path, map_file(path))
    tensor_count, key_count = _read_preamble(cursor)
    metadata = _read_metadata(cursor, key_count)
    _refuse_split(path, metadata)
    infos = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    _refuse_kinds(path, infos)
    alignment_bytes = _alignment(cursor, metadata)
    header_bytes = -(-cursor.position // alignment_bytes) * alignment_bytes
    tensors = _map_tensors(cursor, infos, header_bytes, alignment_bytes)
    return GgufFile(metadata, tensors, header_bytes)


def _read_preamble(cursor: Cursor) -> tuple[int, int]:
    if bytes(cursor.view[:4]) != MAGIC:
        raise ModelError(f"{cursor.path}: not a GGUF file (it does not begin with 'GGUF')")
    cursor.take(4, "the magic number")
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = "big-endian GGUF" if swapped in (2, 3) else f"GGUF version {version}"
        raise ModelError(f"{cursor.path}: {kind} is not supported; convert it to GGUF version 3")
    tensor_count = cursor.count("the number of tensors", LEAST_TENSOR_INFO_BYTES)
    return tensor_count, cursor.count("the number of keys", LEAST_KEY_VALUE_BYTES)


def _read_metadata(cursor: Cursor, key_count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string("a key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"the key {key!r} occurs twice")
        metadata[key] = read_value(cursor, key)
    return metadata


def _refuse_split(path: Path, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ModelError(
            f"{path}: one of {parts} parts of a split GGUF model, which is not supported; "
            "merge the parts into one file (llama.cpp's gguf-split --merge does it)"
        )


def _read_tensor_info(cursor: Cursor) -> _TensorInfo:
    name = cursor.string("a tensor's name", MAX_KEY_BYTES)
    dimensions = cursor.u32(f"the dimensions of tensor {name!r}")
    if dimensions > MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.u64(f"the shape of tensor {name!r}") for _ in range(dimensions))
    if 0 in shape:
        raise cursor.error(f"tensor {name!r} is empty: {shape}")
    type_id = cursor.u32(f"the kind of tensor {name!r}")
    return _TensorInfo(name, type_id, shape[::-1], cursor.u64(f"the offset of tensor {name!r}"))


def _refuse_kinds(path: Path, infos: list[_TensorInfo]) -> None:
    for info in infos:
        kind = TYPE_NAMES.get(info.type_id, f"of the unknown type {info.type_id}")
        if kind not in KINDS:
            raise ModelError(
                f"{path}: tensor {info.name!r} is {kind}, which is not supported; "
                f"supported are {', '.join(KINDS)}: choose a file of another quantization"
            )


def _alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if type(value) is not int or value <= 0 or value % 8 or value > len(cursor.view):
        raise cursor.error(f"'general.alignment' is {value!r}")
    return value


def _map_tensors(
    cursor: Cursor, infos: list[_TensorInfo], start: int, alignment_bytes: int
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    free_from = 0
    for info in sorted(infos, key=lambda info: info.offset_bytes):
        if info.name in tensors:
            raise cursor.error(f"tensor {info.name!r} occurs twice")
        if info.offset_bytes % alignment_bytes or info.offset_bytes < free_from:
            raise cursor.error(
                f"tensor {info.name!r} at offset {info.offset_bytes} overlaps another tensor "
                f"or is not aligned to {alignment_bytes} bytes"
            )
        tensors[info.name] = tensor = _map_tensor(cursor, info, start + info.offset_bytes)
        free_from = info.offset_bytes + tensor.stored.size
    return {info.name: tensors[info.name] for info in infos}


def _map_tensor(cursor: Cursor, info: _TensorInfo, begin: int) -> StoredTensor:
    kind = TYPE_NAMES[info.type_id]
    try:
        size_bytes = stored_bytes(kind, info.shape)
    except ValueError as error:
        raise cursor.error(f"tensor {info.name!r}: {error}") from error
    if begin + size_bytes > len(cursor.view):
        raise cursor.error(
            f"tensor {info.name!r} ends at byte {begin + size_bytes}, "
            f"but the file has {len(cursor.view)} (an incomplete download?)"
        )
    return StoredTensor(info.name, kind, info.shape, cursor.data[begin : begin + size_bytes])
