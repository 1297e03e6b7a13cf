"""The page pool of extents: pages in a row, from the shortest run that has them."""

import pytest

from jllm.engine.prefix_cache import PrefixCache
from jllm.kv_policies.runs import RunPool

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.engine.test_pages import Hoard, actions, play  # noqa: E402


def test_runs_are_the_shortest_that_fit_and_freed_neighbours_merge():
    pool = RunPool(16, 8)
    pages = pool.allocate(16)
    pool.free([2, 3, 4, 8, 9, 12])
    assert (pool.num_free, pool.runs.longest, pool.fragmentation) == (6, 3, 0.5)
    assert pool.allocate_run(4) is None
    assert pool.allocate_run(2) == [8, 9]
    assert pool.allocate_run(2) == [2, 3]
    assert pool.extend(3, 5) == [4]
    assert pool.extend(3, 5) == []
    assert pool.extend(15, 1) == []
    pool.free([11, 13])
    assert pool.allocate_run(3) == [11, 12, 13]
    assert pages == list(range(16))


def test_scattered_pages_come_from_short_runs():
    pool = RunPool(12, 8)
    pool.allocate(12)
    pool.free([0, 2, 4, 5, 6, 7])
    assert sorted(pool.allocate(3)) == [0, 2, 4]
    assert pool.runs.longest == 3


def test_what_is_reclaimed_makes_a_run_and_no_more():
    pool = RunPool(12, 8)
    pool.evictor = hoard = Hoard(pool)
    assert pool.allocate_run(5) == [7, 8, 9, 10, 11]
    assert len(hoard.pages) == 4, "evicted more than it took"
    assert pool.allocate_run(7) == [0, 1, 2, 3, 4, 5, 6]
    assert pool.allocate_run(1) is None
    pool = RunPool(12, 8)
    pool.evictor = Hoard(pool)
    assert pool.allocate_run(12) == list(range(12)), "all of it"


def test_what_can_be_reclaimed_parts_no_run():
    pool = RunPool(12, 8)
    pool.evictor = hoard = Hoard(pool)
    assert (pool.fragmentation, pool.scattered()) == (pytest.approx(5 / 6), 0)
    hoard.pages.remove(4)  # somebody else holds it
    assert pool.scattered() == pytest.approx(4 / 11)
    pool.evictor = None
    assert pool.scattered() == pool.fragmentation


def test_nothing_is_forgotten_for_a_run_that_cannot_be():
    pool = RunPool(8, 2)
    pool.evictor = cache = PrefixCache(pool)
    pages = pool.allocate(8)
    for page in pages[::2]:  # pages of others stand between those that it keeps
        cache.insert((page, page), [page], leaving=True)
    pool.free(pages[::2])
    assert (pool.num_available, pool.num_free) == (4, 0)
    assert pool.allocate_run(2) is None
    assert cache.num_pages == 4
    pool.free([3])
    assert pool.allocate_run(4) is None
    assert cache.num_pages == 4
    assert pool.allocate_run(3) == [2, 3, 4]


def test_a_page_that_the_cache_and_a_sequence_have_is_in_the_way_of_a_run():
    pool = RunPool(4, 2)
    pool.evictor = cache = PrefixCache(pool)
    pages = pool.allocate(4)
    for page in pages:
        cache.insert((page, page), [page], leaving=True)
    pool.free([0, 2, 3])
    assert pool.allocate_run(3) is None
    assert cache.num_pages == 4
    assert pool.allocate_run(2) == [2, 3]


@settings(max_examples=150, derandomize=True)
@given(st.integers(1, 20), actions("run", "extend"))
def test_pages_are_conserved_and_runs_are_the_longest(num_pages, actions):
    pool = RunPool(num_pages, 8)

    def longest(model):
        assert pool.runs.longest == max((length for length, _ in model.runs), default=0)

    play(pool, actions, longest)
    pool.free(range(num_pages))
    assert pool.allocate_run(num_pages) == list(range(num_pages))
