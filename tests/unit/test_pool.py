"""PagePool: every page is free, idle or held, and the counts say which."""

from __future__ import annotations

import pytest

from toque.memory.pool import PagePool


def test_pages_are_distinct_and_run_out() -> None:
    pool = PagePool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert (pool.free_pages, pool.idle_pages, pool.held_pages) == (0, 0, 3)
    with pytest.raises(ValueError, match="no page is free"):
        pool.allocate()
    pool.check()


def test_a_page_stays_held_until_its_last_holder_lets_go() -> None:
    pool = PagePool(2)
    page = pool.allocate()
    pool.retain(page)
    pool.release(page)
    assert (pool.holders(page), pool.held_pages, pool.idle_pages) == (1, 1, 0)
    pool.release(page)
    assert (pool.holders(page), pool.held_pages, pool.idle_pages) == (0, 0, 1)
    pool.check()


def test_an_idle_page_is_not_handed_out_and_can_be_held_again() -> None:
    pool = PagePool(2)
    page = pool.allocate()
    pool.release(page)
    assert pool.allocate() != page
    with pytest.raises(ValueError, match="no page is free"):
        pool.allocate()
    pool.retain(page)
    assert (pool.free_pages, pool.idle_pages, pool.held_pages) == (0, 0, 2)
    pool.check()


def test_a_freed_page_comes_back() -> None:
    pool = PagePool(1)
    page = pool.allocate()
    pool.release(page)
    pool.free(page)
    assert (pool.free_pages, pool.idle_pages, pool.held_pages) == (1, 0, 0)
    assert pool.allocate() == page
    pool.check()


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = PagePool(3)
    held = pool.allocate()
    idle = pool.allocate()
    pool.release(idle)
    free = next(iter({0, 1, 2} - {held, idle}))
    for misuse, page, message in (
        (pool.free, held, "held by 1"),
        (pool.free, free, "free already"),
        (pool.release, idle, "no holder"),
        (pool.release, free, "no holder"),
        (pool.retain, free, "is free"),
    ):
        with pytest.raises(ValueError, match=message):
            misuse(page)
        assert (pool.free_pages, pool.idle_pages, pool.held_pages) == (1, 1, 1)
        pool.check()
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(0)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "twice"),
        (lambda pool: pool._free.pop(), "differ"),
        (lambda pool: setattr(pool, "_held_pages", 2), "counted"),
        (lambda pool: pool._references.__setitem__(0, -2), "negative"),
    ],
)
def test_check_sees_a_damaged_pool(damage, sentence) -> None:
    pool = PagePool(4)
    pool.allocate()
    damage(pool)
    with pytest.raises(AssertionError, match=sentence):
        pool.check()
