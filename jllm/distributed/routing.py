"""Routes a request to the engine with the fewest tokens to compute, the request's own included."""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence


class Load:
    """Estimates the work of one engine, and holds prompt prefixes that its prefix cache should have."""

    def __init__(self, page_size: int, num_pages: int):
        self.tokens = 0  # most tokens that its requests still have to compute
        self._page, self._most = page_size, num_pages
        self._prefixes: OrderedDict[int, None] = OrderedDict()  # page hashes of its recent prompts, newest last

    def uncached(self, prompt: Sequence[int], key: Hashable = None) -> int:
        """Returns how many tokens of a prompt no recent prompt had, counted in whole pages; at least one. `key` is what
        K and V depend on besides tokens."""
        known = itertools.takewhile(self._prefixes.__contains__, self._pages(prompt, key))
        return max(1, len(prompt) - self._page * sum(1 for _ in known))

    def remember(self, prompt: Sequence[int], key: Hashable = None) -> None:
        for page in self._pages(prompt, key):
            self._prefixes[page] = None
            self._prefixes.move_to_end(page)
        while len(self._prefixes) > self._most:
            self._prefixes.popitem(last=False)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    def _pages(self, prompt: Sequence[int], key: Hashable) -> Iterator[int]:
        """Yields a hash of the tokens up to the end of each full page."""
        above = hash(key)
        for end in range(self._page, len(prompt) + 1, self._page):
            above = hash((above, tuple(prompt[end - self._page : end])))
            yield above


def route(loads: Sequence[Load], prompt: Sequence[int], output: int, key: Hashable = None) -> tuple[int, int]:
    """Returns which engine computes a prompt and at most `output` tokens after it, and its load's growth in tokens.
    Among engines with equal work, it returns the first."""
    tokens = [load.uncached(prompt, key) + output for load in loads]
    best = min(range(len(loads)), key=lambda i: loads[i].tokens + tokens[i])
    loads[best].tokens += tokens[best]
    loads[best].remember(prompt, key)
    return best, tokens[best]
