"""The quality bench's numbers against torch and against hand-made cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.divergence import Divergence, kl_divergence, log_softmax
from bench.drawn import normal
from bench.forward import logits_by_chunk
from bench.llama_kl import kl_by_row, mean_kl_lines, rounded, scored_positions, write_base
from bench.reference import key, reference_logits
from toque.build import load
from toque.options import EngineOptions

Rng = np.random.default_rng


@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_kl_is_torchs(scale: float) -> None:
    rng = Rng(1)
    reference, other = (scale * normal(rng, 37, 101) for _ in range(2))
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (reference, other))
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(kl_divergence(reference, other), expected.numpy(), rtol=1e-9)
    np.testing.assert_allclose(log_softmax(reference), p.numpy(), rtol=1e-12, atol=1e-12)


def test_divergence_collects_in_order_over_uneven_pieces() -> None:
    rng = Rng(2)
    reference, noise = normal(rng, 50, 30), normal(rng, 50, 30)
    other = reference + np.float32(0.3) * noise
    whole, pieces = Divergence(), Divergence()
    whole.add(reference, other)
    for rows in (slice(0, 1), slice(1, 34), slice(34, 50)):
        pieces.add(reference[rows], other[rows])
    np.testing.assert_allclose(pieces.kl, whole.kl, rtol=1e-12)
    np.testing.assert_allclose(whole.kl, kl_divergence(reference, other), rtol=1e-12)
    agree = sum(a == b for a, b in zip(reference.argmax(1), other.argmax(1), strict=True))
    assert pieces.top1_agreement == agree / 50 < 1
    assert pieces.max_logit_difference == np.abs(reference - other).max()


def test_equal_logits_diverge_by_nothing_and_a_shift_is_no_divergence() -> None:
    logits = normal(Rng(3), 5, 11)
    assert np.abs(kl_divergence(logits, logits + np.float32(4))).max() < 1e-6
    assert np.all(kl_divergence(logits, logits) == 0)


def test_logits_that_are_not_numbers_are_refused() -> None:
    logits = normal(Rng(4), 2, 3)
    with pytest.raises(ValueError, match="not numbers"):
        Divergence().add(logits, logits * np.float32(np.nan))


# --------------------------------------------------------------------------- llama.cpp's file


def read_base(path: Path) -> tuple[list[int], list[list[float]]]:
    """(tokens, log probabilities) from the file, value by value as its format says."""
    raw = path.read_bytes()
    assert raw[:8] == b"_logits_"
    context, vocab, chunks = np.frombuffer(raw, "<i4", 3, 8)
    tokens = np.frombuffer(raw, "<i4", context * chunks, 20).tolist()
    offset, rows = 20 + 4 * context * chunks, []
    for _ in range(context - 1 - context // 2):
        step, least = np.frombuffer(raw, "<f4", 2, offset)
        values = np.frombuffer(raw, "<u2", vocab, offset + 8)
        rows.append([float(least) + float(step) * int(value) for value in values])
        offset += 8 + 2 * (vocab + vocab % 2)
    assert offset == len(raw)
    return tokens, rows


@pytest.mark.parametrize("vocab", [16, 17])
def test_the_base_file_holds_the_second_half_to_16_bits(tmp_path: Path, vocab: int) -> None:
    reference = 2 * normal(Rng(5), 21, vocab)
    write_base(tmp_path / "base", list(range(21)), reference)
    tokens, rows = read_base(tmp_path / "base")
    assert tokens == list(range(21))
    assert scored_positions(21) == range(10, 20)
    np.testing.assert_allclose(rows, log_softmax(reference[10:20]), atol=16 / 65535)


def test_what_is_far_below_the_best_is_cut_off_in_the_file() -> None:
    scale, values = rounded(np.array([[0.0, -5.0, -40.0]], np.float32))
    assert scale[0, 0] == pytest.approx(16 / 65535)
    assert values[0, 2] == 0 and values[0, 0] == 65535
    _, flat = rounded(np.zeros((1, 4), np.float32))
    assert not flat.any()


def test_kl_from_the_rounded_rows_is_near_the_exact_one() -> None:
    rng = Rng(6)
    reference = 2 * normal(rng, 40, 50)
    other = reference + np.float32(0.5) * normal(rng, 40, 50)
    exact = kl_divergence(reference, other)
    np.testing.assert_allclose(kl_by_row(reference, other), exact, atol=3e-4)
    assert exact.mean() > 0.05


def test_the_printed_mean_is_found_and_no_other_line() -> None:
    output = "Mean PPL(Q) : 9.1\nMean    KLD:   0.001523 ±   0.000011\nMaximum KLD:   3.0\n"
    assert list(mean_kl_lines(output)) == [0.001523]


# ------------------------------------------------------------------------------ the reference


def test_logits_of_a_whole_text_are_the_models_own(tiny_config: Path) -> None:
    """Chunk borders and pages included: against one pass over all tokens."""
    loaded = load(tiny_config, EngineOptions(kernels="ref", load_format="dummy"))
    tokens = Rng(7).integers(0, loaded.model.spec.vocab_size, 300).tolist()
    parts = list(logits_by_chunk(loaded.model, loaded.ops, tokens, "float32"))
    assert [part[0] for part in parts] == [slice(0, 128), slice(128, 256), slice(256, 300)]
    prefix = list(logits_by_chunk(loaded.model, loaded.ops, tokens[:100], "float32"))
    np.testing.assert_allclose(parts[0][1][:100], prefix[0][1], atol=1e-4)
    # The last position sees all tokens: another first token changes it.
    other = [(tokens[0] + 1) % loaded.model.spec.vocab_size, *tokens[1:]]
    changed = list(logits_by_chunk(loaded.model, loaded.ops, other, "float32"))
    assert np.abs(changed[2][1][-1] - parts[2][1][-1]).max() > 1e-5


def test_the_reference_is_computed_once_and_never_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def compute(model: Path, tokens: list[int], path: Path) -> None:
        calls.append(model)
        with path.open("wb") as out:
            np.save(out, np.full((len(tokens), 3), len(calls), np.float32))
        if model.name == "broken":
            raise RuntimeError("out of memory")

    monkeypatch.setattr("bench.reference.compute", compute)
    with pytest.raises(RuntimeError):
        reference_logits(Path("broken"), "id", [1, 2], tmp_path)
    assert list(tmp_path.iterdir()) == []
    first = reference_logits(Path("m"), "id", [1, 2], tmp_path)
    again = reference_logits(Path("m"), "id", [1, 2], tmp_path)
    assert len(calls) == 2 and np.array_equal(first, again)
    assert key("id", [1, 2]) not in {key("id", [1, 3]), key("other", [1, 2])}
