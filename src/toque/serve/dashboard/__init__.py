"""The page at `/`: static files, and the stream of numbers that it draws."""

from __future__ import annotations

from importlib import resources

EVENTS_PATH = "/dashboard/events"
_STATIC = resources.files(__name__).joinpath("static")
PAGE_FILES: dict[str, bytes] = {
    entry.name: entry.read_bytes() for entry in _STATIC.iterdir() if entry.is_file()
}
PAGE_PATHS = frozenset({"/", *(f"/dashboard/{name}" for name in PAGE_FILES)})
