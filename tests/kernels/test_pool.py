"""The thread pool by itself, in C++: compiled and run here, since Python cannot see its chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.build import COMPILER, SANITIZERS, Build, can_sanitize, pool_program, run

RACES = pytest.mark.skipif(
    not can_sanitize(COMPILER, "thread"), reason="no compiler with a thread sanitizer that runs"
)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_every_chunk_runs_once_before_the_loop_returns(tmp_path: Path) -> None:
    """Also with more threads than cores, and with pools that stop right after their start."""
    program = pool_program(Build(str(COMPILER), ("-O1",), tmp_path))
    run(str(program), timeout_s=100)


@RACES
def test_no_race(tmp_path: Path) -> None:
    """Chunks write plain memory that the caller reads; several callers, loops within loops."""
    flags = ("-O1", "-fsanitize=thread", *SANITIZERS)
    run(str(pool_program(Build(str(COMPILER), flags, tmp_path))), "1000", timeout_s=300)
