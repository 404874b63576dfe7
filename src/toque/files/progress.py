"""How a long transfer is shown: a Protocol of three methods, and a display on standard error.

Owns: what has been drawn. Knows: byte counts. Does not know: what is being transferred.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

POLL_S = 0.2
LATE_S = 0.3


class Progress(Protocol):
    """One transfer after the other: start, advance as often as wanted, done."""

    def start(self, total_bytes: int, label: str) -> None:
        """Begin to show `label`; a total of 0 means that the size is not known."""

    def advance(self, size_bytes: int) -> None:
        """So many bytes more. May be called from another thread than `start`."""

    def done(self) -> None:
        """The transfer is over, well or not."""


def terminal_progress() -> Progress:
    """A bar where standard error is a terminal, else plain lines."""
    return BarProgress() if sys.stderr.isatty() else LineProgress()


def passing_progress() -> Progress | None:
    """A bar that is gone once it is full, where standard error is a terminal; a log needs none.
    What is quick shows none, and does not wait for the library that draws it."""
    return LateBar() if sys.stderr.isatty() else None


class BarProgress:
    """A bar with rate and remaining time."""

    def __init__(self, stays: bool = True) -> None:
        self._stays = stays
        self._bar: Any = (
            None  # rich.progress.Progress: imported only when there is something to show
        )

    def start(self, total_bytes: int, label: str) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=not self._stays,
        )
        self._bar.add_task(label, total=total_bytes or None)
        self._bar.start()

    def advance(self, size_bytes: int) -> None:
        self._bar.advance(self._bar.task_ids[0], size_bytes)

    def done(self) -> None:
        self._bar.stop()


class LateBar:
    """A passing bar that appears once the transfer has taken LATE_S."""

    def __init__(self, bar: BarProgress | None = None) -> None:
        self._bar = bar or BarProgress(stays=False)
        self._shown = False
        self._began_s, self._total_bytes, self._label = 0.0, 0, ""
        self._before_bytes = 0

    def start(self, total_bytes: int, label: str) -> None:
        self._began_s, self._total_bytes, self._label = time.monotonic(), total_bytes, label

    def advance(self, size_bytes: int) -> None:
        self._before_bytes += size_bytes
        if not self._shown and time.monotonic() - self._began_s > LATE_S:
            self._bar.start(self._total_bytes, self._label)
            self._shown = True
            size_bytes = self._before_bytes
        if self._shown:
            self._bar.advance(size_bytes)

    def done(self) -> None:
        if self._shown:
            self._bar.done()


class LineProgress:
    """A line at the start and one per tenth: readable in a log."""

    def __init__(self) -> None:
        self._label = ""
        self._total_bytes = 0
        self._seen_bytes = 0

    def start(self, total_bytes: int, label: str) -> None:
        self._label, self._total_bytes, self._seen_bytes = label, total_bytes, 0
        size = f" ({total_bytes / 1e6:.0f} MB)" if total_bytes else ""
        print(f"{label}{size}", file=sys.stderr, flush=True)

    def advance(self, size_bytes: int) -> None:
        before, self._seen_bytes = self._seen_bytes, self._seen_bytes + size_bytes
        if not self._total_bytes:
            return
        tenths = 10 * self._seen_bytes // self._total_bytes
        if tenths > 10 * before // self._total_bytes:
            print(f"{self._label}: {10 * tenths} %", file=sys.stderr, flush=True)

    def done(self) -> None:
        pass


class Meter:
    """One transfer towards a known total: counts reported as "so many so far", never backwards."""

    def __init__(self, progress: Progress | None, total_bytes: int, label: str) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._label = label
        self._shown_bytes = 0

    def __enter__(self) -> Meter:
        if self._progress:
            self._progress.start(self._total_bytes, self._label)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress:
            self._progress.done()

    def reach(self, so_far_bytes: int) -> None:
        more_bytes = min(so_far_bytes, self._total_bytes) - self._shown_bytes
        if self._progress and more_bytes > 0:
            self._shown_bytes += more_bytes
            self._progress.advance(more_bytes)

    @contextmanager
    def watch(self, folder: Path, base_bytes: int = 0) -> Iterator[None]:
        """While inside, follow the largest file under `folder` (some program downloads into it)."""
        stop = threading.Event()

        def follow() -> None:
            while not stop.wait(POLL_S):
                self.reach(base_bytes + _largest_file_bytes(folder))

        thread = threading.Thread(target=follow, name="toque-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _largest_file_bytes(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except OSError:  # moved away between listing and looking
            continue
    return max(sizes)
