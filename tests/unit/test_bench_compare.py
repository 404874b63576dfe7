"""Comparisons: medians of paired rounds, the better peer, servers that start and end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.comparison import Comparison, Measurement, show
from bench.processes import Memory, cpu_seconds, memory, tree
from bench.servers import Recipe, Server, free_port, llama_recipe, toque_recipe
from bench.workloads import WORKLOADS

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
