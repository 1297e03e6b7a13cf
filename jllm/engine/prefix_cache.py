"""Keeps pages that outlive their sequences, and finds them by the tokens that they hold.

K and V of a token depend only on the tokens before it: an engine has one set of weights and one KV format. So a full
page is identified by its tokens and by the page before it. The cache is the tree of these chains: a page's key is its
parent and its tokens. If K and V depend on more (inputs or an adapter), each such key has a tree of its own. A dict
hashes the key and compares it, so different tokens with equal hashes are never confused.

The cache has a reference to each of its pages (PagePool.share). A page without any other reference is idle, and evicted
when the pool is short. The least recently used page goes first. No parent goes before its children, since a page cannot
be found without the pages before it. A sequence that uses a cached page also uses all pages before it. (Exception: see
`insert`.) So if a page is idle, all its descendants are idle, and every idle page can be evicted.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from weakref import WeakValueDictionary

from jllm.engine.pages import PagePool

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """Holds the cached part of a sequence's beginning."""

    pages: tuple[int, ...] = ()  # full ones, in order
    source: int | None = None  # a page whose first tokens come next: to be copied, not shared
    tokens: int = 0  # tokens that all of these hold


@dataclass
class PrefixCounts:
    """Counts the results of one cache, or of several in a row (reuse.Sharing)."""

    lookups: int = 0  # sequences that were admitted
    hits: int = 0  # sequences that found some of their beginning in the cache
    hit_tokens: int = 0  # tokens that were not computed, since they were in the cache
    forked_tokens: int = 0  # tokens that were not computed, since another sequence or a snapshot had them
    pages_kept: int = 0
    pages_evicted: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Node:
    """Is a cached page."""

    tokens: Tokens
    page: int
    parent: "_Node | None"
    used: int = 0  # time of the last use, by the cache's clock
    idle: bool = False  # only the cache holds the page
    children: dict[Tokens, "_Node"] | None = None  # most pages have none
    sorted: list[Tokens] | None = None  # keys of children, ascending, once a lookup needed the closest


class PrefixCache:
    """Is a pool's evictor (pages.Evictor). A call costs the number of pages that it looks at, times a logarithm of all
    pages."""

    LEAST_PART = 4  # a page is copied if at least 1 / LEAST_PART of its tokens match

    def __init__(self, pool: PagePool, counts: PrefixCounts | None = None):
        self.pool = pool
        self.counts = PrefixCounts() if counts is None else counts
        self._roots: WeakValueDictionary[Hashable, _Node] = WeakValueDictionary()  # pages hold the one above them
        self._nodes: dict[int, _Node] = {}  # by page
        self._idle = 0
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (used, page): idle pages without children, and stale entries

    @property
    def num_pages(self) -> int:
        """Returns how many pages it holds."""
        return len(self._nodes)

    @property
    def evictable(self) -> int:
        return self._idle

    def idle(self, pages: Iterable[int]) -> int:
        """Returns how many of these cached pages have no other reference."""
        return sum(self._nodes[page].idle for page in pages)

    def lookup(self, tokens: Tokens, key: Hashable = None) -> Match:
        """Returns the longest cached prefix of `tokens`, without the last token, which is computed for its logits.
        Holds no page yet, see `take`. `key` is what K and V depend on besides tokens."""
        size, most = self.pool.page_size, len(tokens) - 1
        node = self._roots.get(key)
        if node is None:
            return Match()
        pages: list[int] = []
        while (at := len(pages) * size) + size <= most:
            child = node.children.get(tokens[at : at + size]) if node.children else None
            if child is None:
                break
            node = child
            pages.append(node.page)
        part, common = _closest(node, tokens[at : min(at + size, most)])
        if part is None or common * self.LEAST_PART < size:
            return Match(tuple(pages), None, at)
        return Match(tuple(pages), part.page, at + common)

    def take(self, match: Match) -> None:
        """Holds the pages of a match that was just looked up, its source included. Free the source once its copy is
        dispatched."""
        self.pool.share(match.pages if match.source is None else (*match.pages, match.source))

    def insert(self, tokens: Tokens, pages: list[int], key: Hashable = None, *, leaving: bool = False) -> None:
        """Keeps the pages of a sequence that `tokens`, its first ones, fill. The tokens must have been read. `key` is
        as in lookup.

        Two sequences may have computed the same tokens. If the cache has another page of them, the sequence's own is
        not kept. The pages after it are then kept only if `leaving`, and if no other sequence holds them. Otherwise a
        sequence would hold them while the cached page before them is idle.
        """
        size, ours, new = self.pool.page_size, True, []
        node = self._roots.setdefault(key, _Node((), -1, None))
        for i, page in enumerate(pages[: len(tokens) // size]):
            child = self._nodes.get(page) if ours else None  # only while all pages before it are the sequence's own
            if child is None:
                key = tokens[i * size : (i + 1) * size]
                child = node.children.get(key) if node.children else None
                if child is None:
                    if not ours and not (leaving and self.pool.refcount(page) == 1):
                        break
                    child = self._add(node, key, page)
                    new.append(page)
                ours = ours and child.page == page
                if child.idle:
                    self._touch(child)
            node = child
        self.pool.share(new)
        self.counts.pages_kept += len(new)

    def evict(self, pages: int) -> None:
        """Frees at least `pages` pages, or all idle ones."""
        evicted: list[int] = []
        while len(evicted) < pages and self._leaves:
            used, page = heappop(self._leaves)
            node = self._nodes.get(page)
            if node is not None and self._is_leaf(node) and node.used == used:
                self._remove(node)
                evicted.append(page)
        self.counts.pages_evicted += len(evicted)
        self.pool.free(sorted(evicted))

    def clear(self) -> None:
        """Forgets everything, for example because the weights have changed. Sequences keep their pages."""
        pages = sorted(self._nodes)
        self._nodes, self._leaves, self._idle = {}, [], 0
        self._roots = WeakValueDictionary()
        self.pool.free(pages)

    def holds(self, page: int) -> bool:
        return page in self._nodes

    # Calls from the pool

    def on_share(self, page: int) -> None:
        """Takes note that a page with one holder has two now."""
        node = self._nodes.get(page)
        if node is not None and node.idle:
            node.idle = False
            self._idle -= 1

    def on_single(self, page: int) -> None:
        """Takes note that a page has one holder left: the cache, if the page is cached."""
        node = self._nodes.get(page)
        if node is not None:
            node.idle = True
            self._idle += 1
            self._touch(node)

    # The tree

    def _add(self, parent: _Node, tokens: Tokens, page: int) -> _Node:
        node = self._nodes[page] = _Node(tokens, page, parent)
        if parent.children is None:
            parent.children = {}
        parent.children[tokens] = node
        if parent.sorted is not None:
            insort(parent.sorted, tokens)
        return node

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del self._nodes[node.page], parent.children[node.tokens]
        if parent.sorted is not None:
            del parent.sorted[bisect_left(parent.sorted, node.tokens)]
        self._idle -= 1
        parent.used = max(parent.used, node.used)
        self._queue(parent)

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.used = self._clock
        self._queue(node)

    def _queue(self, node: _Node) -> None:
        if not self._is_leaf(node):
            return
        heappush(self._leaves, (node.used, node.page))
        if len(self._leaves) > 2 * len(self._nodes) + 16:  # mostly stale
            self._leaves = [(n.used, n.page) for n in self._nodes.values() if self._is_leaf(n)]
            heapify(self._leaves)

    def _is_leaf(self, node: _Node) -> bool:
        return node.idle and not node.children


def _closest(node: _Node, tokens: Tokens) -> tuple[_Node | None, int]:
    """Returns the child whose page shares the longest prefix with `tokens`, and that prefix's length."""
    if not node.children:
        return None, 0
    if node.sorted is None:
        node.sorted = sorted(node.children)
    at = bisect_left(node.sorted, tokens)
    best, most = None, 0
    for key in node.sorted[max(at - 1, 0) : at + 1]:  # the longest shared prefixes are its neighbours
        common = next((i for i, (a, b) in enumerate(zip(key, tokens)) if a != b), min(len(key), len(tokens)))
        if common > most:
            best, most = node.children[key], common
    return best, most
