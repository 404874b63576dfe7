"""Weights that were packed at an earlier start, or are packed now and kept for the next.

Owns: what was packed in this start. Knows: the cache's files, the kernel set's bytes.
Does not know: which tensor is which weight.
"""

from __future__ import annotations

import atexit
import logging
import threading
import zlib
from collections.abc import Mapping

import msgspec
import numpy as np

from toque.files.packed import Key, PackedTensor, as_bytes
from toque.files.source_hash import SourceHash
from toque.files.weight_cache import WeightCache
from toque.kernels.api import Floats, Matrix, Packing, WeightSource
from toque.types import StoredTensor

log = logging.getLogger(__name__)

RECIPE = 1  # goes up when a tensor of the same name and order is handed on differently
EXIT_S = 3.0  # how long the end of the process waits for the file
VECTOR = "vector"  # the kind of a float32 vector in the cache


class CachedWeights:
    """A WeightSource: from the cache's file if it has a whole one, else from `packer`."""

    def __init__(
        self,
        packer: WeightSource,
        packing: Packing,
        source: SourceHash,
        cache: WeightCache,
        quantization: str = "",
    ) -> None:
        """Reads and checks the file if there is one. `source` was made before the model's files
        were opened."""
        self._packer = packer
        self._packing = packing
        self._source = source
        self._cache = cache
        self._key = Key(
            # "": must be computed before anything is kept
            source=(source.known() or "") if source.is_unchanged() else "",
            layout=packing.layout,
            quantization=quantization,
            recipe=RECIPE,
        )
        found = cache.find(self._key, packing.checksums) if self._key.source else None
        self._found: Mapping[str, PackedTensor] = found or {}
        self._made: dict[str, PackedTensor] = {}

    @property
    def is_found(self) -> bool:
        return bool(self._found)

    @property
    def mapped_bytes(self) -> int:
        return sum(tensor.data.size for tensor in self._found.values())

    def matrix(self, tensor: StoredTensor) -> Matrix:
        name = _name(tensor)
        found = self._found.get(name)
        if found is not None and found.shape == tensor.shape:
            return self._packing.matrix_of(found.kind, found.data, tensor.shape)
        matrix = self._packer.matrix(tensor)
        kind, data = self._packing.packed(matrix)
        self._made[name] = PackedTensor(name, kind, tensor.shape, data)
        return matrix

    def vector(self, tensor: StoredTensor) -> Floats:
        name = _name(tensor)
        found = self._found.get(name)
        if found is not None and (found.kind, found.shape) == (VECTOR, tensor.shape):
            return found.data.view(np.float32)
        vector = self._packer.vector(tensor)
        self._made[name] = PackedTensor(name, VECTOR, tensor.shape, as_bytes(vector))
        return vector

    def keep(self) -> threading.Thread | None:
        """Write what was packed, in a thread that ends by itself; None if all of it was found."""
        if not self._made:
            return None
        thread = threading.Thread(target=self._keep, name="toque-weight-cache", daemon=True)
        thread.start()
        # A process that ends at once would never keep anything; one that is told to end must.
        atexit.register(thread.join, EXIT_S)
        return thread

    def _keep(self) -> None:
        made, self._made = self._made, {}
        try:
            source = self._source.compute()
            if source is None:
                log.info("packed weights are not kept: the model's files have just changed")
                return
            key = msgspec.structs.replace(self._key, source=source)
            whole = {**self._found, **made}
            if self._cache.has(key) and not self._found:
                return  # the same model by another path, or another process was quicker
            if self._cache.keep(key, list(whole.values()), self._packing.checksums):
                log.info("packed weights are kept for the next start in %s", self._cache.folder)
        except OSError as error:
            log.info("packed weights are not kept in %s: %s", self._cache.folder, error)


def _name(tensor: StoredTensor) -> str:
    """In the cache: rows in another order are another tensor."""
    if tensor.order is None:
        return tensor.name
    return f"{tensor.name} rows {zlib.crc32(tensor.order.tobytes()):08x}"
