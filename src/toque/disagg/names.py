"""What a page is of: a name for all tokens up to its end, and for who may share it.

Owns: nothing. Knows: token ids, cache salts. Does not know: pages' places, contents, transports.

A checksum says that bytes are those that were announced. Made with the page's name, it says that
they are those of these tokens as well: an announcement that reaches the wrong request, or is of
another prompt, verifies no more than a wrong byte does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from toque.types import TokenId

NAME_BYTES = 16


def page_names(tokens: Sequence[TokenId], salt: str, block_size: int) -> list[bytes]:
    """One for each full page, in order of position: each is of the one before and its own tokens.
    O(tokens)."""
    name = hashlib.blake2b(salt.encode(), digest_size=NAME_BYTES).digest()
    ids = np.asarray(tokens, dtype="<u4").tobytes()
    size = 4 * block_size
    names: list[bytes] = []
    for begin in range(0, len(ids) // size * size, size):
        page = ids[begin : begin + size]
        name = hashlib.blake2b(page, key=name, digest_size=NAME_BYTES).digest()
        names.append(name)
    return names
