"""Totals of what travelled. Owns: nothing. Knows: ends of fetches. Does not know: who fetched."""

from __future__ import annotations

from collections import Counter

from msgspec import structs

from toque.types import Fetched, Transfers


def added(total: Transfers, fetched: Fetched) -> Transfers:
    return Transfers(
        moved_pages=total.moved_pages + fetched.moved_pages,
        moved_bytes=total.moved_bytes + fetched.moved_bytes,
        missing_pages=total.missing_pages + fetched.missing_pages,
        cached_pages=total.cached_pages + fetched.cached_pages,
        failed=dict(Counter(total.failed) + Counter(fetched.failed)),
        timed_out=total.timed_out + fetched.timed_out,
        fetches=total.fetches + 1,
        moves=total.moves,
        seconds=total.seconds + fetched.seconds,
    )


def with_move(total: Transfers) -> Transfers:
    """A request goes on at another engine."""
    return structs.replace(total, moves=total.moves + 1)
