"""Tracks who owns which page of the KV pool."""

from collections.abc import Iterable, Iterator
from typing import Protocol


class Evictor(Protocol):
    """Holds pages that it can give up, as a prefix cache does. The pool reports to it when others hold them too."""

    @property
    def evictable(self) -> int:
        """Returns how many pages evict() could free now."""

    def evict(self, pages: int) -> None:
        """Frees (PagePool.free) at least `pages` pages, or all that it can."""

    def holds(self, page: int) -> bool:
        """Returns whether one reference to this page is the evictor's."""

    def on_share(self, page: int) -> None:
        """Takes note that this page's refcount went from one to two."""

    def on_single(self, page: int) -> None:
        """Takes note that this page's refcount went from two to one."""


class FreePages(Protocol):
    """Holds the free pages of a pool."""

    def __len__(self) -> int:
        """Returns how many pages are free."""

    def __iter__(self) -> Iterator[int]:
        """Iterates over the free pages, in no particular order."""

    def reserve(self, n: int) -> list[int]:
        """Removes and returns n pages; there must be as many."""

    def put(self, pages: list[int]) -> None:
        """Adds pages, none of which may be free."""


class FreeList:
    """Keeps free pages as a stack: the last one freed is taken first."""

    def __init__(self, num_pages: int):
        self._stack = list(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def __iter__(self) -> Iterator[int]:
        return iter(self._stack)

    def reserve(self, n: int) -> list[int]:
        at = len(self._stack) - n
        taken = self._stack[at:]
        del self._stack[at:]
        return taken[::-1]

    def put(self, pages: list[int]) -> None:
        self._stack += pages


class PagePool:
    """Pages 0 .. num_pages-1 of page_size tokens each, every one free or with a refcount.

    A page is free once it has been freed as often as it was allocated and shared. If free pages are too few, the pool
    asks `evictor` for more. `free_pages` keeps the free ones, all pages at first; the default is a FreeList.
    """

    def __init__(self, num_pages: int, page_size: int, free_pages: FreePages | None = None):
        self.num_pages = num_pages
        self.page_size = page_size
        self.evictor: Evictor | None = None
        self.free_pages = FreeList(num_pages) if free_pages is None else free_pages
        self._refcounts = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Returns the number of pages without any reference."""
        return len(self.free_pages)

    @property
    def num_available(self) -> int:
        """Returns how many pages allocate() can give: free ones, and those that the evictor can give up."""
        return self.num_free + (self.evictor.evictable if self.evictor else 0)

    @property
    def num_used(self) -> int:
        """Returns the number of pages in use. Pages that only the evictor holds don't count."""
        return self.num_pages - self.num_available

    @property
    def fragmentation(self) -> float:
        """Returns the share of free pages that lie where they are of no use: 0 here, since all pages are equally
        good."""
        return 0.0

    def scattered(self) -> float:
        """Returns the fragmentation of all available pages, where pages that the evictor can give up count as free."""
        return 0.0

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def refcount(self, page: int) -> int:
        """Returns how many references this page has; 0 if it is free."""
        return self._refcounts[page]

    def frees(self, page: int) -> bool:
        """Returns whether a page becomes available when a holder other than the evictor frees it."""
        others = self._refcounts[page] - 1
        return not others or (others == 1 and self.evictor is not None and self.evictor.holds(page))

    def allocate(self, n: int) -> list[int] | None:
        """Takes n pages. Returns None, and takes nothing, if fewer are available."""
        self.reclaim(n)
        return self.hold(self.free_pages.reserve(n)) if n <= self.num_free else None

    def reclaim(self, n: int) -> None:
        """Asks the evictor for pages until n are free, or it has no more."""
        if n > self.num_free and self.evictor and self.evictor.evictable:
            self.evictor.evict(n - self.num_free)

    def hold(self, pages: list[int]) -> list[int]:
        """Counts the first reference to each of these pages, which are no longer free; returns them."""
        for page in pages:
            self._refcounts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more reference to each of these pages, which must all be in use."""
        for page in pages:
            if not self._taken(page):
                raise AssertionError(f"page {page} is shared but not taken (the pool has {self.num_pages} pages)")
            self._refcounts[page] += 1
            if self._refcounts[page] == 2 and self.evictor:
                self.evictor.on_share(page)

    def free(self, pages: Iterable[int]) -> None:
        """Removes one reference from each of these pages; pages without any become free.

        A page that is not in use is an internal error. It raises AssertionError, and frees nothing from that page on.
        """
        freed: list[int] = []
        try:
            for page in pages:
                if not self._taken(page):
                    raise AssertionError(f"page {page} is freed but not taken (the pool has {self.num_pages} pages)")
                self._refcounts[page] -= 1
                if not self._refcounts[page]:
                    freed.append(page)
                elif self._refcounts[page] == 1 and self.evictor:
                    self.evictor.on_single(page)
        finally:
            self.free_pages.put(freed)

    def _taken(self, page: int) -> bool:
        return 0 <= page < self.num_pages and self._refcounts[page] > 0
