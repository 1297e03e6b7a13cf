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


def test_shared_pages_are_free_when_the_last_holder_frees_them():
    pool = PagePool(4, 8)
    pages = pool.allocate(2)
    pool.share(pages)
    pool.share(pages[:1])
    assert [pool.refcount(page) for page in (*pages, 3)] == [3, 2, 0]
    pool.free(pages)
    pool.free(pages)
    assert (pool.num_free, pool.refcount(pages[0])) == (3, 1)
    pool.free(pages[:1])
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="page 0 is shared but not taken"):
        pool.share([0])


class Hoard:
    """Holds every other page and gives back the newest first."""

    def __init__(self, pool):
        self.pool = pool
        pages = pool.allocate(pool.num_pages)
        self.pages = pages[::2]
        pool.free(pages[1::2])

    @property
    def evictable(self):
        return len(self.pages)

    def holds(self, page):
        return page in self.pages

    def on_share(self, page):
        raise AssertionError("these are not shared")

    def evict(self, pages):
        for _ in range(min(pages, len(self.pages))):
            self.pool.free([self.pages.pop()])


def test_what_is_short_is_reclaimed_and_no_more():
    pool = PagePool(12, 8)
    pool.evictor = hoard = Hoard(pool)
    assert (pool.num_free, pool.num_available) == (6, 12)
    assert len(pool.allocate(8)) == 8
    assert len(hoard.pages) == 4
    assert pool.allocate(5) is None


class Model:
    """The same by looking at all pages."""

    def __init__(self, num_pages):
        self.refcounts = [0] * num_pages

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(length, start) of each free run, ascending."""
        runs, start = [], None
        for page, refcounts in enumerate([*self.refcounts, 1]):
            if not refcounts and start is None:
                start = page
            elif refcounts and start is not None:
                runs.append((page - start, start))
                start = None
        return sorted(runs)


def play(pool, actions, also=lambda model: None) -> None:
    """Does these, and checks the pool against a model after each."""
    num_pages, model, held = pool.num_pages, Model(pool.num_pages), []
    for name, n in actions:
        largest = max((length for length, _ in model.runs), default=0)
        free = model.refcounts.count(0)
        taken: list[int] | None = []
        if name == "allocate":
            taken = pool.allocate(n)
            assert (taken is None) == (n > free)
        elif name == "run":
            taken = pool.allocate_run(n)
            assert (taken is None) == (n > largest)
            if taken is not None:
                assert taken == list(range(taken[0], taken[0] + n))
                assert any(
                    taken[0] == at and not any(n <= m < length for m, _ in model.runs) for length, at in model.runs
                )
        elif held and name == "extend":
            last = held[n % len(held)][-1]
            taken = pool.extend(last, n)
            behind = next((length for length, at in model.runs if at == last + 1), 0)
            assert taken == list(range(last + 1, last + 1 + min(n, behind)))
        elif held and name == "free":
            pages = held.pop(n % len(held))
            pool.free(pages)
            for page in pages:
                model.refcounts[page] -= 1
        elif held:
            pages = held[n % len(held)]
            pool.share(pages)
            held.append(pages)
            for page in pages:
                model.refcounts[page] += 1
        if taken:
            assert all(not model.refcounts[page] for page in taken), "a page is handed out twice"
            for page in taken:
                model.refcounts[page] += 1
            held.append(taken)
        assert sorted(pool.free_pages) == [page for page in range(num_pages) if not model.refcounts[page]]
        assert [pool.refcount(page) for page in range(num_pages)] == model.refcounts
        assert pool.num_free == model.refcounts.count(0)
        also(model)
    for pages in held:
        pool.free(pages)
    assert sorted(pool.allocate(num_pages)) == list(range(num_pages))


def actions(*names):
    """Some of those that play knows, beside allocate, free and share."""
    takes, others = (
        ["allocate", *(n for n in names if n == "run")],
        ["free", "share", *(n for n in names if n != "run")],
    )
    one = st.tuples(st.sampled_from(takes), st.integers(1, 9)), st.tuples(st.sampled_from(others), st.integers(0, 8))
    return st.lists(st.one_of(*one), max_size=40)


@settings(max_examples=150, derandomize=True)
@given(st.integers(1, 20), actions())
def test_pages_are_conserved(num_pages, actions):
    play(PagePool(num_pages, 8), actions)
