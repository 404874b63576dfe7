"""Comparisons: medians of paired rounds, the better peer, servers that start and end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import compare
from bench.comparison import Comparison, Measurement, show
from bench.processes import Memory, cpu_seconds, memory, tree
from bench.servers import Recipe, Server, free_port, llama_recipe, toque_recipe
from bench.workloads import WORKLOADS, Workload

SINGLE, PREFILL = WORKLOADS["single"], WORKLOADS["prefill"]


def measurement(engine: str, out: float, prompt: float = 0.0, ttft: float | None = 1.0) -> Any:
    result: dict[str, Any] = {"out_tok_per_s": out, "prompt_tok_per_s": prompt, "errors": 0}
    result |= {"ttft_p50_ms": ttft, "ttft_p99_ms": ttft, "itl_p50_ms": None, "itl_p99_ms": None}
    return Measurement(engine, result, "m", 1.0, 1.5, 2.0, Memory(100.0, 90.0, 80.0))


def test_the_ratio_is_the_median_of_the_rounds_and_the_better_peer_counts() -> None:
    comparison = Comparison(["toque", "a", "b"], [SINGLE])
    # The machine is half as fast in the second round: each round's own ratio does not care.
    for ours, a, b in [(40, 10, 20), (20, 5, 10), (60, 10, 20)]:
        for engine, rate in (("toque", ours), ("a", a), ("b", b)):
            comparison.add(SINGLE, measurement(engine, rate))
    assert comparison.best_peer(SINGLE) == "b"
    assert comparison.ratio(SINGLE) == pytest.approx(2.0)
    medians = comparison.medians()["single"]
    assert medians["engines"]["toque"]["tok_per_s"] == 40
    assert medians["engines"]["a"]["itl_p50_ms"] is None


def test_engines_take_turns_and_builds_of_the_peer_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rounds of two workloads with two builds: who was measured when, and what is printed."""
    names = ("build", "build-noomp")
    binaries = [tmp_path / name / "bin" / "llama-server" for name in names]
    for binary in binaries:
        binary.parent.mkdir(parents=True)
        binary.touch()
    located = [tmp_path / "ours.gguf", tmp_path / "theirs.gguf"]
    monkeypatch.setattr(compare, "locate", lambda name: Namespace(path=tmp_path / name))
    monkeypatch.setattr(compare, "vocabulary", lambda model: 5000)
    seen: list[tuple[str, str, int, str]] = []
    rates = {"toque": [30.0, 66.0], "build": [10.0, 11.0], "build-noomp": [15.0, 22.0]}

    def measured(engine: compare.Engine, workload: Workload, seed: int, *_: object) -> Measurement:
        seen.append((engine.name.split()[-1], workload.name, seed, engine.model.name))
        assert workload.requests == 3
        return measurement(engine.name, rates[engine.name.split()[-1]][seed])

    monkeypatch.setattr(compare, "measure", measured)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    workloads = ["batch32", "prefix"]
    flags = ["--workload", *workloads, "--rounds", "2", "--requests", "3", "--peer"]
    files = [located[0].name, "--peer-model", located[1].name]
    assert compare.main([*files, *flags, *map(str, binaries)]) == 0
    order = ["toque", *names]
    turns = [(one, w, 0) for w in workloads for one in order]
    turns += [(one, w, 1) for w in workloads for one in order[::-1]]
    assert [turn[:3] for turn in seen] == turns
    assert all((model == "ours.gguf") == (engine == "toque") for engine, _, _, model in seen)
    printed = json.loads(capsys.readouterr().out)
    for workload in workloads:
        found = printed["medians"][workload]
        assert found["best_peer"] == "llama-server build-noomp"
        assert found["ratios"] == [2.0, 3.0] and found["ratio"] == 2.5
        assert found["engines"]["toque"]["tok_per_s"] == 48.0
    assert printed["engines"]["llama-server build"]["model"] == "theirs.gguf"
    assert compare.peer_names([binaries[0], binaries[0]]) == ["llama-server 1", "llama-server 2"]


def test_prefill_is_judged_by_prompt_tokens() -> None:
    comparison = Comparison(["toque", "a"], [PREFILL])
    comparison.add(PREFILL, measurement("toque", 1.0, prompt=300.0))
    comparison.add(PREFILL, measurement("a", 10.0, prompt=100.0))
    assert comparison.ratio(PREFILL) == pytest.approx(3.0)


def test_the_table_says_that_there_is_no_peer(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison(["toque"], [SINGLE])
    comparison.add(SINGLE, measurement("toque", 12.5))
    assert comparison.ratio(SINGLE) is None
    show(comparison)
    assert "12.5" in (printed := capsys.readouterr().err)
    assert "only toque was measured" in printed


def test_the_peer_gets_its_best_flags() -> None:
    workload = WORKLOADS["batch16"]
    argv = llama_recipe("l", Path("llama-server"), Path("m.gguf"), 81, 2, workload).argv
    flags = dict(zip(argv[1:-1:2], argv[2:-1:2], strict=True))
    assert argv[-1] == "--kv-unified"
    assert flags["-np"] == "16" and flags["-t"] == "2" and flags["-fa"] == "on"
    assert 16 * 256 < int(flags["-c"]) <= 16 * 512


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(b"{}")
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
import signal
signal.signal(signal.SIGTERM, lambda *_: (child.kill(), sys.exit(0)))
server.serve_forever()
"""


def test_a_server_is_up_inside_and_gone_outside() -> None:
    port = free_port()
    recipe = Recipe("fake", (sys.executable, "-c", SERVER, str(port)), "/ready")
    with Server(recipe, port) as server:
        pids = tree(server.pid)
        assert len(pids) == 2 and server.ready_s > server.started_s
        assert cpu_seconds(server.pid) > 0
        used = memory(server.pid)
        assert used.rss_mb >= used.pss_mb > 5 and used.rss_mb >= used.anonymous_mb > 0
        alone = memory(pids[1]).rss_mb
        assert used.rss_mb > alone
    assert not Path(f"/proc/{pids[0]}").exists()


DEAF = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
""" + SERVER.replace("signal.signal(", "(lambda *_: None)(")


def test_a_server_that_does_not_end_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.servers.STOP_S", 0.1)
    port = free_port()
    recipe = Recipe("deaf", (sys.executable, "-c", DEAF, str(port)), "/ready")
    with Server(recipe, port) as server:
        pids = tree(server.pid)
    assert len(pids) == 2
    end_s = time.monotonic() + 60  # a signal takes a moment
    while any(map(alive, pids)) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    """Whoever adopts an orphan may not have waited for it yet: a zombie is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] not in "ZX"
    except OSError:
        return False


def test_a_server_that_ends_at_start_is_told_with_its_words() -> None:
    recipe = Recipe("fake", (sys.executable, "-c", "print('no such flag'); exit(2)"), "/ready")
    with pytest.raises(RuntimeError, match="no such flag"), Server(recipe, free_port()):
        pass


def test_toque_is_started_by_a_command_that_it_understands() -> None:
    argv = toque_recipe("toque", Path("m.gguf"), 1, 2, ("--kernels", "ref")).argv
    from toque.cli import parser

    parsed = parser().parse_args(argv[3:])
    assert (parsed.port, parsed.threads, parsed.kernels) == (1, 2, "ref")


def test_every_tool_explains_itself() -> None:
    for tool in ("load", "compare", "ops", "quality"):
        argv = [sys.executable, "-m", f"bench.{tool}", "--help"]
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True)
        assert f"bench.{tool}" in done.stdout
