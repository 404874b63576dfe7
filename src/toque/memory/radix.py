"""The prefix tree: which page holds the keys and values of which tokens after which prefix.

Owns: the tree's nodes and the order in which unheld leaves are evicted.
Knows: tokens, salts, page ids. Does not know: reference counts, sequences (an owner is a name).

An edge is one page: exactly block_size tokens, so a path from the root spells a whole number of
pages and a node's page is valid for that path only (keys and values depend on all tokens before).
There is one root per salt; nothing is shared between roots. Nodes are never split or merged: with
page-sized edges there is nothing to gain. The idea of a radix tree of KV pages with LRU eviction
of leaves is RadixAttention's, arXiv:2312.07104.

A node is in one of three states:

    pending   owner set, page None    a running sequence is computing the page right now
    ready     page set, owner None    the page may be shared
    removed   neither, no parent      still referenced perhaps by whoever waited for it
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from toque.memory.pool import require

Edge = tuple[int, ...]  # block_size token ids


@dataclass(slots=True, eq=False)
class Node:
    """One page's worth of tokens below its parent. Roots have no parent, edge or page."""

    salt: str
    edge: Edge
    parent: Node | None
    serial: int  # order of creation: breaks ties of `used_tick`
    page: int | None = None
    owner: str | None = None  # who computes it, while it is pending
    depth: int = 0  # pages above it
    path: int = 0  # a hash of the tokens from the root to here, and of the salt
    worth: float = 0.0  # see EvictionQueue
    used_tick: int = 0  # when its last holder so far let go of it
    queued: bool = False  # has its one entry in the EvictionQueue
    children: dict[Edge, Node] = field(default_factory=dict)

    @property
    def is_root(self) -> bool:
        return not self.edge

    def __repr__(self) -> str:  # the generated one would print the whole tree
        return f"Node({self.salt!r}, {self.edge}, page={self.page}, owner={self.owner!r})"


class RadixTree:
    """Lookups are O(pages of the path); every change is O(1)."""

    def __init__(self, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a page needs at least one token, not {block_size}")
        self.block_size = block_size
        self._roots: dict[str, Node] = {}
        self._next_serial = 0

    def edge(self, tokens: Sequence[int], index: int) -> Edge:
        """The tokens of page `index`, which must be full."""
        edge = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
        if len(edge) < self.block_size:
            raise ValueError(f"page {index} is not full: only full pages enter the tree")
        return edge

    def walk(
        self, tokens: Sequence[int], salt: str, most_pages: int
    ) -> tuple[list[Node], Node | None]:
        """The ready nodes that spell the longest prefix of `tokens`, at most `most_pages`, and
        the pending node that comes next within that limit, if there is one. Changes nothing."""
        ready: list[Node] = []
        node = self._roots.get(salt)
        if node is None:
            return ready, None
        for index in range(most_pages):
            node = node.children.get(self.edge(tokens, index))
            if node is None:
                break
            if node.page is None:
                return ready, node
            ready.append(node)
        return ready, None

    def root(self, salt: str) -> Node:
        """Made when it is first asked for; forgotten with its last child, since salts come from
        clients and are without number. Do not keep it: ask again."""
        if salt not in self._roots:
            self._roots[salt] = self._node(salt, (), None)
        return self._roots[salt]

    def add_ready(self, parent: Node, edge: Edge, page: int) -> Node:
        node = self._add(parent, edge)
        node.page = page
        return node

    def add_pending(self, parent: Node, edge: Edge, owner: str) -> Node:
        node = self._add(parent, edge)
        node.owner = owner
        return node

    def remove(self, node: Node) -> None:
        """Takes a childless node out of the tree; whoever waits for it sees it pending no more."""
        parent = node.parent
        if parent is None or node.children:
            raise ValueError(f"{node} is not a leaf of the tree")
        del parent.children[node.edge]
        node.parent = node.page = node.owner = None
        if parent.is_root and not parent.children:
            del self._roots[parent.salt]

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first. O(nodes)."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if not node.is_root:
                yield node
            stack.extend(node.children.values())

    def runs(self) -> list[tuple[int, int, Node]]:
        """Runs of nodes of one kind (ready, pending) without a fork, parents first: (place of the
        parent's run or -1, nodes, the last one). O(nodes)."""
        found: list[tuple[int, int, Node]] = []
        stack = [(child, -1) for root in self._roots.values() for child in root.children.values()]
        while stack:
            node, parent = stack.pop()
            count = 1
            while len(node.children) == 1:
                (only,) = node.children.values()
                if (only.page is None) != (node.page is None):
                    break
                node, count = only, count + 1
            stack += [(child, len(found)) for child in node.children.values()]
            found.append((parent, count, node))
        return found

    def check(self) -> None:
        """Recomputes the shape. Raises AssertionError. O(nodes)."""
        for salt, root in self._roots.items():
            require(root.is_root and root.parent is None, f"the root of {salt!r} is not a root")
            require(root.salt == salt, f"the root of {salt!r} says {root.salt!r}")
            require(bool(root.children), f"the root of {salt!r} outlived its children")
        seen: set[int] = set()
        for node in self.nodes():
            parent = node.parent
            require(len(node.edge) == self.block_size, f"{node} is not one full page")
            require(
                parent is not None and parent.children.get(node.edge) is node,
                f"{node} and its parent do not know each other",
            )
            assert parent is not None
            require(node.salt == parent.salt, f"{node} hangs below another salt")
            require(
                (node.page is None) != (node.owner is None),
                f"{node} must have either a page (ready) or an owner (pending)",
            )
            require(
                node.page is None or parent.is_root or parent.page is not None,
                f"{node} is ready below a pending node",
            )
            if node.page is not None:
                require(node.page not in seen, f"page {node.page} is in the tree twice")
                seen.add(node.page)

    def _add(self, parent: Node, edge: Edge) -> Node:
        if edge in parent.children:
            raise ValueError(f"{parent} has a child {edge} already")
        node = parent.children[edge] = self._node(parent.salt, edge, parent)
        return node

    def _node(self, salt: str, edge: Edge, parent: Node | None) -> Node:
        self._next_serial += 1
        node = Node(salt, edge, parent, self._next_serial)
        node.path = path_hash(salt, parent, edge)
        node.depth = 0 if parent is None or parent.is_root else parent.depth + 1
        return node


def path_hash(salt: str, parent: Node | None, edge: Edge) -> int:
    """The same in every process, unlike a string's own hash."""
    if parent is None:
        return zlib.crc32(salt.encode("utf-8", "surrogatepass"))
    return hash((parent.path, edge))


class EvictionQueue:
    """Evictable leaves, those first whose loss costs least; ties go to the least recently used,
    then to the older node.

    A node's worth is what its page costs to compute again, plus the worth of the page evicted last
    when it was used last (GreedyDual: Young, "The k-server dual and loose competitiveness for
    paging", 1994). So what is not used ages as evictions go on, and what is dear ages longer. With
    all pages equally dear this is the order of last use.

    A heap that is put right late. Each node has at most one entry, so that a prefix which is used
    a million times without an eviction does not grow the heap; the entry may be out of date:

    - its worth or tick may be older than the node's. Both only grow, so the entry comes up too
      early, never too late, and is put back with the right ones;
    - the node may have become held or an inner node since. Its entry is dropped then, and whoever
      makes the node evictable again offers it again.

    Both kinds cost O(log nodes) once per offer or release that caused them.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Node]] = []
        self.floor = 0.0  # the worth of the page evicted last

    def used(self, node: Node, tick: int, cost: float) -> None:
        """Its last holder lets go of it. Costs of one node may only grow."""
        node.used_tick, node.worth = tick, max(node.worth, self.floor + cost)

    def offer(self, node: Node) -> None:
        """The node has become evictable."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, _entry(node))

    def pop(self, evictable: Callable[[Node], bool]) -> Node:
        """Takes the first in order of the nodes that are evictable now. Raises LookupError where
        there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            node = entry[3]
            if not evictable(node):
                node.queued = False
            elif entry[:3] < (node.worth, node.used_tick, node.serial):
                heapq.heappush(self._heap, _entry(node))
            else:
                node.queued = False
                self.floor = max(self.floor, node.worth)
                return node
        raise LookupError("no page can be evicted")

    def check(self, evictable: list[Node]) -> None:
        """`evictable`: all nodes that must be here. Raises AssertionError. O(nodes)."""
        entries = {id(entry[3]) for entry in self._heap}
        require(len(entries) == len(self._heap), "a node is queued for eviction twice")
        for worth, tick, serial, node in self._heap:
            require(node.queued and serial == node.serial, f"{node} has a foreign queue entry")
            late = (worth, tick) > (node.worth, node.used_tick)
            require(not late, f"{node} would be evicted too late")
        for node in evictable:
            require(id(node) in entries, f"{node} is evictable but not queued")


def _entry(node: Node) -> tuple[float, int, int, Node]:
    return node.worth, node.used_tick, node.serial, node
