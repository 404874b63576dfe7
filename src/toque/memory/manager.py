"""Which pages each sequence holds, which are shared, and which are given up when memory is short.

Owns: the page pool, the prefix tree, each sequence's list of pages, the eviction clock.
Knows: request ids, token ids, page ids.
Does not know: page contents, the scheduler's order, when a step runs.

A sequence's pages fall into regions, in order of position:

    pages    0 ........ s | s ............. | ............... n
             in the tree  | announced       | private
             ready,       | pending, to be  | being filled, or equal to
             shareable    | computed by us  | pages that others hold
             `nodes`      | `pending`       |

It holds one reference on each page of the first and last region; announced pages are private
until `commit` says that they are computed. What each rule is for:

*Closed subtrees.* A sequence is in the tree with a path from the root, and holds all of it. So
whoever holds a page holds its ancestors, the descendants of an unheld page are unheld, and every
cached page can be evicted leaves first: `available_pages` is exactly what `grow` can get.

*Pending nodes.* They hang below what their owner holds, in one chain that no other sequence may
extend or complete. They vanish with their owner (finish, abort, preemption): whoever waited sees
`is_pending` turn false, matches again and computes what is missing. Hence nobody waits for ever
and nothing ready ever hangs below something that may vanish.

*Equal pages computed twice.* Two sequences may fill equal pages by decoding, or one did not wait
for the other, or a prompt was cached whole and its last page is computed again for the sake of
one token. The second to finish finds the node there:

- ready and held by nobody: the node takes the newer page and the older one is freed. Nobody can
  notice, the contents are equal (bit for bit where the kernels promise it, up to rounding
  elsewhere, as in every prefix cache), and the sequence holds its path again.
- ready and held by another, or pending for another: the page stays private, and the later ones
  with it. Attaching them below a node that this sequence does not hold would break closed
  subtrees; holding that node as well would cost a second page for the same tokens, and a sequence
  of the full context, alone in a pool just large enough, could no longer grow. Replacing the
  page in the sequence is not possible: the worker has it in its page table.
  Each commit tries again, so the sequence rejoins the tree once the other one is gone.

*Recency* is the time of release. Admission needs no stamp of its own: what is admitted is held,
cannot be evicted, and is stamped when it is released. A path is stamped as a whole, so no node is
older than its children and leaves come first by age too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from toque.memory.ghosts import Ghosts
from toque.memory.pool import Epochs, PagePool, require
from toque.memory.radix import EvictionQueue, Node, RadixTree
from toque.memory.watch import PageWatch


@dataclass(frozen=True, slots=True)
class Match:
    """What the prefix cache has for some tokens. Valid until the manager's next change: pass it to
    `admit` at once."""

    pages: tuple[int, ...]  # ready, in order of position
    num_tokens: int  # len(pages) * block_size
    pending: Node | None  # the page after these is being computed by a running sequence


@dataclass(slots=True)
class Holding:
    """One sequence's pages; see the regions above."""

    salt: str
    pages: list[int]
    nodes: list[Node]  # of pages[: len(nodes)], from the root down
    guest: bool = False  # not a sequence of this engine's scheduler: a lease or a fetch
    computed_pages: int = 0  # of `pages`: what they hold will not change while they are held
    pending: deque[Node] = field(default_factory=deque)  # a chain below nodes[-1]


class CacheManager:
    """`key` is the request id. A sequence's life: match, admit, (grow, commit)*, release."""

    def __init__(
        self,
        total_pages: int,
        block_size: int,
        prefix_caching: bool = True,
        page_worth: Callable[[int], float] = lambda depth: 1.0,
        epochs: Epochs | None = None,
        watch: PageWatch | None = None,
    ) -> None:
        """`page_worth`: what the page at a depth costs to compute again, in any unit."""
        self.total_pages = total_pages
        self.block_size = block_size  # tokens per page
        self._prefix_caching = prefix_caching
        self._pool = PagePool(total_pages, epochs)
        self._tree = RadixTree(block_size)
        self._queue = EvictionQueue()
        self._page_worth = page_worth
        self._ghosts = Ghosts(total_pages)
        self.watch = watch  # None: nobody asks what becomes of pages
        self._holdings: dict[str, Holding] = {}
        self._tick = 0

    @property
    def free_pages(self) -> int:
        return self._pool.free_pages

    @property
    def cached_pages(self) -> int:
        """In the tree and held by nobody: evictable."""
        return self._pool.idle_pages

    @property
    def held_pages(self) -> int:
        """Held by at least one sequence; a shared page counts once."""
        return self._pool.held_pages

    @property
    def available_pages(self) -> int:
        """What `grow` can hand out now: free + cached."""
        return self._pool.free_pages + self._pool.idle_pages

    def fits(self, match: Match, more_pages: int) -> bool:
        """Could `more_pages` be had after `match` was admitted? Those of its pages that nobody
        holds are available until then, and not any more afterwards. O(pages)."""
        revived_pages = sum(not self._pool.holders(page) for page in match.pages)
        return self.available_pages - revived_pages >= more_pages

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        """The longest cached prefix that leaves at least one token to compute, hence at most
        (len(tokens) - 1) // block_size pages. Changes nothing. O(pages)."""
        nodes, pending = self._walk(tokens, salt)
        pages = tuple(node.page for node in nodes if node.page is not None)
        return Match(pages, len(pages) * self.block_size, pending)

    def is_pending(self, node: Node) -> bool:
        """Is the page still being computed? False once it is ready, and once its owner gave up.
        O(1)."""
        return node.owner is not None

    def admit(
        self, key: str, tokens: Sequence[int], salt: str, match: Match, guest: bool = False
    ) -> None:
        """The sequence takes references on match.pages, and announces the full pages of `tokens`
        beyond them that nobody has or computes yet, so that equal prompts wait for it.

        Raises ValueError, changing nothing, if `key` holds pages already or if the tree no longer
        has match.pages for these tokens. O(pages).
        """
        if key in self._holdings:
            raise ValueError(f"{key} is admitted already: release it first")
        nodes = self._walk(tokens, salt)[0][: len(match.pages)]
        if tuple(node.page for node in nodes) != match.pages:
            raise ValueError(f"the match of {key} is stale: match and admit in one go")
        for page in match.pages:
            self._pool.retain(page)
        holding = Holding(salt, list(match.pages), nodes, guest, len(nodes))
        self._holdings[key] = holding
        if self.watch is not None and not guest:
            self.watch.used(match.pages)
        if self._prefix_caching:
            self._announce(key, holding, tokens)

    def grow(self, key: str, num_tokens: int) -> tuple[int, ...] | None:
        """Appends pages until the sequence covers `num_tokens`, evicting cached pages as needed.

        Returns the new pages (none are needed: an empty tuple), or None, with nothing changed,
        when free and cached pages do not suffice. Raises KeyError for an unknown key.
        O(new pages * log(total_pages)), amortized.
        """
        pages = self._holdings[key].pages
        missing = -(-num_tokens // self.block_size) - len(pages)
        if missing > self.available_pages:
            return None
        new_pages = tuple(self._take_page() for _ in range(missing))
        pages.extend(new_pages)
        return new_pages

    def commit(self, key: str, tokens: Sequence[int], num_computed: int) -> None:
        """tokens[:num_computed] are computed: the full pages among them enter the tree.

        `tokens` must begin as at admission and only ever get longer. Raises KeyError for an unknown
        key, ValueError when more is said to be computed than there are tokens or pages, or when
        an announced page turns out to hold other tokens. O(new full pages).
        """
        holding = self._holdings[key]
        if num_computed > min(len(tokens), len(holding.pages) * self.block_size):
            raise ValueError(f"{key} has not the tokens or pages for {num_computed} computed")
        holding.computed_pages = max(holding.computed_pages, num_computed // self.block_size)
        if not self._prefix_caching:
            return
        for index in range(len(holding.nodes), num_computed // self.block_size):
            node = self._publish(holding, tokens, index)
            if node is None:
                break
            holding.nodes.append(node)

    def release(self, key: str) -> None:
        """The sequence finished, was aborted or is preempted: it drops its references and
        announcements. Its pages in the tree that nobody else holds become cached, its private ones
        free. Raises KeyError for an unknown key. O(pages)."""
        holding = self._holdings.pop(key)
        for node in reversed(holding.pending):
            self._tree.remove(node)
        for page in reversed(holding.pages):
            self._pool.release(page)
        for page in reversed(holding.pages[len(holding.nodes) :]):
            self._pool.free(page)
        self._tick += 1
        for node in holding.nodes:
            self._queue.used(node, self._tick, self._page_worth(node.depth))
        if holding.nodes:  # only the last can be a leaf
            self._offer(holding.nodes[-1])

    @property
    def guests(self) -> int:
        """Holdings that are no sequences: they end by themselves, each at its own time."""
        return sum(holding.guest for holding in self._holdings.values())

    def pages_of(self, key: str) -> tuple[int, ...]:
        """In order of position. Raises KeyError for an unknown key."""
        return tuple(self._holdings[key].pages)

    def computed_pages_of(self, key: str) -> tuple[int, ...]:
        """The full pages that are computed, in order of position; none for an unknown key."""
        holding = self._holdings.get(key)
        return () if holding is None else tuple(holding.pages[: holding.computed_pages])

    def epoch(self, page: int) -> int:
        """How often the page was allocated so far."""
        return int(self._pool.epochs[page])

    def num_pages(self, key: str) -> int:
        """Raises KeyError for an unknown key. O(1)."""
        return len(self._holdings[key].pages)

    def lost_tokens(self, tokens: Sequence[int], salt: str, match: Match) -> int:
        """How many of `tokens` after `match` had been cached and were given up, as far back as is
        remembered (as many pages as the pool has). Ask once per request, at its admission; O(pages)
        where anything was evicted."""
        first, end = len(match.pages), max(0, len(tokens) - 1) // self.block_size
        if match.pending is not None or not self._ghosts:
            return 0
        nodes, _ = self._walk(tokens, salt)
        edges = [self._tree.edge(tokens, index) for index in range(first, end)]
        above = nodes[first - 1] if first else None
        return self._ghosts.following(above, salt, edges) * self.block_size

    def page_states(self) -> bytes:
        """One byte per page: 0 free, 1 cached, 2 held by one, 3 shared. O(total_pages)."""
        return self._pool.states()

    def runs(self) -> list[tuple[int, int, int, bool]]:
        """The prefix tree in runs of pages without a fork, parents first: (place of the parent in
        the list or -1, pages, holders of the last page, is it pending). O(nodes)."""
        return [
            (parent, pages, self._holders(last), last.page is None)
            for parent, pages, last in self._tree.runs()
        ]

    def _holders(self, node: Node) -> int:
        return 1 if node.page is None else self._pool.holders(node.page)

    def reset(self) -> None:
        """Frees every cached page. What sequences hold stays, and stays shareable."""
        while self._pool.idle_pages:
            self._evict()

    def _walk(self, tokens: Sequence[int], salt: str) -> tuple[list[Node], Node | None]:
        return self._tree.walk(tokens, salt, max(0, len(tokens) - 1) // self.block_size)

    def _tail(self, holding: Holding) -> Node:
        return holding.nodes[-1] if holding.nodes else self._tree.root(holding.salt)

    def _announce(self, key: str, holding: Holding, tokens: Sequence[int]) -> None:
        """Stops where the tree has a node: another's pending chain is not ours to extend, and a
        ready one (the last page of a prompt that is cached whole) is settled by `commit`."""
        first, end = len(holding.nodes), len(tokens) // self.block_size
        if first == end:
            return
        parent = self._tail(holding)
        for index in range(first, end):
            edge = self._tree.edge(tokens, index)
            if edge in parent.children:
                break
            parent = self._tree.add_pending(parent, edge, key)
            holding.pending.append(parent)

    def _publish(self, holding: Holding, tokens: Sequence[int], index: int) -> Node | None:
        """The computed page `index`, next after holding.nodes, becomes a ready node of the tree,
        or stays private (None) because another sequence holds or computes an equal one."""
        edge, page = self._tree.edge(tokens, index), holding.pages[index]
        if holding.pending:
            node = holding.pending[0]
            if node.edge != edge:
                raise ValueError(f"page {index} was announced as {node.edge}, not {edge}")
            holding.pending.popleft()
            node.page, node.owner = page, None
            return node
        parent = self._tail(holding)
        twin = parent.children.get(edge)
        if twin is None:
            return self._tree.add_ready(parent, edge, page)
        if twin.page is None or self._pool.holders(twin.page):
            return None
        self._pool.free(twin.page)
        twin.page = page
        return twin

    def _take_page(self) -> int:
        evicted = None if self._pool.free_pages else self._evict()
        page = self._pool.allocate()
        if self.watch is not None:
            self.watch.allocated(page, evicted)
        return page

    def _evict(self) -> int:
        node = self._queue.pop(self._evictable)
        page, parent = node.page, node.parent
        assert page is not None and parent is not None  # a ready node of the tree
        self._ghosts.add(node)
        self._tree.remove(node)
        self._pool.free(page)
        self._offer(parent)
        return page

    def _offer(self, node: Node) -> None:
        if self._evictable(node):
            self._queue.offer(node)

    def _evictable(self, node: Node) -> bool:
        return node.page is not None and not node.children and not self._pool.holders(node.page)

    def check(self) -> None:
        """Recomputes everything from the holdings and the tree. Raises AssertionError with a
        sentence on the first broken invariant. O(total_pages + held references): for tests."""
        self._pool.check()
        self._tree.check()
        for key, holding in self._holdings.items():
            self._check_holding(key, holding)
        self._check_pages()
        self._check_nodes()

    def _check_holding(self, key: str, holding: Holding) -> None:
        pages, nodes = holding.pages, holding.nodes
        require(len(set(pages)) == len(pages), f"{key} holds a page twice")
        require(len(nodes) <= len(pages), f"{key} is in the tree beyond its pages")
        require(
            [node.page for node in nodes] == pages[: len(nodes)],
            f"{key} holds other pages than the nodes of its path",
        )
        parent: Node | None = None  # a root
        for node in [*nodes, *holding.pending]:
            above = node.parent
            require(
                above is not None and (above is parent or (parent is None and above.is_root)),
                f"{key} holds {node} but not what is above it",
            )
            require(node.salt == holding.salt, f"{key} has salt {holding.salt!r}, not {node}")
            parent = node
        for node in holding.pending:
            require(node.owner == key, f"{key} announced {node}, whose owner is another")

    def _check_pages(self) -> None:
        in_tree = {node.page for node in self._tree.nodes() if node.page is not None}
        holders = [0] * self.total_pages
        for key, holding in self._holdings.items():
            for page in holding.pages:
                holders[page] += 1
            for page in holding.pages[len(holding.nodes) :]:
                require(page not in in_tree, f"private page {page} of {key} is in the tree")
                require(self._pool.holders(page) == 1, f"private page {page} of {key} is shared")
        for page, count in enumerate(holders):
            counted = self._pool.holders(page)
            require(counted == count, f"page {page} has {count} holders, {counted} counted")
        cached = sum(not holders[page] for page in in_tree)
        require(cached == self.cached_pages, f"{cached} pages cached, {self.cached_pages} counted")
        held = sum(count > 0 for count in holders)
        require(
            self.free_pages + cached + held == self.total_pages,
            f"{self.free_pages} free + {cached} cached + {held} held is not {self.total_pages}",
        )

    def _check_nodes(self) -> None:
        announced = {id(node) for holding in self._holdings.values() for node in holding.pending}
        nodes = list(self._tree.nodes())
        for node in nodes:
            if node.page is None:
                require(id(node) in announced, f"{node} is pending for no live sequence")
                continue
            above = node.parent
            assert above is not None  # RadixTree.check has been here
            require(
                above.page is None
                or self._pool.holders(node.page) <= self._pool.holders(above.page),
                f"{node} has more holders than its parent",
            )
        self._queue.check([node for node in nodes if self._evictable(node)])
