"""Responses that can be asked for again and gone on from.

Owns: what is stored, in order of last use. Knows: sizes. Does not know: HTTP, what a response says.

Bounded in number and bytes: the one unused for longest goes first. Nobody sees what another key has
stored; without keys all share one store.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Stored:
    response: bytes  # JSON
    given: bytes  # JSON: the items of its input
    items: bytes  # JSON: the whole conversation, its output included

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.given) + len(self.items)


def conversation_items(stored: Stored) -> list[Any]:
    items: list[Any] = msgspec.json.decode(stored.items)
    return items


class ResponseStore:
    """Keyed by the owner (the digest of an API key, or nothing) and the response's id."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._stored: OrderedDict[tuple[bytes, str], Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: bytes, response_id: str, stored: Stored) -> None:
        """One that alone is larger than the store is not kept."""
        self.delete(owner, response_id)
        self._stored[owner, response_id] = stored
        self._bytes += stored.size_bytes
        while len(self._stored) > self._max_entries or self._bytes > self._max_bytes:
            _, old = self._stored.popitem(last=False)
            self._bytes -= old.size_bytes

    def get(self, owner: bytes, response_id: str) -> Stored | None:
        found = self._stored.get((owner, response_id))
        if found is not None:
            self._stored.move_to_end((owner, response_id))
        return found

    def delete(self, owner: bytes, response_id: str) -> bool:
        """Whether there was one."""
        found = self._stored.pop((owner, response_id), None)
        if found is not None:
            self._bytes -= found.size_bytes
        return found is not None
