"""Our safetensors reader against the safetensors package, and against damaged or hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toque.errors import ModelError
from toque.files.safetensors import INDEX_NAME, read_folder, read_safetensors, shard_paths

Header = dict[str, Any]


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "a.weight": rng.standard_normal((4, 6)).astype(np.float32),  # [4, 6]
        "b.bias": rng.standard_normal(5).astype(np.float16),  # [5]
        "scalar": np.array(2.5, dtype=np.float32),  # []
        "empty": np.zeros((0, 3), dtype=np.float32),  # [0, 3]
    }


def write_raw(path: Path, header: Header | bytes, payload: bytes) -> Path:
    """A file of exactly this header: what the package's writer would never write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def assert_same_as_package(path: Path) -> None:
    expected = dict(safetensors.deserialize(path.read_bytes()))
    ours = read_safetensors(path)
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.kind == expected[name]["dtype"]
        assert list(tensor.shape) == list(expected[name]["shape"])
        assert bytes(tensor.data) == bytes(expected[name]["data"])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    safetensors.numpy.save_file(tensors(), path, metadata={"format": "pt"})
    return path


def test_floats_and_halves_read_as_the_package_reads_them(small: Path) -> None:
    assert_same_as_package(small)
    ours = read_safetensors(small)
    for name, array in tensors().items():
        assert np.array_equal(ours[name].data.view(array.dtype).reshape(array.shape), array)


def test_bfloat16_reads_as_the_package_reads_it(tmp_path: Path) -> None:
    payload = bytes(range(12))
    header = {"x": entry("BF16", [3, 2], 0, 12)}
    assert_same_as_package(write_raw(tmp_path / "b.safetensors", header, payload))


def test_data_is_a_read_only_view(small: Path) -> None:
    assert not read_safetensors(small)["a.weight"].data.flags.writeable


@pytest.mark.parametrize("dtype", ["I64", "F8_E4M3", "F64", "U8"])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: str) -> None:
    size_bytes = {"I64": 8, "F64": 8}.get(dtype, 1)
    path = write_raw(
        tmp_path / "x.safetensors", {"odd": entry(dtype, [1], 0, size_bytes)}, bytes(size_bytes)
    )
    refuses(path, "'odd'", dtype, "BF16")


@pytest.mark.parametrize(
    ("header", "payload_bytes"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12),  # overlap
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, 8),  # the same bytes
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, 12),  # hole
        ({"a": entry("F32", [2], 0, 8)}, 4),  # past the end
        ({"a": entry("F32", [1], 0, 4)}, 8),  # bytes left over
        ({"a": entry("F32", [2], 8, 0)}, 8),  # backwards
        ({"a": entry("F32", [3], 0, 8)}, 8),  # the shape wants more
        ({"a": entry("F32", [-1, -2], 0, 8)}, 8),  # negative
        ({"a": entry("F32", [2**62, 4], 0, 8)}, 8),  # would wrap around 64 bits
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),  # no offsets
        ({"a": entry("F32", ["2"], 0, 8)}, 8),  # type: ignore[list-item]
        ({"a": 3}, 0),
        (b"[]", 0),
        (b"{", 0),
        (b'{"a": ' + b"[" * 100_000, 0),
        (b"\xff\xfe", 0),
        (b'{"__metadata__": {"a": "\xff"}}', 0),
        ({"__metadata__": {"a": 1}}, 0),
    ],
)
def test_headers_that_cannot_be_are_refused(
    tmp_path: Path, header: Header | bytes, payload_bytes: int
) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, bytes(payload_bytes))
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(path.read_bytes())
    refuses(path)


@pytest.mark.parametrize("header_bytes", [100_000_001, 2**40, 2**64 - 1])
def test_a_header_longer_than_file_or_limit_is_refused(tmp_path: Path, header_bytes: int) -> None:
    path = tmp_path / "long.safetensors"
    path.write_bytes(header_bytes.to_bytes(8, "little") + b"{}")
    refuses(path, str(header_bytes))


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    content, path = small.read_bytes(), tmp_path / "cut.safetensors"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        refuses(path)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(flips=st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=3))
def test_what_the_package_refuses_we_refuse_whatever_bytes_are_flipped(
    small: Path, tmp_path: Path, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(small.read_bytes())
    for at, value in flips:
        content[at % len(content)] = value
    path = tmp_path / "flipped.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        read_safetensors(path)
    except ModelError:
        return
    assert_same_as_package(path)


# ------------------------------------------------------------------------------------- folders


def write_shards(folder: Path, weight_map: dict[str, str] | None = None) -> dict[str, np.ndarray]:
    whole = tensors()
    parts = {"model-1.safetensors": ["a.weight", "scalar"], "model-2.safetensors": ["b.bias"]}
    for file, names in parts.items():
        safetensors.numpy.save_file({name: whole[name] for name in names}, folder / file)
    mapped = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map or mapped}))
    return {name: whole[name] for name in mapped}


def test_a_sharded_model_is_the_union_of_its_shards(tmp_path: Path) -> None:
    expected = write_shards(tmp_path)
    ours = read_folder(tmp_path)
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        assert bytes(ours[name].data) == array.tobytes()
    assert [path.name for path in shard_paths(tmp_path)] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


@pytest.mark.parametrize(
    "shard",
    ["../model-1.safetensors", "sub/model-1.safetensors", "..", "", "..\\m.safetensors", "m.bin"],
)
def test_an_index_cannot_reach_out_of_its_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_shards(folder, {"a.weight": shard})
    (tmp_path / "model-1.safetensors").write_bytes((folder / "model-1.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"not the name of a \.safetensors file in this folder"):
        read_folder(folder)


def test_an_index_with_an_absolute_path_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a.weight": str(tmp_path / "model-1.safetensors")})
    with pytest.raises(ModelError, match="not the name"):
        read_folder(tmp_path)


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a.weight": "model-1.safetensors", "lost": "model-2.safetensors"})
    with pytest.raises(ModelError, match=r"model-2\.safetensors.*'lost'"):
        read_folder(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors: cannot be read"):
        read_folder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    safetensors.numpy.save_file(tensors(), tmp_path / "model-2.safetensors")
    with pytest.raises(ModelError, match=r"two shards hold the tensor 'a\.weight'"):
        read_folder(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(ModelError, match=r"2 \.safetensors files"):
        read_folder(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_an_index_that_names_nothing_is_refused(tmp_path: Path, index: str) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(ModelError, match=INDEX_NAME):
        read_folder(tmp_path)


def refuses(path: Path, *says: str) -> None:
    with pytest.raises(ModelError) as refusal:
        read_safetensors(path)
    for word in (path.name, *says):
        assert word in str(refusal.value)
