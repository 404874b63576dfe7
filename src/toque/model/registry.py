"""From an open checkpoint to its structure and to a model that runs.

To add a model of the dense kind: a row in `spec_hf.FAMILIES` and in `spec_gguf.ARCHITECTURES`, and
whatever is new about it as a field of ModelSpec.
"""

from __future__ import annotations

from toque.files.checkpoint import Checkpoint
from toque.kernels.api import Ops, WeightSource
from toque.model import spec_gguf, spec_hf
from toque.model.dense import DenseDecoder, build_dense
from toque.model.dummy import dummy_tensors
from toque.model.keys import Keys
from toque.model.weights import GGUF, HF, bind
from toque.types import ModelSpec


def model_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The structure of a checkpoint's model.

    Raises ModelError that names file, key and value for whatever is damaged or not supported.
    """
    source, values = _source(checkpoint), checkpoint.metadata
    if checkpoint.format == "gguf":
        return spec_gguf.spec_from_gguf(source, values, checkpoint.tensors)
    return spec_hf.spec_from_config(source, values)


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ops: Ops,
    max_model_len: int,
    source: WeightSource | None = None,
) -> DenseDecoder:
    """Bind the checkpoint's weights and hand them to the kernel set, through `source` if given.

    `max_model_len` is the longest sequence in tokens; with dynamic rotary scaling it also fixes the
    base (see layers/rope.py). Raises ModelError for weights that do not fit the spec, and for a
    max_model_len beyond a sliding window.
    """
    _check_window(checkpoint, max_model_len)
    names = GGUF if checkpoint.format == "gguf" else HF
    dummy = checkpoint.format == "dummy"
    tensors = dummy_tensors(spec) if dummy else checkpoint.tensors
    weights = bind(str(checkpoint.path), tensors, spec, names)
    return build_dense(spec, weights, ops, max_model_len, source)


def _source(checkpoint: Checkpoint) -> str:
    """The file that holds the keys, for messages."""
    path = checkpoint.path
    return str(path if checkpoint.format == "gguf" else path / "config.json")


def _check_window(checkpoint: Checkpoint, max_model_len: int) -> None:
    source, values = _source(checkpoint), checkpoint.metadata
    if checkpoint.format == "gguf":
        keys = Keys(source, values, f"{values['general.architecture']}.")
        key, window = "attention.sliding_window", spec_gguf.sliding_window(keys)
    else:
        keys = Keys(source, values)
        key, window = "sliding_window", spec_hf.sliding_window(keys)
    if window is not None and max_model_len > window:
        raise keys.refuse(key, f"windows are not implemented; use --max-model-len {window} or less")
