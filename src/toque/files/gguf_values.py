"""The key-value part of a GGUF file: a cursor that never leaves the file, and lazy string arrays.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A vocabulary of 150,000 entries
is one array of length-prefixed strings; the cursor only walks over its lengths (what follows lies
behind them), and a string is decoded when somebody asks for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from toque.errors import ModelError
from toque.files.mapping import Bytes

STRING, ARRAY, BOOL = 8, 9, 7
# Value type id -> the code that `struct` and numpy share for it.
SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    BOOL: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
MAX_KEY_BYTES = 65535  # the format's own limit
MAX_NESTING = 4  # arrays of arrays; nothing known uses even two
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a mapped file; every read is checked against the end of the file first."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.data = data
        self.view = data.data
        self.position = 0  # bytes from the start of the file

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: damaged or not a GGUF file: {message}")

    @property
    def left_bytes(self) -> int:
        return len(self.view) - self.position

    def take(self, size_bytes: int, what: str) -> int:
        """Step over `size_bytes` bytes and return where they begin."""
        if size_bytes > self.left_bytes:
            raise self.error(
                f"{what} needs {size_bytes} bytes at offset {self.position}, "
                f"but the file ends after {self.left_bytes}"
            )
        start = self.position
        self.position += size_bytes
        return start

    def count(self, what: str, least_bytes_each: int) -> int:
        """A 64-bit count of things that each take at least so many bytes of what is left."""
        count = self.u64(what)
        if count * least_bytes_each > self.left_bytes:
            raise self.error(f"{what} is {count}, more than fit into the file")
        return count

    def scalar(self, type_id: int, what: str) -> Any:
        code = SCALARS[type_id]
        start = self.take(struct.calcsize(code), what)
        if type_id == BOOL and self.view[start] > 1:
            raise self.error(f"{what} is a bool of value {self.view[start]}")
        return struct.unpack_from(code, self.view, start)[0]

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.view, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.view, self.take(8, what))[0])

    def string(self, what: str, most_bytes: int | None = None) -> str:
        size_bytes = self.u64(f"the length of {what}")
        if most_bytes is not None and size_bytes > most_bytes:
            raise self.error(f"{what} is {size_bytes} bytes long (at most {most_bytes})")
        start = self.take(size_bytes, what)
        try:
            return str(self.view[start : start + size_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {error}") from error


class StringArray(Sequence[str]):
    """An array of strings that lies in a mapped file; each access decodes (keep `list(...)`).

    Access raises ModelError for an entry that is not UTF-8.
    """

    __slots__ = ("_starts", "_view", "_what")

    def __init__(self, view: memoryview, starts: NDArray[np.int64], what: str) -> None:
        self._view = view
        self._starts = starts  # [entries]: first byte of each text; its length lies before it
        self._what = what

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._decode(start) for start in self._starts[index].tolist()]
        return self._decode(int(self._starts[index]))

    def __iter__(self) -> Iterator[str]:
        try:
            return iter(_all_texts(self._view, self._starts))
        except (UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ModelError(f"{self._what}: an entry is not UTF-8: {error}") from error

    def __repr__(self) -> str:
        return f"StringArray({len(self)} entries of {self._what})"

    def _decode(self, start: int) -> str:
        (size_bytes,) = _U64.unpack_from(self._view, start - 8)
        try:
            return str(self._view[start : start + size_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._what}: an entry is not UTF-8: {error}") from error


def _all_texts(view: memoryview, starts: NDArray[np.int64]) -> list[str]:
    """Neighbouring texts, each behind its length in 8 bytes, decoded in one go.

    A vocabulary has hundreds of thousands, and a loop over them would be a third of a server's
    start. So a copy of the bytes is turned into MessagePack, whose decoder is compiled: the 8 bytes
    of each length become nil, nil, nil and the head of a string with a 32-bit length.
    """
    if not len(starts):
        return []
    begin = int(starts[0]) - 8
    (last_bytes,) = _U64.unpack_from(view, int(starts[-1]) - 8)
    data = np.frombuffer(view[begin : int(starts[-1]) + last_bytes], np.uint8)
    packed = np.concatenate([np.zeros(5, np.uint8), data])
    heads = (starts - begin - 8 + 5)[:, None] + np.arange(8)  # [entries, 8]: places of lengths
    lengths = packed[heads]  # [entries, 8], the lowest byte first
    if lengths[:, 4:].any():
        raise UnicodeDecodeError("utf-8", b"", 0, 0, "longer than 4 GiB")
    packed[:5] = np.frombuffer(struct.pack(">BI", 0xDD, 4 * len(starts)), np.uint8)
    packed[heads[:, :4]] = np.array([0xC0, 0xC0, 0xC0, 0xDB], np.uint8)
    packed[heads[:, 4:]] = lengths[:, 3::-1]
    texts: list[str] = msgspec.msgpack.decode(packed.data)[3::4]
    return texts


def read_value(cursor: Cursor, key: str) -> Any:
    """One typed value: int, float, bool, str, a numpy array of numbers, or a sequence of str.

    Raises ModelError for an unknown type and for anything that does not fit into the file.
    """
    type_id = cursor.u32(f"the type of {key!r}")
    if type_id == ARRAY:
        return _read_array(cursor, key, 1)
    if type_id == STRING:
        return cursor.string(f"the value of {key!r}")
    if type_id not in SCALARS:
        raise cursor.error(f"{key!r} has the unknown value type {type_id}")
    return cursor.scalar(type_id, f"the value of {key!r}")


def _read_array(cursor: Cursor, key: str, depth: int) -> Any:
    type_id = cursor.u32(f"the element type of {key!r}")
    what = f"the length of {key!r}"
    if type_id == STRING:
        return _skip_strings(cursor, key, cursor.count(what, 8))
    if type_id == ARRAY:
        if depth == MAX_NESTING:
            raise cursor.error(f"{key!r} nests arrays more than {MAX_NESTING} deep")
        return [_read_array(cursor, key, depth + 1) for _ in range(cursor.count(what, 12))]
    if type_id not in SCALARS:
        raise cursor.error(f"{key!r} has elements of the unknown value type {type_id}")
    return _view_numbers(cursor, key, type_id, cursor.count(what, _size_bytes(type_id)))


def _size_bytes(type_id: int) -> int:
    return struct.calcsize(SCALARS[type_id])


def _view_numbers(cursor: Cursor, key: str, type_id: int, length: int) -> NDArray[Any]:
    size_bytes = length * _size_bytes(type_id)
    start = cursor.take(size_bytes, f"the array {key!r}")
    raw = cursor.data[start : start + size_bytes]
    if type_id == BOOL and (raw > 1).any():
        raise cursor.error(f"{key!r} has bools that are neither 0 nor 1")
    return raw.view(np.dtype(SCALARS[type_id]))  # [length]


def _skip_strings(cursor: Cursor, key: str, length: int) -> StringArray:
    # The only loop that runs once per vocabulary entry: kept free of calls into the cursor.
    view, unpack, last = cursor.view, _U64.unpack_from, len(cursor.view) - 8
    position = cursor.position
    starts: list[int] = []
    start_at = starts.append
    for _ in range(length):
        if position > last:
            raise cursor.error(f"the strings of {key!r} run over the end of the file")
        start_at(position + 8)
        position += 8 + unpack(view, position)[0]
    if position > len(view):
        raise cursor.error(f"the last string of {key!r} runs over the end of the file")
    cursor.position = position
    return StringArray(view, np.array(starts, dtype=np.int64), f"{cursor.path}: {key!r}")
