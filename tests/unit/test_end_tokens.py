"""Which tokens end an answer: the union of what a model's files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from toque.errors import ModelError
from toque.files.catalog import load_catalog
from toque.files.checkpoint import Checkpoint, open_checkpoint
from toque.files.end_tokens import end_token_ids
from toque.files.store import ModelFolder

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
REAL = {"qwen2.5-coder-0.5b": (151643, 151645), "smollm2": (0, 2)}


def hugging_face(metadata: dict[str, Any], generation: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path("m"), "safetensors", metadata, generation, {}, "")


def write_vocabulary(path: Path, tokens: list[tuple[str, int]], **keys: int) -> Checkpoint:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    for key, value in keys.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    writer.add_tensor("w", np.zeros((1, 4), dtype=np.float32))  # [1, 4]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": 5}, {"eos_token_id": [9, 2]}, (2, 5, 9)),
        ({"eos_token_id": [0, 1]}, {"eos_token_id": 1}, (0, 1)),
        ({"eos_token_id": None}, {}, ()),
        ({}, {}, ()),
    ],
)
def test_hugging_face_folders_give_the_union_of_both_configs(
    config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert end_token_ids(hugging_face(config, generation)) == expected


@pytest.mark.parametrize("value", ["2", 1.5, True, -1, [1, "2"], {"id": 1}])
def test_what_is_not_a_token_id_is_refused_with_its_key(value: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id"):
        end_token_ids(hugging_face({"eos_token_id": value}, {}))


def test_gguf_gives_its_keys_and_the_control_tokens_with_an_end_name(tmp_path: Path) -> None:
    tokens = [
        ("<|endoftext|>", CONTROL),
        ("a", NORMAL),
        ("<|im_start|>", CONTROL),
        ("<|im_end|>", CONTROL),
        ("<|fim_pad|>", CONTROL),
        ("</s>", NORMAL),  # text that looks like it, e.g. of a markup file
        ("<|end|>", USER_DEFINED),
        ("<odd end>", CONTROL),
        ("<odd eot>", CONTROL),
        ("<odd eom>", CONTROL),
    ]
    checkpoint = write_vocabulary(tmp_path / "m.gguf", tokens, eos=7, eot=8, eom=9, padding=2)
    assert end_token_ids(checkpoint) == (0, 3, 7, 8, 9)


def test_a_vocabulary_whose_types_do_not_match_is_refused(tmp_path: Path) -> None:
    checkpoint = write_vocabulary(tmp_path / "m.gguf", [("a", NORMAL), ("</s>", CONTROL)])
    odd = dict(checkpoint.metadata) | {"tokenizer.ggml.token_type": np.array([1])}
    with pytest.raises(ModelError, match="do not match"):
        end_token_ids(Checkpoint(tmp_path, "gguf", odd, {}, {}, ""))


@pytest.mark.parametrize("entry", load_catalog(), ids=lambda entry: entry.name)
def test_catalogue_models_end_where_they_were_trained_to(entry: Any) -> None:
    folder = ModelFolder(entry)
    if not folder.is_trusted():
        pytest.skip(f"{entry.name} is not in the cache (toque pull {entry.name} gets it)")
    assert end_token_ids(open_checkpoint(folder.file)) == REAL[entry.name]
