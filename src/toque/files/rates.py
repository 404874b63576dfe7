"""A rate that was measured at an earlier start: one small file for each thing that was measured.

Owns: that file. Knows: when a number is one. Does not know: what was measured, or how.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

NOTICEABLE = 1.1  # what is more by less than this is the same
VALID_S = 30 * 86400.0  # then it is measured again: machines and systems change


class _Rate(msgspec.Struct, frozen=True):
    of: tuple[str, ...]
    per_s: float
    measured_unix_s: float


class RememberedRate:
    def __init__(self, folder: Path, of: Sequence[str]) -> None:
        """`of`: everything that decides the rate, the machine included."""
        self._of = tuple(of)
        name = hashlib.sha256("\n".join(self._of).encode()).hexdigest()[:32]
        self._path = folder / f"{name}.json"

    def known(self) -> float | None:
        try:
            rate = msgspec.json.decode(self._path.read_bytes(), type=_Rate)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        is_fresh = 0 <= time.time() - rate.measured_unix_s < VALID_S
        return rate.per_s if rate.of == self._of and rate.per_s > 0 and is_fresh else None

    def raise_to(self, per_s: float) -> bool:
        """What was seen later counts if it is clearly more: other programs can make a measurement
        too low, never too high. Returns whether it did."""
        known = self.known()
        if known is not None and per_s <= NOTICEABLE * known:
            return False
        self.remember(per_s)
        return True

    def remember(self, per_s: float) -> float:
        """Returns it. Where nothing can be written, it is measured again at the next start."""
        rate = _Rate(self._of, per_s, time.time())
        draft = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(rate))
            draft.replace(self._path)
        except OSError:
            pass
        return per_s
