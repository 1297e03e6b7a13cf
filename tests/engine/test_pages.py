"""The page pool: no page is lost, none is handed out twice."""

import pytest

from jllm.engine.pages import PagePool

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402


def test_takes_all_pages_and_no_more():
    pool = PagePool(4, 16)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_too_many_takes_nothing():
    pool = PagePool(4, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens, pages):
    assert PagePool(1, 16).pages_for(tokens) == pages


@pytest.mark.parametrize("page", [-1, 0, 3, 4])
def test_a_page_not_taken_cannot_be_freed(page):
    pool = PagePool(4, 16)
    taken = pool.allocate(2)
    assert taken == [0, 1]
    pool.free([0])
    with pytest.raises(AssertionError, match=f"page {page} is freed but not taken"):
        pool.free([page])
    assert pool.num_free == 3


def test_a_page_twice_in_one_list():
    pool = PagePool(4, 16)
    (page,) = pool.allocate(1)
    with pytest.raises(AssertionError, match=f"page {page} "):
        pool.free([page, page])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(1, 12), st.lists(st.one_of(st.integers(0, 13), st.just("free")), max_size=40))
def test_pages_are_conserved(num_pages, actions):
    pool, held = PagePool(num_pages, 8), []
    for action in actions:
        if action == "free":
            if held:
                pool.free(held.pop(len(held) // 2))
            continue
        free = pool.num_free
        pages = pool.allocate(action)
        assert (pages is None) == (action > free)
        if pages is not None:
            assert len(pages) == action
            held.append(pages)
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) == num_pages - pool.num_free
        assert set(taken) <= set(range(num_pages))
    for pages in held:
        pool.free(pages)
    assert sorted(pool.allocate(num_pages)) == list(range(num_pages))
