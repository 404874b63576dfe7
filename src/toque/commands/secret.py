"""The secret that servers and engines on different hosts share.

Owns: nothing. Knows: where it may be given. Does not know: what it protects.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from toque.errors import ConfigError

VARIABLE = "TOQUE_SECRET"
SHORTEST = 16  # characters
HOW = "make one: (umask 077; openssl rand -hex 32 > secret), and give both --secret-file secret"


def shared_secret(path: str | None) -> bytes:
    """32 bytes made of the file's text, or of TOQUE_SECRET. Raises ConfigError where there is none,
    where it can be guessed, or where others can read it."""
    if path is not None:
        text, where = _read(Path(path)), path
    else:
        text, where = os.environ.get(VARIABLE, ""), VARIABLE
    text = text.strip()
    if not text:
        raise ConfigError(f"servers and engines on several hosts share a secret: {HOW}")
    if len(text) < SHORTEST:
        raise ConfigError(f"the secret in {where} has {len(text)} characters: {HOW}")
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"toque-secret").digest()


def _read(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{path} can be read by others: chmod 600 {path}")
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret in {path} cannot be read: {error}") from error
