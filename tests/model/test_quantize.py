"""`--quantization`: blocks that the independent reader reads back within half a step, refused by
name where there is nothing to round or nothing that could be rounded."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from toque.build import build_engine, load
from toque.errors import ConfigError, ModelError
from toque.files.checkpoint import open_checkpoint
from toque.ipc import InProcess
from toque.kernels import select
from toque.model.dummy import dummy_tensors
from toque.model.quantize import quantize
from toque.model.registry import model_spec
from toque.options import EngineOptions
from toque.types import StoredTensor

TYPES = {"Q8_0": gguf.GGMLQuantizationType.Q8_0, "Q4_1": gguf.GGMLQuantizationType.Q4_1}
Floats = np.ndarray


def stored(values: Floats, kind: str) -> StoredTensor:
    """As a file has float32 values, cut to the kind's precision."""
    if kind == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = values.astype({"F32": np.float32, "F16": np.float16}[kind])
    return StoredTensor("w", kind, values.shape, raw.reshape(-1).view(np.uint8))


def truth(tensor: StoredTensor) -> Floats:
    if tensor.kind == "BF16":
        wide = tensor.data.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(tensor.shape)
    dtype = {"F32": np.float32, "F16": np.float16}[tensor.kind]
    return tensor.data.view(dtype).astype(np.float32).reshape(tensor.shape)


def read_back(tensor: StoredTensor) -> Floats:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    return gguf.quants.dequantize(rows, TYPES[tensor.kind])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_every_weight_is_within_half_a_step(kind: str, target: str, offset: float) -> None:
    rng = np.random.default_rng(7)
    values = (rng.normal(size=(48, 256)) + offset).astype(np.float32)
    values[3, :32] = 0.0  # a group of nothing
    values[4, 32:64] = 1.5  # of equals
    values[5, 64:96] = rng.normal(size=32) * 1e-4  # of small ones
    tensor = stored(values, kind)
    exact, found = truth(tensor), read_back(quantize(tensor, target))
    groups, error = exact.reshape(48, -1, 32), np.abs(exact - found).reshape(48, -1, 32)
    if target == "Q8_0":
        step = np.abs(groups).max(axis=-1) / 127
    else:
        step = (groups.max(axis=-1) - groups.min(axis=-1)) / 15
    # Scales and minima are float16, rounded by 2^-11 of their size or 2^-25 where they are tiny.
    largest = np.abs(groups).max(axis=-1)
    slack = largest * 2.0**-10 + (128 if target == "Q8_0" else 16) * 2.0**-25
    assert (error.max(axis=-1) <= step / 2 + slack).all()
    assert not found[3, :32].any()


@pytest.mark.parametrize("target", ["Q8_0", "Q4_1"])
def test_compiled_and_reference_kernels_read_the_same_weights(target: str) -> None:
    rng = np.random.default_rng(3)
    tensor = quantize(stored(rng.normal(size=(45, 512)).astype(np.float32), "F32"), target)
    ids = np.arange(45, dtype=np.int32)
    expected = read_back(tensor)
    for name in ("ref", "cpu"):
        ops = select(name, 1)
        found = ops.embed(ops.matrix(tensor), ids)
        assert np.abs(found - expected).max() <= 1e-6


def test_a_permuted_tensor_is_permuted_first() -> None:
    values = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    order = np.array([3, 1, 2, 0, 7, 6, 5, 4])
    mixed = quantize(stored(values, "F32").permute_rows(order), "Q8_0")
    assert np.array_equal(
        read_back(mixed), read_back(quantize(stored(values, "F32"), "Q8_0"))[order]
    )


def test_what_cannot_be_rounded_is_refused_by_name() -> None:
    values = np.ones((4, 48), np.float32)
    with pytest.raises(ModelError, match=r"48 weights \(w\)"):
        quantize(stored(values, "F32"), "Q8_0")
    for wrong in (np.nan, np.inf, 1e9):
        values = np.ones((4, 64), np.float32)
        values[2, 5] = wrong
        for target in TYPES:
            with pytest.raises(ModelError, match="not numbers, or beyond"):
                quantize(stored(values, "F32"), target)


def test_a_quantized_file_is_refused_by_name(smollm2_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization int4 .* is Q\d_\d already"):
        load(smollm2_path, EngineOptions(quantization="int4", weight_cache=False))


@pytest.fixture
def folder(tiny_config: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_config, folder)
    tensors = dummy_tensors(model_spec(open_checkpoint(folder, "dummy")))
    arrays = {n: t.data.view(np.float32).reshape(t.shape) for n, t in tensors.items()}
    save_file(arrays, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize(
    ("quantization", "head", "layer"), [("int8", "Q8_0", "Q8_0"), ("int4", "Q8_0", "Q4_1")]
)
def test_the_model_is_smaller_and_its_fingerprint_tells(
    folder: Path, quantization: str, head: str, layer: str
) -> None:
    def engine(**options: object):
        made = EngineOptions(kernels="cpu", threads=1, weight_cache=False, **options)  # type: ignore[arg-type]
        return build_engine(folder, "tiny", made, InProcess().engine)

    plain, rounded = engine(), engine(quantization=quantization)
    assert rounded.model.weight_bytes < plain.model.weight_bytes / 3
    assert rounded.model.head.weight.kind == head
    assert rounded.model.blocks[0].ffn.down.weight.kind == layer
    assert f"-{quantization}-cpu" in rounded.hello.fingerprint
    assert plain.hello.fingerprint == rounded.hello.fingerprint.replace(f"-{quantization}", "")
