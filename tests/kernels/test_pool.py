"""The thread pool by itself, in C++: compiled and run here, since Python cannot see its chunks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_every_chunk_runs_once_before_the_loop_returns(tmp_path: Path) -> None:
    """Also with more threads than cores, and with pools that stop right after their start."""
    program = tmp_path / "pool_stress"
    sources = [str(HERE / "pool_stress.cpp"), str(CSRC / "pool.cpp")]
    flags = ["-std=c++20", "-O1", "-pthread", f"-I{CSRC}", "-o", str(program)]
    subprocess.run([str(COMPILER), *sources, *flags], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
