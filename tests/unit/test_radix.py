"""RadixTree against a dictionary of paths; EvictionQueue against sorting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toque.memory.radix import EvictionQueue, Node, RadixTree

TOKENS = st.lists(st.integers(0, 1), max_size=8)
SALTS = st.sampled_from(["", "s"])


@settings(max_examples=200, deadline=None)
@given(
    block_size=st.integers(1, 3),
    stored=st.lists(st.tuples(SALTS, TOKENS), max_size=6),
    asked=st.tuples(SALTS, TOKENS),
    most=st.integers(0, 8),
)
def test_walk_finds_the_longest_stored_prefix(block_size, stored, asked, most) -> None:
    """The oracle keeps every page-aligned prefix of what was stored in a dictionary."""
    tree = RadixTree(block_size)
    pages: dict[tuple[str, tuple[int, ...]], int] = {}
    for salt, tokens in stored:
        for index in range(len(tokens) // block_size):
            prefix = (salt, tuple(tokens[: (index + 1) * block_size]))
            if prefix not in pages:
                above, _ = tree.walk(tokens, salt, index)
                parent = above[-1] if above else tree.root(salt)
                tree.add_ready(parent, tree.edge(tokens, index), len(pages))
                pages[prefix] = len(pages)
    tree.check()

    salt, tokens = asked
    most = min(most, len(tokens) // block_size)
    expected = []
    for index in range(most):
        prefix = (salt, tuple(tokens[: (index + 1) * block_size]))
        if prefix not in pages:
            break
        expected.append(pages[prefix])
    ready, pending = tree.walk(tokens, salt, most)
    assert [node.page for node in ready] == expected
    assert pending is None
    assert sorted(node.page for node in tree.nodes()) == list(range(len(pages)))


def test_a_walk_ends_at_a_pending_node_and_names_it() -> None:
    tree = RadixTree(2)
    ready = tree.add_ready(tree.root(""), (1, 2), 0)
    pending = tree.add_pending(ready, (3, 4), "a")
    tree.add_pending(pending, (5, 6), "a")
    assert tree.walk([1, 2, 3, 4, 5, 6], "", 3) == ([ready], pending)
    assert tree.walk([1, 2, 3, 4, 5, 6], "", 1) == ([ready], None)
    tree.check()


def test_a_partial_page_is_no_edge() -> None:
    with pytest.raises(ValueError, match="only full pages"):
        RadixTree(4).edge([1, 2, 3], 0)
    with pytest.raises(ValueError, match="at least one token"):
        RadixTree(0)


def test_only_leaves_are_removed_and_nothing_is_added_twice() -> None:
    tree = RadixTree(1)
    parent = tree.add_ready(tree.root(""), (1,), 0)
    child = tree.add_pending(parent, (2,), "a")
    with pytest.raises(ValueError, match="not a leaf"):
        tree.remove(parent)
    with pytest.raises(ValueError, match="already"):
        tree.add_ready(parent, (2,), 1)
    tree.remove(child)
    with pytest.raises(ValueError, match="not a leaf"):
        tree.remove(child)
    assert (child.owner, child.page, child.parent) == (None, None, None)
    tree.check()


def test_salts_that_are_used_once_leave_nothing_behind() -> None:
    """Clients choose salts: a root per salt ever seen would be a leak."""
    tree = RadixTree(1)
    for number in range(100):
        salt = str(number)
        assert tree.walk([1], salt, 1) == ([], None)
        tree.remove(tree.add_ready(tree.root(salt), (1,), number))
    assert not tree._roots


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda a, b: setattr(a, "owner", "x"), "either a page"),
        (lambda a, b: (setattr(a, "page", None), setattr(a, "owner", "x")), "below a pending"),
        (lambda a, b: setattr(b, "page", a.page), "in the tree twice"),
        (lambda a, b: setattr(b, "salt", "other"), "another salt"),
        (lambda a, b: setattr(b, "parent", None), "do not know each other"),
        (lambda a, b: a.parent.children.clear(), "outlived its children"),
    ],
)
def test_check_sees_a_damaged_tree(damage, sentence) -> None:
    tree = RadixTree(1)
    a = tree.add_ready(tree.root(""), (1,), 0)
    b = tree.add_ready(a, (2,), 1)
    tree.check()
    damage(a, b)
    with pytest.raises(AssertionError, match=sentence):
        tree.check()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_queue_pops_in_order_of_last_use(data) -> None:
    """With pages that cost the same. Between offers and pops, nodes are used again (later tick) or
    cease to be evictable; the oracle sorts what is evictable at each pop."""
    queue = EvictionQueue()
    nodes = [Node("", (n,), None, n, page=n) for n in range(data.draw(st.integers(1, 6)))]
    evictable: set[Node] = set()
    tick = 0
    for _ in range(data.draw(st.integers(1, 40))):
        node = data.draw(st.sampled_from(nodes))
        match data.draw(st.sampled_from(["use", "use at the same tick", "lock", "pop"])):
            case "use" | "use at the same tick" as how:
                tick += how == "use"
                queue.used(node, tick, 1.0)
                evictable.add(node)
                queue.offer(node)
            case "lock":
                evictable.discard(node)
            case "pop" if evictable:
                oldest = min(evictable, key=lambda node: (node.used_tick, node.serial))
                assert queue.pop(evictable.__contains__) is oldest
                evictable.remove(oldest)
                tick += 1  # what is used from now on is used later
            case "pop":
                with pytest.raises(LookupError):
                    queue.pop(evictable.__contains__)
        queue.check(list(evictable))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(1, 8), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40),
)
def test_what_is_dear_outlives_as_many_evictions_as_it_costs_more(costs, acts) -> None:
    """The oracle is GreedyDual as it is published: an evicted page's worth is taken from all."""
    queue = EvictionQueue()
    nodes = [Node("", (n,), None, n, page=n) for n in range(len(costs))]
    credit: dict[int, tuple[float, int]] = {}
    for tick, (number, evict) in enumerate(acts):
        if evict and credit:
            node = queue.pop(lambda node, held=credit: node.serial in held)
            lowest = min(value for value, _ in credit.values())
            assert credit.pop(node.serial)[0] == pytest.approx(lowest, abs=1e-9)
            credit = {n: (value - lowest, t) for n, (value, t) in credit.items()}
        elif number < len(nodes):
            queue.used(nodes[number], tick, costs[number])
            queue.offer(nodes[number])
            credit[number] = (costs[number], tick)


def test_the_queue_does_not_grow_with_use() -> None:
    queue = EvictionQueue()
    node = Node("", (1,), None, 1, page=0)
    for tick in range(1000):
        queue.used(node, tick, 1.0)
        queue.offer(node)
    assert len(queue._heap) == 1


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda queue, node: queue._heap.clear(), "not queued"),
        (lambda queue, node: queue._heap.append(queue._heap[0]), "twice"),
        (lambda queue, node: setattr(node, "used_tick", -1), "too late"),
        (lambda queue, node: setattr(node, "queued", False), "foreign"),
    ],
)
def test_check_sees_a_damaged_queue(damage, sentence) -> None:
    queue = EvictionQueue()
    node = Node("", (1,), None, 1, page=0)
    queue.offer(node)
    queue.check([node])
    damage(queue, node)
    with pytest.raises(AssertionError, match=sentence):
        queue.check([node])
