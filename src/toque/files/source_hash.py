"""The sha256 of a model's files, without reading gigabytes at each start.

Owns: the records in one folder. Knows: what a file's status says. Does not know: what it is for.

A file is read whole once; its hash is remembered beside size, inode and both times. The change
time is among them because copying tools set the other one back: only the system sets that.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from toque.files.catalog import load_catalog
from toque.files.store import ModelFolder

READ_BYTES = 4 << 20
SETTLED_S = 2.0  # a file that changed this lately may change again within one tick of its clock


class Status(msgspec.Struct, frozen=True):
    """What changes whenever a file's content does."""

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int

    @property
    def is_settled(self) -> bool:
        return time.time() - max(self.changed_ns, self.modified_ns) / 1e9 > SETTLED_S


class _Record(msgspec.Struct, frozen=True):
    path: str
    status: Status
    sha256: str


def status_of(path: Path) -> Status:
    """Raises OSError."""
    found = path.stat()
    return Status(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


class SourceHash:
    """The hash of the files that one model is made of. Their status is taken when this is made:
    make it before they are read, so that a change in between is noticed."""

    def __init__(self, paths: Sequence[Path], folder: Path) -> None:
        """`folder` keeps the records. Raises OSError for a file that is not there."""
        self._paths = [path.resolve() for path in paths]
        self._statuses = [status_of(path) for path in self._paths]
        self._folder = folder

    def is_unchanged(self) -> bool:
        """Whether the files are still those of which this was made."""
        try:
            return [status_of(path) for path in self._paths] == self._statuses
        except OSError:
            return False

    def known(self) -> str | None:
        """Without reading the files; None where one has not been hashed, or has changed since."""
        found = [self._known(*both) for both in zip(self._paths, self._statuses, strict=True)]
        return None if None in found else _combined([sha for sha in found if sha])

    def compute(self) -> str | None:
        """Reading what is not known; None where a file has changed since this was made, or may
        have. Raises OSError."""
        hashes = []
        for path, status in zip(self._paths, self._statuses, strict=True):
            sha256 = self._known(path, status) or self._read(path, status)
            if sha256 is None:
                return None
            hashes.append(sha256)
        return _combined(hashes)

    def _known(self, path: Path, status: Status) -> str | None:
        try:
            record = msgspec.json.decode(self._record(path).read_bytes(), type=_Record)
            if (record.path, record.status) == (str(path), status):
                return record.sha256
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            pass
        return _catalogue_hash(path)

    def _read(self, path: Path, status: Status) -> str | None:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
        if status_of(path) != status or not status.is_settled:
            return None
        record = _Record(str(path), status, digest.hexdigest())
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._record(path).with_suffix(f".{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(self._record(path))
        return record.sha256

    def _record(self, path: Path) -> Path:
        return self._folder / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"


def source_files(path: Path) -> list[Path]:
    """The files that hold a model's weights, and what says which they are."""
    if path.is_file():
        return [path]
    folder = sorted([*path.glob("config.json"), *path.glob("*.safetensors")])
    return (
        folder if any(file.suffix == ".safetensors" for file in folder) else [*path.glob("*.gguf")]
    )


def _catalogue_hash(path: Path) -> str | None:
    """Of a file that was checked when it was fetched and has not changed since."""
    for entry in load_catalog():
        folder = ModelFolder(entry)
        if folder.file.name == path.name and folder.file.resolve() == path:
            return entry.sha256 if folder.is_trusted() else None
    return None


def _combined(hashes: Sequence[str]) -> str:
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
