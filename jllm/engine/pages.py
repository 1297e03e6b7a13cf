"""Who owns which page of the KV pool."""

from collections.abc import Iterable, Iterator
from typing import Protocol


class Evictor(Protocol):
    """Holds pages that it can do without, as a prefix cache does. The pool tells it when others hold them, too."""

    @property
    def evictable(self) -> int:
        """Returns how many pages evict() could give back now."""

    def evict(self, pages: int) -> None:
        """Gives back (PagePool.free) at least `pages` pages, or all that it can."""

    def holds(self, page: int) -> bool:
        """Returns whether one reference to this page is the evictor's."""

    def on_share(self, page: int) -> None:
        """This page's refcount went from one to two."""

    def on_single(self, page: int) -> None:
        """This page's refcount went from two to one."""


class FreePages(Protocol):
    """The pages of a pool that are free."""

    def __len__(self) -> int:
        """Returns how many there are."""

    def __iter__(self) -> Iterator[int]:
        """Iterates over them, in no particular order."""

    def take(self, n: int) -> list[int]:
        """Takes n of them, no more than there are."""

    def put(self, pages: list[int]) -> None:
        """Adds pages to them, none of which is free."""


class FreeList:
    """Free pages as a stack: the one that was freed last is taken first."""

    def __init__(self, num_pages: int):
        self._stack = list(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._stack)

    def __iter__(self) -> Iterator[int]:
        return iter(self._stack)

    def take(self, n: int) -> list[int]:
        at = len(self._stack) - n
        taken = self._stack[at:]
        del self._stack[at:]
        return taken[::-1]

    def put(self, pages: list[int]) -> None:
        self._stack += pages


class PagePool:
    """Pages 0 .. num_pages-1 of page_size tokens each, every one free or with a refcount.

    A page is free once it has been freed as often as it was allocated and shared. Where free pages are too few,
    `evictor` is asked for its own. `free_pages` keeps the free ones, all pages at first; a FreeList by default.
    """

    def __init__(self, num_pages: int, page_size: int, free_pages: FreePages | None = None):
        self.num_pages = num_pages
        self.page_size = page_size
        self.evictor: Evictor | None = None
        self.free_pages = FreeList(num_pages) if free_pages is None else free_pages
        self._refcounts = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Returns pages without any reference."""
        return len(self.free_pages)

    @property
    def num_available(self) -> int:
        """Returns pages that allocate() can give: the free ones, and those that the evictor can do without."""
        return self.num_free + (self.evictor.evictable if self.evictor else 0)

    @property
    def num_used(self) -> int:
        """Returns pages that are in use: those of the evictor alone are not among them."""
        return self.num_pages - self.num_available

    @property
    def fragmentation(self) -> float:
        """Returns the share of free pages that lie where they are of no use: 0, as any page is as good as another."""
        return 0.0

    def scattered(self) -> float:
        """Returns the fragmentation of all available pages: those that the evictor can do without are free here."""
        return 0.0

    def pages_for(self, tokens: int) -> int:
        """Returns how many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def refcount(self, page: int) -> int:
        """Returns how many references this page has; 0 when it is free."""
        return self._refcounts[page]

    def frees(self, page: int) -> bool:
        """Returns whether a page becomes available when one who holds it, and is not the evictor, frees it."""
        others = self._refcounts[page] - 1
        return not others or (others == 1 and self.evictor is not None and self.evictor.holds(page))

    def allocate(self, n: int) -> list[int] | None:
        """Takes n pages. Returns None, and takes nothing, when fewer are available."""
        self.reclaim(n)
        return self.hold(self.free_pages.take(n)) if n <= self.num_free else None

    def reclaim(self, n: int) -> None:
        """Asks the evictor for pages until n are free, or it has no more."""
        if n > self.num_free and self.evictor and self.evictor.evictable:
            self.evictor.evict(n - self.num_free)

    def hold(self, pages: list[int]) -> list[int]:
        """Counts the first reference to each of these pages, which are free no longer; returns them."""
        for page in pages:
            self._refcounts[page] = 1
        return pages

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
