"""What `open_checkpoint` accepts and refuses by name; identity follows the weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy

from toque.errors import ConfigError, ModelError
from toque.files.checkpoint import EDGE_BYTES, open_checkpoint

CONFIG = {"model_type": "llama", "hidden_size": 8}


def write_folder(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    weights = {"w": np.full((2, 4), value, dtype=np.float32)}  # [2, 4]
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", np.ones((2, 4), dtype=np.float32))  # [2, 4]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_safetensors_folder_opens_with_its_configs(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format, checkpoint.path) == ("safetensors", folder)
    assert checkpoint.metadata == CONFIG
    assert checkpoint.generation == {"eos_token_id": [1, 2]}
    assert checkpoint.tensors["w"].shape == (2, 4)


def test_a_gguf_file_opens_alone_and_as_the_only_one_of_a_folder(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    alone, inside = open_checkpoint(path), open_checkpoint(tmp_path)
    assert alone.path == inside.path == path
    assert alone.format == "gguf"
    assert alone.identity == inside.identity
    assert alone.metadata["general.architecture"] == "llama"
    assert alone.generation == {}


def test_dummy_needs_only_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for path in (tmp_path, tmp_path / "config.json"):
        checkpoint = open_checkpoint(path, "dummy")
        assert (checkpoint.format, checkpoint.tensors) == ("dummy", {})
        assert checkpoint.metadata == CONFIG


def test_dummy_without_config_json_says_what_it_needs(tmp_path: Path) -> None:
    for path in (tmp_path, write_gguf(tmp_path / "m.gguf")):
        with pytest.raises(ModelError, match=r"config\.json"):
            open_checkpoint(path, "dummy")


def test_an_unknown_load_format_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto, dummy"):
        open_checkpoint(tmp_path, "pt")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "consolidated.00.pt"])
def test_pickle_checkpoints_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ModelError, match=rf"{name}.*pickle"):
            open_checkpoint(path)


def test_several_gguf_files_are_refused_with_their_names(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_what_is_not_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \.safetensors and no \.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match="not a model"):
        open_checkpoint(tmp_path / "notes.txt")
    folder = write_folder(tmp_path / "f")
    with pytest.raises(ModelError, match="give the folder"):
        open_checkpoint(folder / "model.safetensors")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        open_checkpoint(folder)


def test_a_damaged_config_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    for text in ("[]", "{", ""):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json: not a JSON object"):
            open_checkpoint(folder)


def test_identity_follows_content_and_not_place(tmp_path: Path) -> None:
    one, copy = write_folder(tmp_path / "a"), write_folder(tmp_path / "b")
    other = write_folder(tmp_path / "c", value=2.0)
    assert open_checkpoint(one).identity == open_checkpoint(copy).identity
    assert open_checkpoint(one).identity != open_checkpoint(other).identity
    (copy / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    assert open_checkpoint(one).identity != open_checkpoint(copy).identity


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_identity_of_a_large_file_sees_a_new_tensor_anywhere(tmp_path: Path, place: str) -> None:
    """Retrained weights differ everywhere, so samples of every region are enough."""
    rows = 3 * EDGE_BYTES // 4096
    weights = np.zeros((rows, 1024), dtype=np.float32)  # [rows, 1024], 3 MiB
    folder = write_folder(tmp_path)
    path = folder / "model.safetensors"
    safetensors.numpy.save_file({"w": weights}, path)
    before = open_checkpoint(folder).identity
    third = rows // 3
    start = {"first": 0, "middle": third, "last": 2 * third}[place]
    weights[start : start + third] = 1.0
    path.unlink()
    safetensors.numpy.save_file({"w": weights}, path)
    assert open_checkpoint(folder).identity != before
