"""The file of a recording: a line of JSON about the engine, then one line per turn of its loop.

Owns: the open file. Knows: the lines' shapes. Does not know: what is hidden in them, who replays.

A turn holds all that the scheduler can depend on: the messages that came, every reading of the
clock, and what the device sampled. Beside them stands the plan that was made, to compare with.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from toque.errors import ConfigError
from toque.telemetry import Wire
from toque.types import StepPlan, ToEngine, TokenId

log = logging.getLogger(__name__)

FORMAT = 1


class Header(Wire, frozen=True, kw_only=True):
    format: int
    model_name: str
    fingerprint: str
    vocab_size: int
    end_token_ids: tuple[TokenId, ...]
    config: dict[str, Any]  # EngineConfig
    prompts: bool  # tokens are the real ones


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """A plan without tokens. Setups: (row, prompt tokens, pages); chunks: (row, start, tokens, new
    pages, samples, scored tokens)."""

    step: int
    setups: tuple[tuple[int, int, tuple[int, ...]], ...]
    chunks: tuple[tuple[int, int, int, tuple[int, ...], bool, int], ...]


def shape_of(plan: StepPlan) -> Shape:
    return Shape(
        plan.step,
        tuple((s.row, s.num_prompt, s.pages) for s in plan.setups),
        tuple(
            (c.row, c.start, c.num_tokens, c.new_pages, c.sample, len(c.targets))
            for c in plan.chunks
        ),
    )


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """What a row got."""

    row: int
    token: TokenId = -1
    complete: bool = False
    failed: bool = False


class Turn(Wire, frozen=True, kw_only=True):
    messages: tuple[ToEngine, ...] = ()
    clock: tuple[float, ...] = ()  # seconds, every reading in order
    plan: Shape | None = None
    outcomes: tuple[Outcome, ...] = ()


class Full(Wire, frozen=True):
    """The last line of a recording that reached its size."""


Line = Header | Turn | Full


class Tape:
    """Writes lines until `most_bytes`; then, or when the disk fails, it says so and ends. An engine
    never fails for its recording's sake."""

    def __init__(self, path: Path, most_bytes: int, header: Header) -> None:
        """Raises ConfigError when the file cannot be written. Only its owner may read it."""
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            # Without a buffer: what led to a crash is in the file.
            self._file: Any = os.fdopen(number, "wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from error
        self._path = path
        self._left_bytes = most_bytes
        self._encoder = msgspec.json.Encoder()
        self.write(header)

    @property
    def ended(self) -> bool:
        return self._file is None

    def write(self, line: Line) -> None:
        if self._file is None:
            return
        data = self._encoder.encode(line) + b"\n"
        self._left_bytes -= len(data)
        try:
            if self._left_bytes < 0:
                self._file.write(self._encoder.encode(Full()) + b"\n")
                log.warning("the recording %s is full: it ends here", self._path)
                self.close()
                return
            self._file.write(data)
        except OSError as error:
            log.warning("the recording %s ends here: %s", self._path, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read(path: Path) -> tuple[Header, Iterator[Turn]]:
    """Raises ConfigError where the file is none of ours or damaged; a line that was cut off at its
    end is left out."""
    decoder = msgspec.json.Decoder(Line)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    lines = _lines(path, decoder, file)
    header = next(lines, None)
    if not isinstance(header, Header) or header.format != FORMAT:
        raise ConfigError(f"{path} is no recording of this version of toque")
    return header, (line for line in lines if isinstance(line, Turn))


def _lines(path: Path, decoder: msgspec.json.Decoder[Line], file: Any) -> Iterator[Line]:
    with file:
        for number, data in enumerate(file, 1):
            if not data.endswith(b"\n"):
                return  # the engine was killed while it wrote
            try:
                yield decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}, line {number}, is damaged: {error}") from error
