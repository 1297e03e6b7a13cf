"""Who owns which page of the KV pool."""


class PagePool:
    """A free list over pages 0 .. num_pages-1 of page_size tokens each. Pages freed last are taken first."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """How many pages hold that many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, n: int) -> list[int] | None:
        """n pages, or None when fewer are free: then nothing is taken."""
        if n > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._taken[page] = 1
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back. A page that is not taken is an internal error: AssertionError, and nothing is given back
        from it on."""
        for page in pages:
            if not (0 <= page < self.num_pages and self._taken[page]):
                raise AssertionError(f"page {page} is freed but not taken (the pool has {self.num_pages} pages)")
            self._taken[page] = 0
            self._free.append(page)
