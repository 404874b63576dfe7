"""README says what is there: every flag, every catalogue model, every route."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from toque.options import EngineOptions, ListenOptions, ServeOptions

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("options", [EngineOptions, ServeOptions, ListenOptions])
def test_every_flag_has_its_row_with_the_words_of_help(options: type) -> None:
    for field in dataclasses.fields(options):
        flag = "--" + field.name.replace("_", "-")
        starts = (f"| `{flag}`", f"| `{flag} /")
        rows = [line for line in README.splitlines() if line.startswith(starts)]
        assert rows, f"README's table lacks {flag}"
        assert any(field.metadata["help"] in row for row in rows)


def test_no_flag_in_the_table_is_made_up() -> None:
    known = {
        "--" + field.name.replace("_", "-")
        for options in (EngineOptions, ServeOptions, ListenOptions)
        for field in dataclasses.fields(options)
    }
    rows = [line for line in README.splitlines() if line.startswith("| `--")]
    assert {row.split("`")[1].split(" ")[0] for row in rows} == known


def test_every_catalogue_model_is_named() -> None:
    catalogue = json.loads((ROOT / "src/toque/files/catalog.json").read_text())
    text = json.dumps(catalogue)
    for name in ("qwen2.5-coder-0.5b", "smollm2"):
        assert name in text
        assert f"`{name}`" in README


def test_every_no_op_field_is_documented() -> None:
    from toque.serve.fields import NO_OPS

    for name in NO_OPS:
        assert f"`{name}" in README, name
