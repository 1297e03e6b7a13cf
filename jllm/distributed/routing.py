"""Which of several engines a request goes to: where, with it, the fewest tokens are still to be computed."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class Load:
    """What one engine was given and has not done, and the beginnings of prompts that its prefix cache should have."""

    def __init__(self, page_size: int, num_pages: int):
        self.tokens = 0  # that its requests still have to compute, at most
        self._page, self._most = page_size, num_pages
        self._prefixes: OrderedDict[int, None] = OrderedDict()  # of prompts that it was given lately, newest last

    def uncached(self, prompt: Sequence[int]) -> int:
        """Returns tokens of a prompt that it was not lately given as the beginning of another, to a page; at least
        one."""
        known = itertools.takewhile(self._prefixes.__contains__, self._pages(prompt))
        return max(1, len(prompt) - self._page * sum(1 for _ in known))

    def remember(self, prompt: Sequence[int]) -> None:
        for page in self._pages(prompt):
            self._prefixes[page] = None
            self._prefixes.move_to_end(page)
        while len(self._prefixes) > self._most:
            self._prefixes.popitem(last=False)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    def _pages(self, prompt: Sequence[int]) -> Iterator[int]:
        """For each full page a hash of its tokens and of all before them."""
        above = 0
        for end in range(self._page, len(prompt) + 1, self._page):
            above = hash((above, tuple(prompt[end - self._page : end])))
            yield above


def route(loads: Sequence[Load], prompt: Sequence[int], output: int) -> tuple[int, int]:
    """Returns the engine that is to compute a prompt and at most `output` tokens after it, by its place among `loads`,
    and how many tokens its load has grown by; the first of those with equally few."""
    tokens = [load.uncached(prompt) + output for load in loads]
    best = min(range(len(loads)), key=lambda i: loads[i].tokens + tokens[i])
    loads[best].tokens += tokens[best]
    loads[best].remember(prompt)
    return best, tokens[best]
