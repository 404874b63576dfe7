"""Which pages have been given up lately: what an eviction cost is known when somebody asks again.

Owns: hashes of paths of the prefix tree, a bounded number. Knows: nothing else.
"""

from __future__ import annotations

from toque.memory.radix import Edge, Node, path_hash


class Ghosts:
    def __init__(self, most: int) -> None:
        self._most = most
        self._paths: dict[int, None] = {}  # the one evicted last at the end

    def __bool__(self) -> bool:
        return bool(self._paths)

    def add(self, node: Node) -> None:
        self._paths.pop(node.path, None)
        self._paths[node.path] = None
        if len(self._paths) > self._most:
            del self._paths[next(iter(self._paths))]

    def following(self, node: Node | None, salt: str, edges: list[Edge]) -> int:
        """How many of `edges`, one after another below `node` (None: the root), were here. Each is
        counted once: they are about to be computed again."""
        path, found = path_hash(salt, None, ()) if node is None else node.path, 0
        for edge in edges:
            path = hash((path, edge))
            if path not in self._paths:
                break
            del self._paths[path]
            found += 1
        return found
