"""The op bench: valid random inputs, what each case claims to compute, and its clocks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import ops as bench_ops
from bench.drawn import attention_case, fits, stored_matrix
from bench.op_cases import HIDDEN, INNER, Cases
from bench.ops import Ceilings, rates
from bench.timing import Stopwatch, Timed
from toque.kernels.api import PagedKV
from toque.kernels.cpu import CpuOps
from toque.kernels.ref import RefOps
from toque.kernels.ref.dequantize import KINDS, dequantize
from toque.kernels.ref.pages import fields

Rng = np.random.default_rng


@pytest.mark.parametrize("kind", list(KINDS))
def test_random_blocks_are_valid_and_of_a_sensible_size(kind: str) -> None:
    assert fits(kind, 512) and fits("Q4_K", INNER) and not fits("Q4_K", HIDDEN)
    stored = stored_matrix(Rng(0), kind, 6, 512)
    values = dequantize(kind, stored.data, stored.shape)
    assert np.isfinite(values).all()
    assert 1e-4 < np.abs(values).mean() < 100


def test_attention_reads_keys_that_the_kernel_set_wrote() -> None:
    """Every position of every context holds a key, and the last tokens ask."""
    spec = PagedKV(kv_heads=2, head_dim=8, dtype="float32")
    case = attention_case(Rng(1), RefOps(), spec, 4, [20, 33], 3)
    assert case.batch.positions.tolist() == [17, 18, 19, 30, 31, 32]
    assert case.q.shape == (6, 4, 8)
    for row, context in enumerate([20, 33]):
        place = np.arange(context)
        pages = case.batch.page_table[row, place // 16]
        assert np.abs(fields(case.kv)["keys"][pages, :, :, place % 16]).min() > 0
    used = [set(case.batch.page_table[0, :2]), set(case.batch.page_table[1, :3])]
    assert not used[0] & used[1]


def test_a_case_counts_its_operations_and_bytes() -> None:
    cases = Cases(RefOps(), Rng(2), ["F32"], ["float32"])
    (case,) = cases.linear("x", "F32", 32, 64, [5], add=False)
    assert case.operations == 2 * 5 * 32 * 64
    assert case.weight_bytes == 4 * 32 * 64
    assert case.moved_bytes == case.weight_bytes + 4 * 5 * (64 + 32)
    decode = cases.attention("x", "float32", [100, 50], 1)
    assert decode.operations == 4 * 14 * 64 * 150
    assert decode.weight_bytes == 150 * 2 * 2 * 64 * 4
    chunk = cases.attention("x", "float32", [4], 4)
    assert chunk.operations == 4 * 14 * 64 * (1 + 2 + 3 + 4)


def test_rates_are_of_the_median() -> None:
    (case,) = Cases(RefOps(), Rng(3), ["F32"], ["float32"]).linear(
        "x", "F32", 1000, 500, [1], add=False
    )
    row = rates(case, Timed(median_s=1e-3, best_s=5e-4, calls=9), Ceilings(4.0, 8.0, 10.0, 5.0))
    assert row["g_per_s"] == pytest.approx(1.0)
    assert row["weight_gb_per_s"] == pytest.approx(2.0)
    assert row["share_of_bandwidth"] == pytest.approx((2e6 + 6e3) / 8e6)
    assert row["share_of_fp32_peak"] == pytest.approx(0.1)
    assert row["share_of_integer_peak"] == pytest.approx(0.2)
    assert Ceilings(1, 9, 3).better(Ceilings(2, 8, 4)) == Ceilings(2, 9, 4)
    assert Ceilings(1, 9, 3, 5).better(Ceilings(2, 8, 4, 6)) == Ceilings(2, 9, 4, 6)


def test_the_integer_ceiling_is_that_of_the_kernels_own_instruction() -> None:
    assert bench_ops.integer_peak(CpuOps(1)) > 0


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_the_stopwatch_takes_every_copy_in_turn(clock: str) -> None:
    called: list[int] = []
    timed = Stopwatch(clock, threads=1, seconds=0.0).time(
        [lambda: called.append(0), lambda: called.append(1)]
    )
    assert called == [0, 1, 0, 1, 0]  # two to warm up, then MIN_CALLS
    assert timed.calls == 3 and 0 <= timed.best_s <= timed.median_s


def test_cpu_time_is_divided_by_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.process_time", lambda: 8.0)
    assert Stopwatch("cpu", threads=4, seconds=0.0).now_s() == 2.0


def test_the_tool_ends_with_one_json_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ops, "measure_ceilings", lambda *_: Ceilings(1.0, 1.0, 1.0))
    monkeypatch.setattr("bench.op_cases.VOCAB", 64)
    monkeypatch.setattr("bench.op_cases.INNER", 256)
    monkeypatch.setattr("bench.op_cases.COLD_BYTES", 1)
    bench_ops.main(["--kernels", "ref", "--rows", "1", "2", "--seconds", "0", "--only", "g"])
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["kernels"] == "ref"
    assert {row["op"] for row in report["ops"]} == {"gate up silu", "logits"}
    assert all(row["g_per_s"] > 0 for row in report["ops"])
