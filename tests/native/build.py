"""Builds the C++ test programs of this folder with the compiler and flags of a test's choice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CMAKE = (ROOT / "CMakeLists.txt").read_text()
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
ARM_COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64")
# What rounding depends on, as in CMakeLists.txt; no warnings: the ordinary build shows them.
MATH = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w", "-Wno-psabi")
SANITIZERS = ("-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")


@dataclass(frozen=True)
class Isa:
    name: str
    flags: tuple[str, ...]


def isas(*names: str) -> list[Isa]:
    """The named instruction sets with their flags, as CMakeLists.txt compiles them."""
    found = {
        name: Isa(name, tuple(flags.split()))
        for name, flags in re.findall(r"add_kernels\((\w+)([^)]*)\)", CMAKE)
    }
    return [found[name] for name in names]


def kernel_sources() -> list[Path]:
    lists = re.findall(r"set\((?:large|small)_sources\s+([^)]*)\)", CMAKE)
    assert len(lists) == 2, lists
    return [ROOT / name for words in lists for name in words.split()]


@dataclass(frozen=True)
class Build:
    compiler: str
    flags: tuple[str, ...]
    folder: Path

    def _object(self, source: Path, flags: tuple[str, ...], name: str) -> str:
        to = self.folder / f"{source.stem}-{name}.o"
        words = [self.compiler, "-std=c++20", "-pthread", f"-I{ROOT / 'csrc'}", *MATH, *self.flags]
        subprocess.run([*words, *flags, "-c", str(source), "-o", str(to)], check=True)
        return str(to)

    def program(self, name: str, sources: list[Path], sets: list[Isa]) -> Path:
        """`sources` once, and the kernels once for each instruction set."""
        jobs = [(source, (), "once") for source in sources]
        for isa in sets:
            flags = (f"-DTOQUE_ISA={isa.name}", *isa.flags)
            jobs += [(source, flags, isa.name) for source in kernel_sources()]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(lambda job: self._object(*job), jobs))
        program = self.folder / name
        words = [self.compiler, *self.flags, "-pthread", *objects, "-o", str(program)]
        subprocess.run(words, check=True)
        return program


def kernels_program(build: Build, *names: str) -> Path:
    tests = [HERE / f"{name}.cpp" for name in ("kernels_test", "product_cases", "attention_cases")]
    library = [ROOT / "csrc" / f"{name}.cpp" for name in ("pool", "program", "sample")]
    sources = [*tests, HERE / "program_cases.cpp", *library]
    return build.program("kernels_test", sources, isas(*names))


def pool_program(build: Build) -> Path:
    return build.program("pool_test", [HERE / "pool_test.cpp", ROOT / "csrc/pool.cpp"], [])


@cache
def can_sanitize(compiler: str | None, what: str) -> bool:
    """Whether programs built with -fsanitize=`what` start here: the compiler's library may be
    missing, and some kernels' address layouts are beyond it."""
    if compiler is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        probe = f"{folder}/probe"
        words = [compiler, f"-fsanitize={what}", "-x", "c++", "-", "-o", probe]
        built = subprocess.run(words, input=b"int main() {}", capture_output=True)
        if built.returncode != 0:
            return False
        return subprocess.run([probe], capture_output=True).returncode == 0


def run(*words: str, timeout_s: float) -> str:
    """The output of a test program, which fails the test by its own."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
