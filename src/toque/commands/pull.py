"""`toque pull`: have a model's files here, checked."""

from __future__ import annotations


def pull(model: str) -> int:
    from toque.files.fetch import locate
    from toque.files.progress import terminal_progress

    print(locate(model, progress=terminal_progress()).path)
    return 0
