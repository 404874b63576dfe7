"""A model's forward pass, recorded once and run as one call per step.

Owns: the recordings. Knows: that layers hold their Ops in a field `ops`; that a recording holds for
the pages it was made with. Does not know: what a recording is; that is the kernel set's affair
(`Ops.record`): a list of kernel calls on a CPU, plain calls of one op after the other in `ref`.

Layers and models stay as they are: they run once on another Ops, which writes down what it is asked
for. Their own Ops, called one by one, are the slow twin (`tests/engine/test_program.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from toque.kernels.api import Decode, Floats, ForwardBatch, LayerKV, Ops, Recorded, Sampler
from toque.model.dense import DenseDecoder
from toque.types import Sampled

Part = TypeVar("Part")


class Program:
    """A worker.Model. Results hold until the next call of the same method."""

    def __init__(self, model: DenseDecoder) -> None:
        self._model = model
        self._ops = model.ops
        self._kv: Sequence[LayerKV] | None = None
        self._recorded: dict[str, Recorded] = {}

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Floats:
        return self._program("forward", kv).run(batch)

    def decode(
        self, step: Decode, kv: Sequence[LayerKV], sampler: Sampler, known: int
    ) -> list[Sampled]:
        return self._program("forward", kv).decode(step, sampler, known)

    def hidden(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Floats:
        return self._program("hidden", kv).run(batch)

    def logits(self, hidden: Floats) -> Floats:
        return self._model.logits(hidden)

    def _program(self, method: str, kv: Sequence[LayerKV]) -> Recorded:
        if kv is not self._kv:
            self._recorded.clear()
            self._kv = kv
        if method not in self._recorded:

            def trace(ops: Ops, batch: ForwardBatch) -> Floats:
                run: Callable[..., Floats] = getattr(with_ops(self._model, ops), method)
                return run(batch, kv)

            self._recorded[method] = self._ops.record(trace)
        return self._recorded[method]


def with_ops(part: Part, ops: Ops) -> Part:
    """The same frozen layers, down to the smallest, on another Ops; weights are shared."""
    if isinstance(part, tuple):
        return tuple(with_ops(item, ops) for item in part)  # type: ignore[return-value]
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        old = getattr(part, field.name)
        changed[field.name] = ops if field.name == "ops" else with_ops(old, ops)
    return dataclasses.replace(part, **changed)
