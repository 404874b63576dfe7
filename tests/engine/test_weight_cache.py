"""Packed weights on disk: the next start gives the same bits without packing, whatever is damaged
is packed anew, and nothing of it is ever needed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from toque.build import Loaded, load
from toque.files import source_hash, weight_cache
from toque.files.checkpoint import open_checkpoint
from toque.files.packed import PREAMBLE_BYTES, Key, PackedTensor, read_header
from toque.files.weight_cache import WeightCache
from toque.kernels import select
from toque.kernels.api import Floats, ForwardBatch
from toque.kernels.cpu.ops import CpuOps
from toque.kernels.cpu.packing import PanelPacking
from toque.model.dummy import dummy_tensors
from toque.model.registry import model_spec
from toque.options import EngineOptions
from toque.spec import StoredTensor

OPTIONS = EngineOptions(kernels="cpu", threads=1, max_model_len=64)
PROMPT = (5, 17, 40, 41, 200, 3, 77)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which files that are a moment old count as settled."""
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(source_hash, "SETTLED_S", -60.0)
    return tmp_path / "home" / "packed"


@pytest.fixture
def folder(tiny_config: Path, tmp_path: Path) -> Path:
    """A tiny model of safetensors: float32 weights."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_config, folder)
    write_weights(folder, seed=0)
    return folder


def write_weights(folder: Path, seed: int) -> None:
    tensors = dummy_tensors(model_spec(open_checkpoint(folder, "dummy")), seed)
    save_file(
        {n: t.data.view(np.float32).reshape(t.shape) for n, t in tensors.items()},
        str(folder / "model.safetensors"),
    )


def start(path: Path, options: EngineOptions = OPTIONS) -> Loaded:
    """As an engine starts, up to a cache that is written."""
    loaded = load(path, options)
    assert loaded.cached is not None
    thread = loaded.cached.keep()
    if thread is not None:
        thread.join()
    return loaded


def is_found(loaded: Loaded) -> bool:
    assert loaded.cached is not None
    return loaded.cached.is_found


def logits(loaded: Loaded) -> Floats:
    """Of every token of a prompt: [tokens, vocab]."""
    count = len(PROMPT)
    places = np.arange(count, dtype=np.int32)
    batch = ForwardBatch(
        ids=np.array(PROMPT, dtype=np.int32),
        positions=places,
        chunk_starts=np.array([0, count], dtype=np.int32),
        context_lens=np.array([count], dtype=np.int32),
        page_table=np.zeros((1, 1), dtype=np.int32),
        write_at=places.astype(np.int64),
        output_rows=places,
    )
    kv = loaded.ops.kv_pages(loaded.model.kv_specs("float16"), 1, 16)
    return loaded.model.forward(batch, kv)


def the_file(home: Path) -> Path:
    (path,) = home.glob("*.packed")
    return path


def never(*_: object) -> None:
    raise AssertionError("packed again")


def test_the_next_start_packs_nothing_and_gives_the_same_bits(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(folder)
    assert not is_found(first)
    expected = logits(first)
    monkeypatch.setattr(CpuOps, "matrix", never)
    monkeypatch.setattr(CpuOps, "vector", never)
    monkeypatch.setattr(StoredTensor, "data", property(never))  # nor is the model's file read
    second = start(folder)
    assert is_found(second)
    assert logits(second).tobytes() == expected.tobytes()
    assert not list(home.glob("*.partial"))


def test_a_quantized_file_with_permuted_rows(
    home: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GGUF's Llama has its query and key rows in another order than the kernels."""
    expected = logits(start(smollm2_path))
    monkeypatch.setattr(CpuOps, "matrix", never)
    monkeypatch.setattr(StoredTensor, "data", property(never))
    assert logits(start(smollm2_path)).tobytes() == expected.tobytes()


def flipped(place: Callable[[Path], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place(path)] ^= 0x10
        path.write_bytes(data)

    return damage


def in_tensor(index: int, part: float) -> Callable[[Path], int]:
    def place(path: Path) -> int:
        entry = read_header(path).entries[index]
        return entry.begin + int(part * (entry.size_bytes - 1))

    return place


def cut(size_bytes: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: size_bytes if size_bytes >= 0 else len(data) + size_bytes])

    return damage


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(4096))


def of_another_key(path: Path) -> None:
    """A whole and valid file, but of other weights, under this name."""
    key = msgspec.structs.replace(read_header(path).key, source="other")
    tensor = PackedTensor("x", "vector", (1,), np.zeros(4, np.uint8))
    packing = select("cpu", 1).packing
    assert packing is not None
    cache = WeightCache(path.parent)
    assert cache.keep(key, [tensor], packing.checksums)
    (path.parent / f"{key.name}.packed").replace(path)


DAMAGES = {
    "magic": flipped(lambda _: 0),
    "header size": flipped(lambda _: 9),
    "huge header size": flipped(lambda _: 15),
    "header checksum": flipped(lambda _: 20),
    "header": flipped(lambda _: PREAMBLE_BYTES + 30),
    "first tensor, first byte": flipped(in_tensor(0, 0.0)),
    "a matrix, middle": flipped(in_tensor(3, 0.5)),
    "last tensor, last byte": flipped(in_tensor(-1, 1.0)),
    "empty": cut(0),
    "half a preamble": cut(20),
    "half a header": cut(300),
    "half a file": cut(200_000),
    "last byte missing": cut(-1),
    "longer": longer,
    "of another key": of_another_key,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_packed_anew(
    home: Path, folder: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(start(folder))
    damage(the_file(home))
    again = start(folder)
    assert not is_found(again)
    assert logits(again).tobytes() == expected.tobytes()
    assert "damaged" in caplog.text
    healed = start(folder)
    assert is_found(healed)
    assert logits(healed).tobytes() == expected.tobytes()


def test_what_a_killed_writer_left_is_written_over(home: Path, folder: Path) -> None:
    expected = logits(start(folder))
    half = the_file(home).read_bytes()[:100_000]
    the_file(home).rename(the_file(home).with_suffix(".partial"))
    next(home.glob("*.partial")).write_bytes(half)
    assert not is_found(start(folder))
    assert not list(home.glob("*.partial"))
    again = start(folder)
    assert is_found(again)
    assert logits(again).tobytes() == expected.tobytes()


def test_other_weights_at_the_same_path_are_noticed(home: Path, folder: Path) -> None:
    old = logits(start(folder))
    write_weights(folder, seed=1)
    other = start(folder)
    assert not is_found(other)
    assert logits(other).tobytes() != old.tobytes()
    write_weights(folder, seed=0)  # back again: its cache is still there, once it is hashed
    assert logits(start(folder)).tobytes() == old.tobytes()
    assert len(list(home.glob("*.packed"))) == 2
    assert is_found(start(folder))


def test_one_byte_changed_in_place_with_the_old_time_set_back(home: Path, folder: Path) -> None:
    """What size, inode and time of modification do not tell, the time of change does."""
    old = logits(start(folder))
    path = folder / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x3f")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = start(folder)
    assert not is_found(changed)
    assert logits(changed).tobytes() != old.tobytes()


def test_a_file_that_changes_while_it_is_loaded_is_not_kept(
    home: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = load(folder, OPTIONS)
    draft = folder / "draft"
    shutil.copy(folder / "model.safetensors", draft)
    draft.replace(folder / "model.safetensors")
    assert loaded.cached is not None
    thread = loaded.cached.keep()
    assert thread is not None
    thread.join()
    assert not list(home.glob("*.packed"))
    assert "just changed" in caplog.text


def test_another_layout_is_another_file(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(folder)
    monkeypatch.setattr(PanelPacking, "layout", "cpu-other")
    assert not is_found(start(folder))
    assert len(list(home.glob("*.packed"))) == 2


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_is_part_of_the_key(
    home: Path, folder: Path, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = EngineOptions(kernels="cpu", threads=1, max_model_len=64, quantization=quantization)
    plain = logits(start(folder))
    first = start(folder, rounded)
    assert not is_found(first)
    assert logits(first).tobytes() != plain.tobytes()
    monkeypatch.setattr(CpuOps, "matrix", never)
    second = start(folder, rounded)
    assert is_found(second)
    assert logits(second).tobytes() == logits(first).tobytes()


def test_a_home_that_cannot_be_written_is_only_slower(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr(source_hash, "SETTLED_S", -60.0)
    expected = logits(start(folder))
    assert logits(start(folder)).tobytes() == expected.tobytes()
    assert "not kept" in caplog.text


def test_a_full_disk_keeps_nothing(
    home: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(weight_cache, "LEFT_FREE_BYTES", 1 << 60)
    start(folder)
    assert not list(home.glob("*.packed"))
    assert "free disk space" in caplog.text


def test_off_means_no_file(home: Path, folder: Path) -> None:
    options = EngineOptions(kernels="cpu", threads=1, max_model_len=64, weight_cache=False)
    assert load(folder, options).cached is None
    assert not home.exists()


def test_the_longest_unused_make_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = select("cpu", 1).packing
    assert packing is not None
    cache = WeightCache(home)
    tensor = PackedTensor("x", "vector", (100_000,), np.zeros(400_000, np.uint8))
    keys = [Key(source=str(i), layout="a", quantization="", recipe=1) for i in range(4)]
    for i, key in enumerate(keys):
        assert cache.keep(key, [tensor], packing.checksums)
        os.utime(home / f"{key.name}.packed", (1e9 + i, 1e9 + i))
    assert len(list(home.glob("*.packed"))) == 4  # of one layout, however old
    assert cache.find(keys[0], packing.checksums) is not None  # used just now
    monkeypatch.setattr(weight_cache, "LIMIT_BYTES", 2_000_000)
    new = Key(source="new", layout="a", quantization="", recipe=1)
    assert cache.keep(new, [tensor], packing.checksums)
    assert cache.has(keys[0])
    assert cache.has(new)
    assert not cache.has(keys[1])


def test_an_old_layout_goes_when_nobody_uses_it(home: Path) -> None:
    packing = select("cpu", 1).packing
    assert packing is not None
    cache = WeightCache(home)
    tensor = PackedTensor("x", "vector", (1,), np.zeros(4, np.uint8))
    old = Key(source="s", layout="old", quantization="", recipe=1)
    used = Key(source="t", layout="old", quantization="", recipe=1)
    for key in (old, used):
        assert cache.keep(key, [tensor], packing.checksums)
    os.utime(home / f"{old.name}.packed", (1e9, 1e9))
    new = Key(source="s", layout="new", quantization="", recipe=1)
    assert cache.keep(new, [tensor], packing.checksums)
    assert [cache.has(key) for key in (old, used, new)] == [False, True, True]


def test_writers_at_once_leave_one_whole_file(home: Path) -> None:
    packing = select("cpu", 1).packing
    assert packing is not None
    key = Key(source="s", layout="a", quantization="", recipe=1)
    data = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)
    tensor = PackedTensor("x", "vector", (1 << 20,), data)
    gate = threading.Barrier(8)
    written: list[bool] = []

    def write() -> None:
        gate.wait()
        written.append(WeightCache(home).keep(key, [tensor], packing.checksums))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 8
    assert any(written)
    found = WeightCache(home).find(key, packing.checksums)
    assert found is not None
    assert np.array_equal(found["x"].data, data)
    assert not list(home.glob("*.partial"))


PROGRAM = """
import sys
from pathlib import Path
from toque.build import load
from toque.options import EngineOptions
from toque.files import source_hash
source_hash.SETTLED_S = -60.0
loaded = load(Path(sys.argv[1]), EngineOptions(kernels="cpu", threads=1, max_model_len=64))
thread = loaded.cached.keep()
if thread: thread.join()
"""


def test_two_processes_that_start_at_once(home: Path, folder: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)]) for _ in range(2)]
    assert [child.wait(120) for child in children] == [0, 0]
    loaded = start(folder)
    assert is_found(loaded)
    assert not list(home.glob("*.partial"))


def test_a_damaged_record_of_a_hash_is_hashed_again(home: Path, folder: Path) -> None:
    start(folder)
    for record in (home / "sources").glob("*.json"):
        record.write_text("{")
    assert not is_found(start(folder))  # not known at the start …
    assert is_found(start(folder))  # … but known again afterwards
    assert len(list(home.glob("*.packed"))) == 1


def test_the_layout_is_the_same_for_any_number_of_threads() -> None:
    layouts = {select("cpu", threads).packing.layout for threads in (1, 2)}  # type: ignore[union-attr]
    assert len(layouts) == 1


def test_checksums_are_xxh64() -> None:
    import xxhash

    packing = select("cpu", 2).packing
    assert packing is not None
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    begins, sizes = list(range(200)), list(range(200))
    begins.append(0)
    sizes.append(10_000)
    expected = [
        xxhash.xxh64(data[a : a + n].tobytes()).intdigest()
        for a, n in zip(begins, sizes, strict=True)
    ]
    assert packing.checksums(data, begins, sizes) == expected
    with pytest.raises(ValueError, match="outside"):
        packing.checksums(data, [9_999], [2])


def test_a_record_names_its_file(home: Path, folder: Path) -> None:
    """Nothing but the hash's own file is believed."""
    start(folder)
    records = [json.loads(p.read_text()) for p in (home / "sources").glob("*.json")]
    assert {Path(r["path"]).name for r in records} == {"config.json", "model.safetensors"}
