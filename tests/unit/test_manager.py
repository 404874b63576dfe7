"""CacheManager: each documented case by itself. All of them together: test_manager_machine.py."""

from __future__ import annotations

import pytest

from toque.memory import CacheManager, Match


def start(cache: CacheManager, key: str, tokens: list[int], salt: str = "") -> Match:
    match = cache.match(tokens, salt)
    cache.admit(key, tokens, salt, match)
    return match


def compute(cache: CacheManager, key: str, tokens: list[int]) -> tuple[int, ...]:
    """Pages for all tokens, computed and committed; returns the sequence's pages."""
    assert cache.grow(key, len(tokens)) is not None
    cache.commit(key, tokens, len(tokens))
    cache.check()
    return cache.pages_of(key)


def serve(cache: CacheManager, key: str, tokens: list[int], salt: str = "") -> tuple[int, ...]:
    """A whole life. Returns the pages it had."""
    start(cache, key, tokens, salt)
    pages = compute(cache, key, tokens)
    cache.release(key)
    cache.check()
    return pages


def test_a_match_leaves_a_token_to_compute() -> None:
    cache = CacheManager(8, 2)
    pages = serve(cache, "a", [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4], "").pages == pages[:1]
    assert cache.match([1, 2, 3, 4, 5], "") == Match(pages, 4, None)
    assert cache.match([1], "") == Match((), 0, None)
    assert cache.match([], "") == Match((), 0, None)


def test_a_partial_page_never_enters_the_tree() -> None:
    cache = CacheManager(8, 4)
    pages = serve(cache, "a", [1, 2, 3, 4, 5, 6, 7])
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9], "").pages == pages[:1]
    assert (cache.free_pages, cache.cached_pages) == (7, 1)


def test_a_page_is_matched_only_once_it_is_committed() -> None:
    cache = CacheManager(8, 2)
    start(cache, "a", [1, 2, 3, 4, 5])
    assert cache.grow("a", 5) is not None
    assert cache.match([1, 2, 3, 4, 5], "").pages == ()
    cache.commit("a", [1, 2, 3, 4, 5], 3)
    assert cache.match([1, 2, 3, 4, 5], "").pages == cache.pages_of("a")[:1]
    cache.check()


def test_equal_prompts_wait_chunk_by_chunk_and_share() -> None:
    cache = CacheManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    start(cache, "a", tokens)
    cache.grow("a", 5)
    first = cache.match(tokens, "").pending
    assert first is not None
    assert cache.is_pending(first)
    cache.commit("a", tokens, 2)
    assert not cache.is_pending(first)
    match = cache.match(tokens, "")
    assert match.num_tokens == 2
    assert match.pending is not None
    cache.commit("a", tokens, 5)
    assert not cache.is_pending(match.pending)
    shared = start(cache, "b", tokens).pages
    assert shared == cache.pages_of("a")[:2]
    compute(cache, "b", tokens)
    assert cache.held_pages == 4  # two shared, one partial page each


@pytest.mark.parametrize("computed", [0, 2, 3])
def test_who_waits_for_a_sequence_that_is_gone_computes_it_itself(computed: int) -> None:
    """Abort and preemption: nobody waits for ever, and the waiter's own pages are announced."""
    cache = CacheManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    start(cache, "a", tokens)
    cache.grow("a", computed)
    cache.commit("a", tokens, computed)
    awaited = cache.match(tokens, "").pending
    assert awaited is not None
    cache.release("a")
    cache.check()
    assert not cache.is_pending(awaited)
    match = start(cache, "b", tokens)
    assert (match.num_tokens, match.pending) == (computed // 2 * 2, None)
    again = cache.match(tokens, "").pending
    assert again is not None
    assert again is not awaited
    compute(cache, "b", tokens)
    assert cache.match(tokens, "").num_tokens == 4


def test_a_preempted_sequence_finds_what_it_had() -> None:
    """Decoded tokens included: they are known tokens when it is admitted again."""
    cache = CacheManager(8, 2)
    start(cache, "a", [1, 2, 3])
    tokens = [1, 2, 3, 4, 5]
    pages = compute(cache, "a", tokens)
    cache.release("a")
    assert start(cache, "a", tokens).pages == pages[:2]


def test_another_salt_never_shares_nor_waits() -> None:
    cache = CacheManager(8, 2)
    tokens = [1, 2, 3, 4, 5]
    serve(cache, "a", tokens, "red")
    start(cache, "b", [*tokens, 6, 7], "red")
    for salt in ("", "blue", "red "):
        assert cache.match([*tokens, 6, 7], salt) == Match((), 0, None)
    assert cache.match([*tokens, 6, 7], "red").pending is not None


def test_eviction_takes_the_least_recently_released_leaf_first() -> None:
    cache = CacheManager(6, 1)
    serve(cache, "a", [1, 2])
    serve(cache, "b", [1, 3])
    serve(cache, "c", [4, 5])
    serve(cache, "a2", [1, 2, 9])  # uses 1 and 2 again, and adds 9
    order = [[1, 3], [4, 5], [4], [1, 2, 9], [1, 2], [1]]
    start(cache, "z", [7])
    for count, gone in enumerate(order):
        assert len(cache.match([*gone, 0], "").pages) == len(gone), gone
        assert cache.grow("z", count + 1) is not None
        cache.check()
        assert len(cache.match([*gone, 0], "").pages) == len(gone) - 1, gone


def test_recency_is_that_of_release_not_of_admission() -> None:
    cache = CacheManager(3, 1)
    start(cache, "early", [1])
    compute(cache, "early", [1])
    serve(cache, "late", [2])
    cache.release("early")
    start(cache, "z", [3])
    cache.grow("z", 2)
    assert cache.match([1, 0], "").num_tokens == 1
    assert cache.match([2, 0], "").num_tokens == 0


def test_looking_is_not_using() -> None:
    """A match that is not admitted must not keep pages alive."""
    cache = CacheManager(3, 1)
    serve(cache, "old", [1])
    serve(cache, "new", [2])
    cache.match([1, 0], "")
    start(cache, "z", [3])
    cache.grow("z", 2)
    assert cache.match([1, 0], "").num_tokens == 0
    assert cache.match([2, 0], "").num_tokens == 1


def test_grow_is_all_or_nothing() -> None:
    cache = CacheManager(4, 2)
    serve(cache, "old", [1, 2])
    start(cache, "held", [5])
    cache.grow("held", 1)
    start(cache, "a", [7, 8, 9])
    assert cache.grow("a", 9) is None  # five pages, three available
    assert (cache.free_pages, cache.cached_pages, cache.held_pages) == (2, 1, 1)
    assert cache.match([1, 2, 3], "").num_tokens == 2, "nothing was evicted in vain"
    assert cache.num_pages("a") == 0
    new_pages = cache.grow("a", 6)
    assert new_pages == cache.pages_of("a")
    assert len(cache.pages_of("a")) == 3
    assert cache.grow("a", 6) == cache.grow("a", 1) == ()
    cache.check()


def test_growing_never_evicts_an_admitted_match() -> None:
    cache = CacheManager(3, 1)
    serve(cache, "old", [1, 2])
    match = start(cache, "a", [1, 2, 3])
    assert match.num_tokens == 2
    start(cache, "b", [8, 9])
    assert cache.grow("b", 2) is None
    assert cache.grow("a", 3) is not None
    assert cache.pages_of("a")[:2] == match.pages
    cache.check()


def test_a_stale_match_is_refused_and_changes_nothing() -> None:
    cache = CacheManager(2, 1)
    serve(cache, "old", [1])
    stale = cache.match([1, 2], "")
    start(cache, "greedy", [5, 6])
    cache.grow("greedy", 2)
    with pytest.raises(ValueError, match="stale"):
        cache.admit("a", [1, 2], "", stale)
    with pytest.raises(KeyError):
        cache.release("a")
    cache.check()


@pytest.mark.parametrize("tokens", [[1, 2, 9], [3, 4, 5], [1, 2]])
def test_a_match_of_other_tokens_is_refused(tokens: list[int]) -> None:
    cache = CacheManager(4, 1)
    serve(cache, "old", [1, 2, 3])
    match = cache.match([1, 2, 3, 4], "")
    with pytest.raises(ValueError, match="stale"):
        cache.admit("a", tokens, "", match)
    cache.check()


def test_two_that_decode_equal_pages_keep_their_own_until_one_is_gone() -> None:
    cache = CacheManager(12, 2)
    prompt, tokens = [1, 2, 3], [1, 2, 3, 4, 5, 6]
    start(cache, "a", prompt)
    compute(cache, "a", prompt)
    start(cache, "b", prompt)
    compute(cache, "b", prompt)
    theirs = compute(cache, "a", tokens)
    ours = compute(cache, "b", tokens)
    assert ours[0] == theirs[0]
    assert not set(ours[1:]) & set(theirs[1:])
    assert cache.match([*tokens, 0], "").pages == theirs, "the first to finish a page shares it"

    longer = [*tokens, 7, 8]
    pages = compute(cache, "b", longer)
    assert cache.match([*longer, 0], "").pages == theirs, "below a private page all is private"

    cache.release("a")
    cache.commit("b", longer, len(longer))
    cache.check()
    assert cache.match([*longer, 0], "").pages == pages, "b takes its place in the tree"
    assert (cache.held_pages, cache.cached_pages) == (4, 0), "a's equal pages are not kept twice"


def test_private_pages_are_freed_with_their_sequence() -> None:
    cache = CacheManager(8, 1)
    start(cache, "a", [1])
    start(cache, "b", [1])  # did not wait
    shared = compute(cache, "a", [1, 2])
    compute(cache, "b", [1, 2])
    cache.release("b")
    assert (cache.free_pages, cache.cached_pages, cache.held_pages) == (6, 0, 2)
    assert cache.match([1, 2, 3], "").pages == shared


def test_who_did_not_wait_leaves_the_announcement_alone() -> None:
    """b is faster than a. a's node is a's to complete: others wait for a, and b joins after."""
    cache = CacheManager(8, 1)
    start(cache, "a", [1, 2])
    start(cache, "b", [1, 2])
    ours = compute(cache, "b", [1, 2])
    awaited = cache.match([1, 2, 3], "").pending
    assert awaited is not None
    assert cache.is_pending(awaited)
    cache.release("a")  # never got anywhere
    assert not cache.is_pending(awaited)
    cache.commit("b", [1, 2], 2)
    assert cache.match([1, 2, 3], "").pages == ours
    cache.check()


def test_nothing_is_announced_below_the_announcement_of_another() -> None:
    """It would vanish with a, or keep a's pages in the tree after a is gone."""
    cache = CacheManager(8, 1)
    start(cache, "a", [1, 2])
    start(cache, "b", [1, 2, 3, 4])  # did not wait
    cache.check()
    cache.release("a")
    cache.check()
    assert cache.match([1, 2, 3, 4, 5], "") == Match((), 0, None)
    ours = compute(cache, "b", [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4, 5], "").pages == ours


def test_a_prompt_cached_whole_is_continued_in_the_tree() -> None:
    """Its last page is computed again for one token; the newer page replaces the older one, so
    what is decoded after it is cached as well and no page is spent twice."""
    cache = CacheManager(4, 2)
    prompt = [1, 2, 3, 4]
    first, second = serve(cache, "a", prompt)
    assert start(cache, "b", prompt).pages == (first,)
    pages = compute(cache, "b", [*prompt, 5, 6, 7, 8])  # the whole pool: nothing is held double
    assert pages[0] == first
    cache.release("b")
    assert cache.match([*prompt, 5, 6, 7, 8, 9], "").pages == pages
    assert (cache.free_pages, cache.cached_pages) == (0, 4)
    assert second in pages, "the older page was freed or evicted, and used again"


def test_the_newer_page_keeps_the_descendants_of_the_older() -> None:
    cache = CacheManager(6, 1)
    first, second, third = serve(cache, "a", [1, 2, 3])
    start(cache, "b", [1, 2])
    compute(cache, "b", [1, 2])
    newer = cache.pages_of("b")[1]
    assert newer != second
    assert cache.match([1, 2, 3, 0], "").pages == (first, newer, third)
    assert cache.free_pages == 3


def test_reset_drops_what_is_cached_and_keeps_what_is_held() -> None:
    cache = CacheManager(8, 1)
    serve(cache, "old", [1, 2, 3])
    serve(cache, "other", [7, 8], "salt")
    match = start(cache, "a", [1, 2])
    cache.reset()
    cache.check()
    assert (cache.free_pages, cache.cached_pages, cache.held_pages) == (7, 0, 1)
    assert cache.match([1, 2, 3], "").pages == match.pages
    assert cache.match([7, 8, 9], "salt").pages == ()


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    cache = CacheManager(8, 2, prefix_caching=False)
    start(cache, "a", [1, 2, 3])
    compute(cache, "a", [1, 2, 3])
    assert cache.match([1, 2, 3], "") == Match((), 0, None)
    cache.release("a")
    assert (cache.free_pages, cache.cached_pages) == (8, 0)


def test_unknown_and_duplicate_keys_are_refused() -> None:
    cache = CacheManager(8, 2)
    start(cache, "a", [1, 2, 3])
    with pytest.raises(ValueError, match="admitted already"):
        cache.admit("a", [1, 2, 3], "", cache.match([1, 2, 3], ""))
    cache.release("a")
    for call in (
        lambda: cache.grow("a", 1),
        lambda: cache.commit("a", [0], 0),
        lambda: cache.release("a"),
        lambda: cache.pages_of("a"),
        lambda: cache.num_pages("a"),
    ):
        with pytest.raises(KeyError):
            call()
    cache.check()


def test_commit_refuses_what_cannot_be_computed() -> None:
    cache = CacheManager(8, 2)
    start(cache, "a", [1, 2, 3])
    with pytest.raises(ValueError, match="has not the tokens or pages"):
        cache.commit("a", [1, 2, 3], 1)
    cache.grow("a", 4)
    with pytest.raises(ValueError, match="has not the tokens or pages"):
        cache.commit("a", [1, 2, 3], 4)
    with pytest.raises(ValueError, match="announced"):
        cache.commit("a", [1, 9, 3], 3)
    cache.check()


def test_removed_nodes_do_not_keep_the_tree_alive() -> None:
    """A waiter may hold its node long after it was removed."""
    cache = CacheManager(4, 1)
    start(cache, "a", [1, 2])
    compute(cache, "a", [1])
    awaited = cache.match([1, 2, 3], "").pending
    assert awaited is not None
    cache.release("a")
    assert (awaited.parent, awaited.page, awaited.children) == (None, None, {})
    assert not cache.is_pending(awaited)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda cache, seq: seq.pages.append(seq.pages[0]), "holds a page twice"),
        (lambda cache, seq: seq.pages.reverse(), "other pages than the nodes"),
        (lambda cache, seq: seq.pages.pop(), "holders"),
        (lambda cache, seq: seq.nodes.pop(), "but not what is above it"),
        (lambda cache, seq: seq.pending.pop(), "pending for no live sequence"),
        (lambda cache, seq: (seq.pending.clear(), seq.nodes.pop()), "is in the tree"),
        (lambda cache, seq: setattr(seq.pending[0], "owner", "b"), "whose owner is another"),
        (lambda cache, seq: cache._pool.retain(seq.pages[0]), "1 holders, 2 counted"),
        (lambda cache, seq: cache._pool.retain(seq.pages[2]), "is shared"),
        (lambda cache, seq: cache._holdings.pop("a"), "pending for|holders"),
        (lambda cache, seq: cache._queue._heap.clear(), "evictable but not queued"),
        (lambda cache, seq: cache._pool.release(cache._pool.allocate()), "cached"),
        (lambda cache, seq: setattr(seq, "salt", "s"), "has salt"),
    ],
)
def test_check_sees_a_damaged_manager(damage, sentence) -> None:
    cache = CacheManager(8, 1)
    serve(cache, "old", [7, 8])
    tokens = [1, 2, 3, 4]
    start(cache, "a", tokens)
    cache.grow("a", 3)
    cache.commit("a", tokens, 2)
    cache.check()
    damage(cache, cache._holdings["a"])
    with pytest.raises(AssertionError, match=sentence):
        cache.check()
