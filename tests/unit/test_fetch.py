"""Fetching a catalogue model: resumed, checked, atomic, offline. pip reads wheels from a folder."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toque.errors import ModelError
from toque.files import fetch, hub, progress, store, wheels
from toque.files.catalog import CatalogEntry, HubSource, WheelPart, WheelSource
from toque.files.fetch import Located, fetch_entry, locate
from toque.files.progress import Meter

CONTENT = bytes(range(256)) * 40  # 10240 bytes, cut into two parts
HUB = HubSource(repo="nobody/nothing", revision="0" * 40)
WHEELS = WheelSource(
    parts=(
        WheelPart(requirement="toque-test-part1==1.0", member="toque_test_part1/part1.bin"),
        WheelPart(requirement="toque-test-part2==1.0", member="toque_test_part2/part2.bin"),
    )
)


def make_entry(**changes: Any) -> CatalogEntry:
    fields: dict[str, Any] = {
        "name": "tiny",
        "aliases": ("Tiny",),
        "file": "tiny.gguf",
        "size_bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "license": "Apache-2.0",
        "sources": (HUB, WHEELS),
    }
    return CatalogEntry(**(fields | changes))


def write_wheel(folder: Path, number: int, content: bytes) -> Path:
    name = f"toque_test_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/part{number}.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index; the hub is switched off."""
    folder = tmp_path / "index"
    folder.mkdir()
    half = len(CONTENT) // 2
    write_wheel(folder, 1, CONTENT[:half])
    write_wheel(folder, 2, CONTENT[half:])
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home" / "models" / "tiny"


class Recorder:
    """A Progress that remembers, and may interrupt as Ctrl-C does."""

    def __init__(self, interrupt_at_bytes: int | None = None) -> None:
        self.transfers: list[list[Any]] = []  # [label, total, seen, whether done]
        self._interrupt_at_bytes = interrupt_at_bytes

    def start(self, total_bytes: int, label: str) -> None:
        self.transfers.append([label, total_bytes, 0, False])

    def advance(self, size_bytes: int) -> None:
        self.transfers[-1][2] += size_bytes
        limit = self._interrupt_at_bytes
        if limit is not None and self.transfers[-1][2] >= limit:
            raise KeyboardInterrupt

    def done(self) -> None:
        self.transfers[-1][3] = True


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def forbid_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was downloaded")

    monkeypatch.setattr(wheels, "_run", refuse)
    monkeypatch.setattr(hub, "_download", refuse)


def deliver(monkeypatch: pytest.MonkeyPatch, content: Callable[[], bytes]) -> list[str]:
    """Replace the sources by one that writes `content()`; returns the list of its calls."""
    calls: list[str] = []

    def source(_: object, folder: store.ModelFolder, meter: Meter) -> Path:
        calls.append("fetch")
        folder.partial.write_bytes(content())
        return folder.partial

    monkeypatch.setattr(fetch, "_from_source", source)
    return calls


# ------------------------------------------------------------------------------ through pip


def test_parts_are_joined_and_only_the_model_its_stamp_and_licence_stay(
    index: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    path = fetch_entry(make_entry(), recorder)
    assert path == home / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(home) == {"tiny.gguf", "tiny.gguf.ok", "LICENSE", ".lock"}
    assert "Apache License" in (home / "LICENSE").read_text()
    # The hub delivered nothing; the wheels and the check reached their total, and all ended.
    assert [seen for _, _, seen, _ in recorder.transfers] == [0, len(CONTENT), len(CONTENT)]
    assert all(done for *_, done in recorder.transfers)

    forbid_downloads(monkeypatch)
    monkeypatch.setattr(store.ModelFolder, "_hash", lambda *_: pytest.fail("hashed again"))
    assert fetch_entry(make_entry()) == path, "the second start needs no network and no hashing"


def test_an_interrupted_fetch_goes_on_with_the_parts_that_are_missing(
    index: Path, home: Path
) -> None:
    half = len(CONTENT) // 2
    with pytest.raises(KeyboardInterrupt):
        fetch_entry(make_entry(), Recorder(interrupt_at_bytes=half))
    assert not (home / "tiny.gguf").exists()
    with (home / "tiny.gguf.partial").open("ab") as file:
        file.write(b"what a killed process had begun to write")
    (index / "toque_test_part1-1.0-py3-none-any.whl").unlink()
    assert fetch_entry(make_entry()).read_bytes() == CONTENT
    assert files_in(home) == {"tiny.gguf", "tiny.gguf.ok", "LICENSE", ".lock"}


def test_every_source_that_failed_is_named_with_its_reason(index: Path) -> None:
    (index / "toque_test_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError) as failure:
        fetch_entry(make_entry())
    for word in ("nobody/nothing", "HF_HUB_OFFLINE is set", "toque-test-part2==1.0", "ERROR:"):
        assert word in str(failure.value)


def test_a_wrong_hash_is_refused_and_the_file_removed(index: Path, home: Path) -> None:
    with pytest.raises(ModelError, match=r"sha256 is .* instead of 0000"):
        fetch_entry(make_entry(sha256="0" * 64))
    assert not {name for name in files_in(home) if name.startswith("tiny.gguf")}


def test_pip_is_ended_when_the_fetch_is_interrupted(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def communicate(self, *_: Any, **__: Any) -> Any:
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(wheels.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_entry(make_entry())
    assert started[0].returncode is not None


# -------------------------------------------------------------------------- without downloads


@pytest.mark.parametrize("content", [b"", CONTENT[:-1], CONTENT + b"x", b"x" * len(CONTENT)])
def test_size_and_hash_decide_whatever_the_source_says(
    index: Path, home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    deliver(monkeypatch, lambda: content)
    with pytest.raises(ModelError, match="instead of"):
        fetch_entry(make_entry())
    assert files_in(home) == {".lock"}


def test_what_an_earlier_try_left_goes_when_another_source_delivers(
    index: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(parents=True)
    for name in ("tiny.gguf.partial", "tiny.gguf.partial.json"):
        (home / name).write_text("left")

    def source(_: object, folder: store.ModelFolder, meter: Meter) -> Path:
        folder.work.mkdir()
        (folder.work / "other").write_bytes(CONTENT)
        return folder.work / "other"

    monkeypatch.setattr(fetch, "_from_source", source)
    fetch_entry(make_entry())
    assert files_in(home) == {"tiny.gguf", "tiny.gguf.ok", "LICENSE", ".lock"}


def test_too_little_disk_space_is_refused_first_with_both_numbers(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage(0, 0, 3_000_000))
    calls = deliver(monkeypatch, lambda: CONTENT)
    with pytest.raises(ModelError, match=r"needs 130 MB of disk space .* only 3 MB are free"):
        fetch_entry(make_entry(size_bytes=80_000_000))
    assert calls == []


def test_a_file_without_stamp_is_hashed_and_kept(
    index: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = deliver(monkeypatch, lambda: CONTENT)
    home.mkdir(parents=True)
    (home / "tiny.gguf").write_bytes(CONTENT)
    assert fetch_entry(make_entry()).read_bytes() == CONTENT
    assert calls == []
    assert store.ModelFolder(make_entry()).is_trusted()


@pytest.mark.parametrize("changed", [b"x" * len(CONTENT), b"short"])
def test_a_file_that_was_changed_after_its_check_is_fetched_again(
    index: Path, home: Path, monkeypatch: pytest.MonkeyPatch, changed: bytes
) -> None:
    calls = deliver(monkeypatch, lambda: CONTENT)
    path = fetch_entry(make_entry())
    stamped_ns = path.stat().st_mtime_ns
    path.write_bytes(changed)
    os.utime(path, ns=(stamped_ns + 1, stamped_ns + 1))
    assert fetch_entry(make_entry()).read_bytes() == CONTENT
    assert calls == ["fetch", "fetch"]


def test_a_new_version_in_the_catalogue_does_not_trust_the_old_stamp(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = CONTENT[::-1]
    calls = deliver(monkeypatch, lambda: CONTENT if len(calls) == 1 else fresh)
    fetch_entry(make_entry())
    newer = make_entry(sha256=hashlib.sha256(fresh).hexdigest())
    assert fetch_entry(newer).read_bytes() == fresh


def test_two_fetches_at_once_download_once_and_both_get_the_file(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly() -> bytes:
        time.sleep(0.3)
        return CONTENT

    calls = deliver(monkeypatch, slowly)
    found: list[bytes] = []
    # The lock is per open file, so two threads meet it as two processes do.
    threads = [
        threading.Thread(target=lambda: found.append(fetch_entry(make_entry()).read_bytes()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert calls == ["fetch"]


def test_a_home_that_cannot_be_written_is_named(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("TOQUE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="file"):
        fetch_entry(make_entry())


@pytest.mark.parametrize(
    ("member", "room_bytes", "says"),
    [("other.bin", 100, r"no other\.bin"), ("toque_test_part1/part1.bin", 9, "has 10 bytes")],
)
def test_a_wheel_that_is_not_what_the_catalogue_says_is_refused(
    tmp_path: Path, member: str, room_bytes: int, says: str
) -> None:
    wheel = write_wheel(tmp_path, 1, b"0123456789")
    part = WheelPart(requirement="toque-test-part1==1.0", member=member)
    with (tmp_path / "out").open("w+b") as file, pytest.raises(ModelError, match=says):
        wheels._append(wheel, part, file, room_bytes)
    assert (tmp_path / "out").read_bytes() == b""


def test_a_damaged_wheel_is_refused_and_removed(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, 1, os.urandom(5000))
    content = bytearray(wheel.read_bytes())
    content[2000] ^= 255
    wheel.write_bytes(content)
    with (tmp_path / "out").open("w+b") as file, pytest.raises(ModelError, match="damaged"):
        wheels._append(wheel, WHEELS.parts[0], file, 5000)
    assert not wheel.exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TOQUE_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/toque"),
        ({"HOME": "/c"}, "/c/.cache/toque"),
    ],
)
def test_models_lie_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("TOQUE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert store.toque_home() == Path(expected)


# ------------------------------------------------------------------------------------ locate


def test_a_local_path_wins_over_a_catalogue_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert locate("smollm2") == Located(tmp_path / "smollm2", ("smollm2",))
    file = tmp_path / "own.gguf"
    file.touch()
    assert locate(str(file)) == Located(file, (str(file), "own"))


def test_a_catalogue_model_is_served_under_all_its_names(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(monkeypatch, lambda: CONTENT)
    monkeypatch.setattr(
        fetch, "find_entry", lambda name: make_entry() if name in ("tiny", "Tiny") else None
    )
    assert locate("Tiny").served_names == ("tiny", "Tiny")


@pytest.mark.parametrize(
    ("model", "repo", "file"),
    [
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", None),
        ("a/b:c.Q4_K_M.gguf", "a/b", "c.Q4_K_M.gguf"),
        ("a/b/c.gguf", "a/b", "c.gguf"),
        ("a/b/sub/c.gguf", "a/b", "sub/c.gguf"),
        ("a/b:sub/c.gguf", "a/b", "sub/c.gguf"),
    ],
)
def test_hub_names_are_split_into_repository_and_file(
    monkeypatch: pytest.MonkeyPatch, model: str, repo: str, file: str | None
) -> None:
    asked: list[tuple[str, str | None]] = []

    def fake(repo: str, file: str | None, progress: object) -> Path:
        asked.append((repo, file))
        return Path("there")

    monkeypatch.setattr(fetch, "fetch_repo", fake)
    assert locate(model) == Located(Path("there"), (model,))
    assert asked == [(repo, file)]


@pytest.mark.parametrize(
    "model",
    [
        *("", "gpt-9", "./absent.gguf", "models/absent.gguf", "/abs/b", "x" * 5000, "a\0b"),
        *("a/../b", "a/b:../c.gguf", "a/b:Q4_K_M", "a/b/c"),
    ],
)
def test_an_unknown_model_is_answered_with_what_is_known(model: str) -> None:
    with pytest.raises(ModelError) as refusal:
        locate(model)
    for word in ("qwen2.5-coder-0.5b", "smollm2", "owner/repo:file.gguf"):
        assert word in str(refusal.value)


# --------------------------------------------------------------------------------- the hub


def test_a_hub_whose_name_does_not_resolve_in_time_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub, "PROBE_LIMIT_S", 0.05)
    monkeypatch.setattr(hub, "_probe", lambda _: answer.wait(30))
    assert "does not answer" in (hub.why_unreachable() or "")
    answer.set()


def test_a_hub_that_refuses_connections_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1/")
    assert "http://127.0.0.1:1: " in (hub.why_unreachable() or "")


def test_a_folder_with_several_gguf_files_on_the_hub_asks_for_one() -> None:
    with pytest.raises(ModelError, match=r"name one, e\.g\. a/b:x\.gguf"):
        hub._only_gguf("a/b", ["x.gguf", "y.gguf", "README.md"])
    with pytest.raises(ModelError, match="pickle"):
        hub._only_gguf("a/b", ["pytorch_model.bin"])


HUB_SERVER = Path(__file__).with_name("hub_server.py")


def test_the_hub_path_downloads_caches_and_works_offline_afterwards(tmp_path: Path) -> None:
    """The real huggingface_hub against a small server that answers as the hub does."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HF_", "TRANSFORMERS_")) and not name.lower().endswith("_proxy")
    }
    environment |= {"HF_HOME": str(tmp_path / "hf"), "TOQUE_HOME": str(tmp_path / "home")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, str(HUB_SERVER)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["catalogue"] == "tiny.gguf"
    assert result["left in its folder"] == [".lock", "LICENSE", "tiny.gguf", "tiny.gguf.ok"]
    assert result["folder"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert result["gguf"] == "only.gguf"
    assert result["named gguf"] == "b.gguf"
    assert "name one" in result["several"]
    assert "missing/repo" in result["missing"]
    assert result["offline folder"] == result["folder"]
    assert result["offline gguf"] == ["only.gguf"]
    assert "does not hold this model" in result["offline missing"]


# -------------------------------------------------------------------------------- progress


def test_importing_fetch_stays_light() -> None:
    """A start with a local model must not pay for libraries that only a download needs."""
    code = (
        "import sys, toque.files.fetch\n"
        "print({'numpy', 'rich', 'huggingface_hub', 'torch'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_a_meter_never_goes_back_nor_over_its_total() -> None:
    recorder = Recorder()
    with Meter(recorder, 100, "x") as meter:
        for so_far in (10, 5, 60, 500):
            meter.reach(so_far)
    assert recorder.transfers == [["x", 100, 100, True]]


def test_a_meter_follows_the_largest_file_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "POLL_S", 0.01)
    recorder = Recorder()
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "large").write_bytes(b"x" * 30)
    with Meter(recorder, 100, "x") as meter, meter.watch(tmp_path, base_bytes=50):
        deadline = time.monotonic() + 60
        while recorder.transfers[0][2] < 80 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert recorder.transfers == [["x", 100, 80, True]]


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.terminal_progress()
    with Meter(shown, 2_000_000, "fetching tiny") as meter:
        meter.reach(1_000_000)
        meter.reach(2_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["fetching tiny (2 MB)", "fetching tiny: 50 %", "fetching tiny: 100 %"]


def test_the_bar_is_drawn_on_standard_error_only(capsys: pytest.CaptureFixture[str]) -> None:
    with Meter(progress.BarProgress(), 2_000_000, "fetching tiny") as meter:
        meter.reach(2_000_000)
    output = capsys.readouterr()
    assert output.out == ""
    assert "fetching tiny" in output.err
