"""A small random model whose matrices are packed as GGUF files have them, every kind somewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.kernels.cases import packed_bytes
from toque.build import Loaded
from toque.files.checkpoint import open_checkpoint
from toque.kernels import select
from toque.kernels.ref.dequantize import KINDS, dequantize
from toque.model.dense import build_dense
from toque.model.dummy import dummy_tensors
from toque.model.registry import model_spec
from toque.model.weights import HF, bind
from toque.types import StoredTensor

# Rows of 256 and 512 inputs: whole blocks of every kind.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
LAYERS = (  # kinds of query, key, value, output, gate, up, down
    ("Q8_0", "Q5_0", "Q6_K", "Q4_0", "Q4_K", "Q5_1", "Q5_K"),
    ("Q4_1", "Q4_K", "Q8_0", "Q6_K", "Q5_0", "Q4_0", "F16"),
)
ROLES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOP = {"model.embed_tokens.weight": "Q5_0", "lm_head.weight": "Q6_K"}


def quantized_model(config: Path, folder: Path) -> Loaded:
    """The folder `config` with other sizes, written to `folder`, and dummy weights, packed."""
    keys = json.loads((config / "config.json").read_text()) | SIZES
    (folder / "config.json").write_text(json.dumps(keys))
    checkpoint = open_checkpoint(folder, "dummy")
    ops, spec = select("cpu", 2), model_spec(checkpoint)
    rng = np.random.default_rng(0)
    tensors = {
        name: tensor if len(tensor.shape) == 1 else packed(tensor, kind_of(name), rng)
        for name, tensor in dummy_tensors(spec).items()
    }
    model = build_dense(spec, bind("drawn", tensors, spec, HF), ops, spec.context)
    return Loaded(checkpoint, model, ops)


def kind_of(name: str) -> str:
    if name in TOP:
        return TOP[name]
    layer, role = int(name.split(".")[2]), name.split(".")[-2]
    return LAYERS[layer][ROLES.index(role)]


def packed(tensor: StoredTensor, kind: str, rng: np.random.Generator) -> StoredTensor:
    """Any integers and small scales, with the float16 scales such that the values deviate from 0
    by as much as the tensor's do."""
    values = tensor.data.view(np.float32)
    layout = KINDS[kind].layout
    data = packed_bytes(rng, kind, values.size // KINDS[kind].values)
    blocks = data.view(layout)
    names = [name for name in ("d", "m", "dmin", "x") if name in (layout.names or ())]
    factor = values.std() / dequantize(kind, data, (values.size,)).std()
    for name in names:
        blocks[name] = blocks[name] * np.float16(factor)
    return StoredTensor(tensor.name, kind, tensor.shape, data)
