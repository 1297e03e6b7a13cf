"""Who owns which page of the KV pool."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import groupby
from typing import Protocol


class Evictor(Protocol):
    """Holds pages that it can do without, as a prefix cache does. The pool tells it when others hold them, too."""

    @property
    def evictable(self) -> int:
        """How many pages evict() could give back now."""

    def evict(self, pages: int) -> None:
        """Gives back (PagePool.free) at least `pages` pages, or all that it can."""

    def holds(self, page: int) -> bool:
        """Whether one reference to this page is the evictor's."""

    def on_share(self, page: int) -> None:
        """This page's refcount went from one to two."""

    def on_single(self, page: int) -> None:
        """This page's refcount went from two to one."""


class PagePool:
    """Pages 0 .. num_pages-1 of page_size tokens each, every one free or with a refcount.

    Free pages are kept as runs, the longest that they form, in lists by length: to take or to free a run costs a few
    dictionary entries, and a bisection among the different lengths, of which there are at most sqrt(2 * num_pages).
    A page is free once it has been freed as often as it was allocated and shared. Where free pages are too few,
    `evictor` is asked for its own.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self.evictor: Evictor | None = None
        self._refcounts = [0] * num_pages
        self._length = {0: num_pages}  # of each free run, by its first page
        self._start = {num_pages: 0}  # of each free run, by the page after it
        self._runs: dict[int, dict[int, None]] = {num_pages: {0: None}}  # by length: first pages, freed last at the end
        self._lengths = [num_pages]  # those that occur, ascending

    @property
    def num_available(self) -> int:
        """Pages that allocate() can give: the free ones, and those that the evictor can do without."""
        return self.num_free + (self.evictor.evictable if self.evictor else 0)

    @property
    def num_used(self) -> int:
        """Pages that are in use: those of the evictor alone are not among them."""
        return self.num_pages - self.num_available

    @property
    def largest_run(self) -> int:
        """Pages in the longest free run."""
        return self._lengths[-1] if self._lengths else 0

    @property
    def fragmentation(self) -> float:
        """The share of free pages outside of the longest free run: 0 when they are all in one, or there are none."""
        return 1 - self.largest_run / self.num_free if self.num_free else 0.0

    def scattered(self) -> float:
        """Like fragmentation, of all available pages: those that the evictor can do without are free here. Looks at
        every page."""
        if not (self.evictor and self.evictor.evictable):
            return self.fragmentation
        free = (not count or (count == 1 and self.evictor.holds(page)) for page, count in enumerate(self._refcounts))
        longest = max(sum(run) for _, run in groupby(free))
        return 1 - longest / self.num_available

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def refcount(self, page: int) -> int:
        """How many references this page has; 0 when it is free."""
        return self._refcounts[page]

    def frees(self, page: int) -> bool:
        """Whether a page becomes available when one who holds it, and is not the evictor, frees it."""
        others = self._refcounts[page] - 1
        return not others or (others == 1 and self.evictor is not None and self.evictor.holds(page))

    def free_pages(self) -> list[int]:
        """All free pages, in no particular order."""
        return [page for start, length in self._length.items() for page in range(start, start + length)]

    def allocate(self, n: int) -> list[int] | None:
        """n pages from anywhere, short runs first, or None when fewer are available: then nothing is taken."""
        if n > self.num_free:
            self._evict(n)
        if n > self.num_free:
            return None
        pages: list[int] = []
        while len(pages) < n:
            shortest = self._lengths[0]
            pages += self._take(next(reversed(self._runs[shortest])), min(shortest, n - len(pages)))
        return pages

    def allocate_run(self, n: int) -> list[int] | None:
        """n >= 1 pages in a row from the shortest run that has them, or None: then nothing is taken, nor evicted."""
        if n > self.num_available or (n > self.largest_run and not self._could_be_run(n)):
            return None
        self._evict(n)
        while n > self.largest_run:  # what is evicted may lie anywhere: one by one, until some make a run
            free = self.num_free
            self._evict(free + 1)
            if self.num_free == free:
                return None
        length = self._lengths[bisect_left(self._lengths, n)]
        return self._take(next(reversed(self._runs[length])), n)

    def extend(self, page: int, n: int) -> list[int]:
        """Up to n free pages in a row right after `page`; perhaps none."""
        take = min(n, self._length.get(page + 1, 0))
        return self._take(page + 1, take) if take else []

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more reference to each of these pages, all of them taken already."""
        for page in pages:
            if not self._taken(page):
                raise AssertionError(f"page {page} is shared but not taken (the pool has {self.num_pages} pages)")
            self._refcounts[page] += 1
            if self._refcounts[page] == 2 and self.evictor:
                self.evictor.on_share(page)

    def free(self, pages: Iterable[int]) -> None:
        """Counts one reference less to each of these pages; those without any are free. A page that is not taken is an
        internal error: AssertionError, and nothing is given back from it on."""
        start = stop = -1  # of the run in hand
        try:
            for page in pages:
                if not self._taken(page):
                    raise AssertionError(f"page {page} is freed but not taken (the pool has {self.num_pages} pages)")
                self._refcounts[page] -= 1
                if self._refcounts[page]:
                    if self._refcounts[page] == 1 and self.evictor:
                        self.evictor.on_single(page)
                    continue
                if page != stop:
                    self._insert(start, stop)
                    start = page
                stop = page + 1
        finally:
            self._insert(start, stop)

    def _could_be_run(self, n: int) -> bool:
        """Whether n pages in a row would be free if all were evicted that can be. From the last page of each place
        back to the first that is in the way, so that it looks at few pages where n is large."""
        evictor, refcounts = self.evictor, self._refcounts
        if not (evictor and evictor.evictable):
            return n <= self.largest_run
        start = 0
        while start + n <= self.num_pages:
            for page in range(start + n - 1, start - 1, -1):
                if refcounts[page] > 1 or (refcounts[page] and not evictor.holds(page)):
                    start = page + 1
                    break
            else:
                return True
        return False

    def _taken(self, page: int) -> bool:
        return 0 <= page < self.num_pages and self._refcounts[page] > 0

    def _evict(self, n: int) -> None:
        """Until n pages are free, as far as there are some to evict."""
        if n > self.num_free and self.evictor and self.evictor.evictable:
            self.evictor.evict(n - self.num_free)

    def _take(self, start: int, n: int) -> list[int]:
        """The first n pages of the free run that begins at start."""
        length = self._remove(start)
        if length > n:
            self._put(start + n, length - n)
        self.num_free -= n
        pages = list(range(start, start + n))
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def _insert(self, start: int, stop: int) -> None:
        """Pages start .. stop-1 are free from now on."""
        if start == stop:
            return
        self.num_free += stop - start
        if stop in self._length:
            stop += self._remove(stop)
        if start in self._start:
            start = self._start[start]
            self._remove(start)
        self._put(start, stop - start)

    def _put(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length] = start
        if length in self._runs:
            self._runs[length][start] = None
        else:
            self._runs[length] = {start: None}
            insort(self._lengths, length)

    def _remove(self, start: int) -> int:
        """Forgets the free run that begins at start; returns its length."""
        length = self._length.pop(start)
        del self._start[start + length]
        runs = self._runs[length]
        del runs[start]
        if not runs:
            del self._runs[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length
