"""The catalogue says what the published files are, and its data file is whole."""

from __future__ import annotations

import re

import msgspec
import pytest

from toque.files.catalog import (
    DEFAULT_MODEL,
    CatalogEntry,
    HubSource,
    WheelSource,
    find_entry,
    load_catalog,
)


def test_the_default_is_a_model_that_also_answers_to_qwen() -> None:
    entry = find_entry("Qwen")
    assert entry is not None
    assert entry is find_entry(DEFAULT_MODEL)
    assert entry.names == ("qwen2.5-coder-0.5b", "Qwen")
    assert entry.size_bytes == 491_400_064


def test_unknown_names_have_no_entry() -> None:
    assert find_entry("gpt-2") is None
    assert find_entry("") is None


def test_names_are_unique_and_usable_as_folders() -> None:
    names = [name for entry in load_catalog() for name in entry.names]
    assert len(names) == len(set(names))
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name)


@pytest.mark.parametrize("entry", load_catalog(), ids=lambda entry: entry.name)
def test_every_entry_is_pinned_and_licensed(entry: CatalogEntry) -> None:
    """Size, sha256, revision and versions are fixed; the licence text ships with the package."""
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert re.fullmatch(r"[\w.-]+\.gguf", entry.file)
    hub, wheels = entry.sources
    assert isinstance(hub, HubSource)
    assert re.fullmatch(r"[0-9a-f]{40}", hub.revision)
    assert isinstance(wheels, WheelSource)
    for part in wheels.parts:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", part.requirement)
        package = part.requirement.split("==")[0].replace("-", "_")
        assert part.member.startswith(f"{package}/")
    assert "Apache License" in entry.license_text()
    assert "Version 2.0" in entry.license_text()


def test_a_misspelt_field_of_an_entry_is_an_error() -> None:
    entry = msgspec.to_builtins(load_catalog()[0])
    assert msgspec.convert(entry, CatalogEntry) == load_catalog()[0]
    with pytest.raises(msgspec.ValidationError, match="sha265"):
        msgspec.convert(entry | {"sha265": "0"}, CatalogEntry)
