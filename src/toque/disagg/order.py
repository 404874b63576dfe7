"""How an engine is told to share: the part of its orders that this package understands."""

from __future__ import annotations

import msgspec

TRANSPORTS = ("auto", "shm", "tcp")


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Passed to an engine at its start, never on a command line: it holds the secret."""

    secret: bytes
    transport: str = "auto"  # auto: shared memory where it reaches, else TCP
    host: str = "127.0.0.1"  # where pages are served over TCP
    role: str = "both"  # what the engine says of itself; what it does is decided by its orders
