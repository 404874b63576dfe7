"""Our GGUF reader against the gguf package, and against files that are damaged or hostile."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toque.errors import ModelError
from toque.files.catalog import find_entry
from toque.files.gguf import GgufFile, read_gguf
from toque.files.gguf_values import StringArray
from toque.files.mapping import KINDS
from toque.files.store import ModelFolder

QUANT_SIZES = gguf.constants.GGML_QUANT_SIZES
KIND_IDS = {kind: gguf.GGMLQuantizationType[kind] for kind in KINDS}


def write_gguf(
    path: Path, *, alignment: int | None = None, extra: Any = None, **options: Any
) -> Path:
    """A small file with every kind of tensor and every type of metadata, by the gguf package."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    if alignment:
        writer.add_custom_alignment(alignment)
    write_metadata(writer)
    rng = np.random.default_rng(7)
    for kind, kind_id in KIND_IDS.items():
        elements, size_bytes = QUANT_SIZES[kind_id]
        row_bytes = size_bytes * (2 * 256 // elements)
        raw = rng.integers(0, 256, (3, row_bytes), dtype=np.uint8)  # [rows, bytes of a row]
        writer.add_tensor(f"blk.0.{kind}", raw, raw_dtype=kind_id)
    writer.add_tensor("cube", rng.standard_normal((2, 3, 5)).astype(np.float32))  # [2, 3, 5]
    writer.add_tensor("vector", rng.standard_normal(7).astype(np.float16))  # [7]
    if extra:
        extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("n.u8", 255)
    writer.add_int8("n.i8", -128)
    writer.add_uint16("n.u16", 65535)
    writer.add_int16("n.i16", -32768)
    writer.add_uint32("n.u32", 2**32 - 1)
    writer.add_int32("n.i32", -(2**31))
    writer.add_uint64("n.u64", 2**64 - 1)
    writer.add_int64("n.i64", -(2**63))
    writer.add_float32("n.f32", 0.1)
    writer.add_float64("n.f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "zwölf Boxkämpfer 🥊")
    writer.add_array("strings", ["", "a", "ä\n", "<|im_end|>"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.25])
    writer.add_array("bools", [True, False, True])


def plain(value: Any) -> Any:
    """A metadata value as Python's own types."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, StringArray) else value


def assert_same_as_package(path: Path, ours: GgufFile) -> None:
    theirs = gguf.GGUFReader(path)
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {key: plain(value) for key, value in ours.metadata.items()} == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type.name
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(mine.data, tensor.data.reshape(-1).view(np.uint8))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_every_kind_and_metadata_type_reads_as_the_gguf_package_reads_it(
    tmp_path: Path, alignment: int | None
) -> None:
    path = write_gguf(tmp_path / "all.gguf", alignment=alignment)
    assert_same_as_package(path, read_gguf(path))


def test_the_cached_real_model_reads_as_the_gguf_package_reads_it() -> None:
    entry = find_entry("smollm2")
    assert entry is not None
    folder = ModelFolder(entry)
    if not folder.is_trusted():
        pytest.skip("smollm2 is not in the cache (toque pull smollm2 gets it)")
    assert_same_as_package(folder.file, read_gguf(folder.file))


def test_block_sizes_are_the_formats() -> None:
    assert {k: (b.elements, b.size_bytes) for k, b in KINDS.items()} == {
        kind: QUANT_SIZES[kind_id] for kind, kind_id in KIND_IDS.items()
    }


def test_tensor_data_is_a_read_only_view_of_the_file(small: Path) -> None:
    tensor = read_gguf(small).tensors["cube"]
    assert tensor.data.base is not None
    assert not tensor.data.flags.writeable


def test_string_arrays_are_sequences_that_decode_on_access(small: Path) -> None:
    strings = read_gguf(small).metadata["strings"]
    assert isinstance(strings, StringArray)
    assert (len(strings), strings[2], strings[-1]) == (4, "ä\n", "<|im_end|>")
    assert strings[1:3] == ["a", "ä\n"]
    assert "a" in strings
    with pytest.raises(IndexError):
        strings[4]


def test_version_2_reads_like_version_3(small: Path, tmp_path: Path) -> None:
    path = patched(small, tmp_path, 4, struct.pack("<I", 2))
    assert list(read_gguf(path).tensors) == list(read_gguf(small).tensors)


@pytest.mark.parametrize(
    ("version", "says"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")]
)
def test_other_versions_are_refused_by_name(
    small: Path, tmp_path: Path, version: int, says: str
) -> None:
    refuses(patched(small, tmp_path, 4, struct.pack("<I", version)), says)


def test_a_part_of_a_split_model_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    refuses(write_gguf(path, extra=lambda w: w.add_uint16("split.count", 2)), "split")


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "I32", "F64", "MXFP4"])
def test_unsupported_kinds_are_refused_with_the_list_of_supported_ones(
    tmp_path: Path, kind: str
) -> None:
    kind_id = gguf.GGMLQuantizationType[kind]
    raw = np.zeros((1, QUANT_SIZES[kind_id][1]), dtype=np.uint8)
    path = write_gguf(
        tmp_path / "odd.gguf", extra=lambda w: w.add_tensor("odd", raw, raw_dtype=kind_id)
    )
    refuses(path, "'odd'", kind, "Q4_K", "BF16")


@pytest.mark.parametrize("alignment", [0, 1, 12, 2**31])
def test_an_alignment_that_cannot_be_is_refused(tmp_path: Path, alignment: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", alignment=64)
    at = path.read_bytes().index(b"general.alignment") + len("general.alignment") + 4
    refuses(patched(path, tmp_path, at, struct.pack("<I", alignment)), "general.alignment")


@pytest.mark.parametrize("number", [2**31, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", ["tensors", "keys", "first key", "strings", "shape", "offset"])
def test_numbers_larger_than_the_file_are_refused_before_they_are_used(
    small: Path, tmp_path: Path, number: int, place: str
) -> None:
    content = small.read_bytes()
    tensor = content.index(b"cube") + len("cube") + 4
    at = {
        "tensors": 8,
        "keys": 16,
        "first key": 24,
        "strings": content.index(b"strings") + len("strings") + 8,
        "shape": tensor,
        "offset": tensor + 3 * 8 + 4,
    }[place]
    counted = place in ("tensors", "keys", "strings")
    says = ["more than fit"] if counted else []
    refuses(patched(small, tmp_path, at, struct.pack("<Q", number)), *says)


def test_a_last_string_that_runs_over_the_end_is_refused(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    at = content.index(b"<|im_end|>") - 8
    path = patched(small, tmp_path, at, struct.pack("<Q", len(content) - at - 7))
    refuses(path, "the last string of 'strings'")


def test_a_duplicate_tensor_and_an_overlap_are_refused(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    twin = content.replace(b"blk.0.Q4_1", b"blk.0.Q4_0")
    (tmp_path / "twin.gguf").write_bytes(twin)
    refuses(tmp_path / "twin.gguf", "twice")
    offset_at = content.index(b"cube") + len("cube") + 4 + 3 * 8 + 4
    refuses(patched(small, tmp_path, offset_at, struct.pack("<Q", 0)), "overlaps")


def test_a_missing_file_a_folder_and_an_empty_file_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    refuses(tmp_path / "absent.gguf", "absent.gguf")
    refuses(tmp_path, str(tmp_path))
    refuses(tmp_path / "empty.gguf", "empty")


def test_a_string_that_is_not_utf8_is_refused_when_read(small: Path, tmp_path: Path) -> None:
    at = small.read_bytes().index("ä\n".encode())
    strings = read_gguf(patched(small, tmp_path, at, b"\xff")).metadata["strings"]
    assert strings[1] == "a"
    with pytest.raises(ModelError, match=r"strings.*UTF-8"):
        list(strings)


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    file = read_gguf(small)
    content, path = small.read_bytes(), tmp_path / "cut.gguf"
    step = 97  # coprime to every field's size: the cuts fall everywhere inside fields
    for size in [*range(0, file.header_bytes, 5), *range(file.header_bytes, len(content), step)]:
        path.write_bytes(content[:size])
        last = file.tensors["vector"]
        if size >= file.header_bytes and size >= len(content) - (-last.data.size % 32):
            continue  # only padding is missing
        refuses(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_flipped_header_bytes_read_or_are_refused(
    small: Path, tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    """Nothing but ModelError ever comes out, whatever the header says."""
    content = bytearray(small.read_bytes())
    header_bytes = read_gguf(small).header_bytes
    for at, value in flips:
        content[at % header_bytes] = value
    path = tmp_path / "flipped.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        file = read_gguf(path)
        for value in file.metadata.values():
            plain(value)
    except ModelError:
        return
    for tensor in file.tensors.values():
        elements, size_bytes = QUANT_SIZES[KIND_IDS[tensor.kind]]
        assert tensor.data.size == np.prod(tensor.shape, dtype=object) // elements * size_bytes


def patched(path: Path, folder: Path, at: int, content: bytes) -> Path:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(content)] = content
    result = folder / "patched.gguf"
    result.unlink(missing_ok=True)
    result.write_bytes(whole)
    return result


def refuses(path: Path, *says: str) -> None:
    with pytest.raises(ModelError) as refusal:
        read_gguf(path)
    for word in (path.name, *says):
        assert word in str(refusal.value)
