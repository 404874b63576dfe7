"""Choosing a kernel set, its threads and its instruction set; refusing what cannot be had."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cases import normal, stored
from toque import kernels
from toque.errors import ConfigError
from toque.kernels import select
from toque.kernels.cpu import CpuOps, _native


def test_auto_is_cpu_and_names_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOQUE_ISA", raising=False)
    assert select("auto").name == select("cpu", 1).name == CpuOps(1).name
    assert select("cpu").name == f"cpu/{_native.ISAS[0]}/a14"
    assert _native.ISAS[-1] == "portable"
    assert select("ref").name == "ref"


@pytest.mark.parametrize(("name", "threads"), [("cuda", None), ("cpu", 0), ("ref", -1)])
def test_a_choice_that_cannot_work_is_a_config_error(name: str, threads: int | None) -> None:
    with pytest.raises(ConfigError):
        select(name, threads)


@pytest.mark.parametrize("isa", ["sse9", "AVX2"])
def test_an_unknown_instruction_set_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOQUE_ISA", isa)
    with pytest.raises(ConfigError, match=f"TOQUE_ISA={isa}"):
        select("cpu", 1)


def test_a_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("toque.kernels.cpu")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "toque.kernels.cpu._native", None)
    with pytest.raises(ConfigError, match="pip install"):
        select("cpu", 1)
    assert select("ref").name == "ref"


def test_ref_does_not_import_the_extension() -> None:
    code = (
        "import sys; from toque.kernels import select; select('ref');"
        "sys.exit(any('_native' in m and 'toque' in m for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_hyper_threads_count_once_and_a_quota_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(kernels, "CPU_FOLDER", tmp_path)
    monkeypatch.setattr(kernels, "CGROUP_QUOTA", quota)
    monkeypatch.setattr(kernels, "usable_cpus", lambda: {0, 1, 2, 3})
    assert kernels.physical_cores() == 2  # no quota file
    quota.write_text("max 100000")
    assert kernels.physical_cores() == 2
    quota.write_text("100000 100000")
    assert kernels.physical_cores() == 1
    quota.write_text("50000 100000")
    assert kernels.physical_cores() == 1


def test_threads_can_change_while_others_compute() -> None:
    """Calls from several threads, with the pool replaced meanwhile, give a quiet call's bits."""
    ops = CpuOps(3)
    rng = np.random.default_rng(0)
    matrix, x = ops.matrix(stored(normal(rng, 300, 400))), normal(rng, 9, 400)
    expected = ops.linear(x, matrix).tobytes()
    wrong: list[int] = []

    def compute(name: int) -> None:
        for _ in range(200):
            if ops.linear(x, matrix).tobytes() != expected:
                wrong.append(name)

    users = [threading.Thread(target=compute, args=(i,)) for i in range(3)]
    for user in users:
        user.start()
    for threads in (1, 4, 2, 5, 1, 3):
        ops.set_threads(threads)
    for user in users:
        user.join()
    assert not wrong
    with pytest.raises(ValueError, match="threads"):
        ops.set_threads(0)


def test_many_short_jobs_lose_and_repeat_no_chunk() -> None:
    """More threads than cores, so that workers are stopped anywhere; each row is checked."""
    ops = CpuOps(7)
    rng = np.random.default_rng(0)
    weight = normal(rng, 64)
    inputs = [normal(rng, rows, 64) for rows in (300, 301, 450, 299)]
    expected = [CpuOps(1).rms_norm(x, weight, 1e-6).tobytes() for x in inputs]
    for i in range(2000):
        assert ops.rms_norm(inputs[i % 4], weight, 1e-6).tobytes() == expected[i % 4]
