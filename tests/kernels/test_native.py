"""The kernels, the program and the sampler in C++, without Python: under sanitizers, and for ARM.

The programs compare each instruction set with the portable one and each result with itself on
other threads, with other rows beside it and in other pieces (tests/native/*_cases.cpp).
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests.native.build import (
    ARM_COMPILER,
    COMPILER,
    EMULATOR,
    SANITIZERS,
    Build,
    can_sanitize,
    kernels_program,
    run,
)

pytestmark = pytest.mark.long
ARM = ("portable", "neon", "neon_dot")
X86 = platform.machine() in ("x86_64", "AMD64")
ISAS = ("portable", "avx2", "avx512") if X86 else ARM
UNDEFINED = "address,undefined"


@pytest.mark.skipif(
    not can_sanitize(COMPILER, UNDEFINED), reason="no compiler with an address sanitizer that runs"
)
def test_nothing_out_of_bounds_or_undefined(tmp_path: Path) -> None:
    flags = ("-O1", f"-fsanitize={UNDEFINED}", *SANITIZERS)
    program = kernels_program(Build(str(COMPILER), flags, tmp_path), *ISAS)
    assert "portable: ran" in run(str(program), "2", timeout_s=900)


@pytest.mark.skipif(
    ARM_COMPILER is None or EMULATOR is None,
    reason="needs aarch64-linux-gnu-g++ and qemu-aarch64",
)
def test_neon_agrees_with_portable(tmp_path: Path) -> None:
    """Each set of instructions where the processor has it, and only there."""
    build = Build(str(ARM_COMPILER), ("-O2", "-static"), tmp_path)
    program = kernels_program(build, *ARM)
    for processor, dot in (("max", "ran"), ("cortex-a72", "not on this machine")):
        done = run(str(EMULATOR), "-cpu", processor, str(program), "1", timeout_s=900)
        assert "neon: ran" in done
        assert f"neon_dot: {dot}" in done
