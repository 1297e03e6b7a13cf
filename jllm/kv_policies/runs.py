"""Defines a page pool that also allocates contiguous runs of pages."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import groupby

from jllm.engine.pages import PagePool


class FreeRuns:
    """Keeps free pages (pages.FreePages) as maximal runs, in lists by length.

    Taking or freeing a run costs a few dictionary entries, and a bisection among the different lengths. There are at
    most sqrt(2 * num_pages) lengths.
    """

    def __init__(self, num_pages: int):
        self._count = num_pages
        self._length = {0: num_pages}  # length of each free run, by its first page
        self._start = {num_pages: 0}  # first page of each free run, by the page after it
        self._runs: dict[int, dict[int, None]] = {num_pages: {0: None}}  # by length, first pages; the newest is last
        self._lengths = [num_pages]  # lengths of free runs, ascending

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (page for start, length in self._length.items() for page in range(start, start + length))

    @property
    def longest(self) -> int:
        """Returns the length of the longest run."""
        return self._lengths[-1] if self._lengths else 0

    def reserve(self, n: int) -> list[int]:
        """Takes n pages from anywhere, short runs first."""
        pages: list[int] = []
        while len(pages) < n:
            shortest = self._lengths[0]
            pages += self._take(next(reversed(self._runs[shortest])), min(shortest, n - len(pages)))
        return pages

    def take_run(self, n: int) -> list[int]:
        """Takes n contiguous pages, at most `longest`, from the shortest run that has them."""
        length = self._lengths[bisect_left(self._lengths, n)]
        return self._take(next(reversed(self._runs[length])), n)

    def take_at(self, page: int, n: int) -> list[int]:
        """Takes up to n contiguous pages from `page` on, if a run begins there; perhaps none."""
        some = min(n, self._length.get(page, 0))
        return self._take(page, some) if some else []

    def put(self, pages: list[int]) -> None:
        start = stop = -1  # bounds of the current run
        for page in pages:
            if page != stop:
                self._insert(start, stop)
                start = page
            stop = page + 1
        self._insert(start, stop)

    def _take(self, start: int, n: int) -> list[int]:
        length = self._remove(start)
        if length > n:
            self._put(start + n, length - n)
        self._count -= n
        return list(range(start, start + n))

    def _insert(self, start: int, stop: int) -> None:
        """Adds pages start .. stop-1, merged with the runs beside them."""
        if start == stop:
            return
        self._count += stop - start
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
        """Removes the run that begins at start, and returns its length."""
        length = self._length.pop(start)
        del self._start[start + length]
        runs = self._runs[length]
        del runs[start]
        if not runs:
            del self._runs[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length


class RunPool(PagePool):
    """Is a pool that also allocates runs of pages, and measures the fragmentation of its free pages."""

    def __init__(self, num_pages: int, page_size: int):
        self.runs = FreeRuns(num_pages)
        super().__init__(num_pages, page_size, self.runs)

    @property
    def fragmentation(self) -> float:
        """Returns the share of free pages outside of the longest run; 0 if all are in one run, or none is free."""
        return 1 - self.runs.longest / self.num_free if self.num_free else 0.0

    def scattered(self) -> float:
        """Returns the fragmentation of all available pages. It looks at every page."""
        if not (self.evictor and self.evictor.evictable):
            return self.fragmentation
        longest = max(sum(run) for _, run in groupby(map(self._available, range(self.num_pages))))
        return 1 - longest / self.num_available

    def allocate_run(self, n: int) -> list[int] | None:
        """Takes n >= 1 contiguous pages from the shortest run that has them. Returns None, and takes and evicts
        nothing, if there is no such run."""
        if n > self.num_available or (n > self.runs.longest and not self._could_be_run(n)):
            return None
        self.reclaim(n)
        while n > self.runs.longest:  # evicted pages may lie anywhere: evict one at a time until there is a run
            free = self.num_free
            self.reclaim(free + 1)
            if self.num_free == free:
                return None
        return self.hold(self.runs.take_run(n))

    def extend(self, page: int, n: int) -> list[int]:
        """Takes up to n contiguous free pages right after `page`; perhaps none."""
        return self.hold(self.runs.take_at(page + 1, n))

    def _available(self, page: int) -> bool:
        count = self.refcount(page)
        return not count or (count == 1 and self.evictor is not None and self.evictor.holds(page))

    def _could_be_run(self, n: int) -> bool:
        """Checks whether n contiguous pages would be free if all evictable pages were evicted.

        At each place it looks from the last page back to the first that is in use. So it looks at few pages where n is
        large.
        """
        if not (self.evictor and self.evictor.evictable):
            return n <= self.runs.longest
        start = 0
        while start + n <= self.num_pages:
            for page in range(start + n - 1, start - 1, -1):
                if not self._available(page):
                    start = page + 1
                    break
            else:
                return True
        return False
