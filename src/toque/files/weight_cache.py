"""The folder of packed weights, $TOQUE_HOME/packed: which file is for whom, and what may stay.

Owns: the files there. Knows: keys, locks, disk space. Does not know: what packing is.

    KEY.packed     whole: it appears by a rename; its time of change is when it was last used
    KEY.partial    being written by whoever holds its lock, or left by one who was ended
    sources/       hashes of model files (source_hash.py)
    rates/         how fast this machine was found to be (rates.py)

Nothing here is needed: whatever fails, the weights are packed anew.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from toque.files.packed import (
    Checksums,
    Damaged,
    Key,
    PackedTensor,
    file_bytes,
    read_header,
    read_packed,
    write_packed,
)
from toque.files.store import toque_home

log = logging.getLogger(__name__)

LEFT_FREE_BYTES = 1 << 30  # of the disk: the cache takes what is beyond
LIMIT_BYTES = 64 << 30  # of all files together: the longest unused ones go
STALE_S = 7 * 86400.0  # a file of another layout that nobody has used for so long goes


class WeightCache:
    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or toque_home() / "packed"

    @property
    def sources(self) -> Path:
        return self.folder / "sources"

    @property
    def rates(self) -> Path:
        return self.folder / "rates"

    def find(self, key: Key, checksums: Checksums) -> dict[str, PackedTensor] | None:
        """The checked tensors of a key, mapped; None if there are none. A damaged file is removed.

        Whoever changes a file that is mapped changes the weights under it: files here are replaced
        by a rename, never written to again.
        """
        path = self._path(key)
        try:
            found = read_packed(path, key, checksums)
            with suppress(OSError):  # a folder that may only be read
                os.utime(path)
            return found
        except FileNotFoundError:
            return None
        except (OSError, Damaged, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.warning("packed weights: %s is damaged (%s): packing anew", path, error)
            with suppress(OSError):
                path.unlink()
            return None

    def has(self, key: Key) -> bool:
        return self._path(key).exists()

    def keep(self, key: Key, tensors: Sequence[PackedTensor], checksums: Checksums) -> bool:
        """Write them for the next start; false where somebody else is writing them. Raises OSError
        where it cannot be done, disk space included."""
        self.folder.mkdir(parents=True, exist_ok=True)
        need_bytes = file_bytes(tensors)
        self._tidy(key, need_bytes)
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes - need_bytes < LEFT_FREE_BYTES:
            raise OSError(f"{need_bytes / 1e6:.0f} MB of {free_bytes / 1e6:.0f} MB free disk space")
        with self._writing(key) as descriptor:
            if descriptor is None:
                return False
            write_packed(descriptor, key, tensors, checksums)
            self._partial(key).replace(self._path(key))
            return True

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key.name}.packed"

    def _partial(self, key: Key) -> Path:
        return self.folder / f"{key.name}.partial"

    @contextmanager
    def _writing(self, key: Key) -> Iterator[int | None]:
        """An empty file that is this process's alone until it has its name; the lock ends with the
        process, so that what a killed one has left is taken over by the next."""
        import fcntl

        path = self._partial(key)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            if not _is_same(descriptor, path):  # renamed between our open and our lock
                yield None
                return
            os.ftruncate(descriptor, 0)
            yield descriptor
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)

    def _tidy(self, key: Key, need_bytes: int) -> None:
        """Make room: old layouts that nobody uses, then the longest unused."""
        total_bytes = need_bytes
        for path, status in self._by_last_use():
            total_bytes += status.st_size
            unused_s = time.time() - status.st_mtime
            if total_bytes > LIMIT_BYTES or (unused_s > STALE_S and _is_stale(path, key)):
                log.info(
                    "packed weights: removing %s, unused for %.0f days", path, unused_s / 86400
                )
                with suppress(OSError):
                    path.unlink()

    def _by_last_use(self) -> list[tuple[Path, os.stat_result]]:
        """The latest first."""
        found = []
        for path in self.folder.glob("*.packed"):
            with suppress(OSError):
                found.append((path, path.stat()))
        return sorted(found, key=lambda each: -each[1].st_mtime)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _is_stale(path: Path, key: Key) -> bool:
    try:
        other = read_header(path).key
    except (OSError, Damaged, msgspec.MsgspecError, UnicodeDecodeError):
        return True
    return (other.layout, other.recipe) != (key.layout, key.recipe)
