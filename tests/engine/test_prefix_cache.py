"""The prefix cache: no page lost, leaked or written while others read it; what it finds holds the tokens asked for."""

import sys

import pytest

from jllm.engine.pages import PagePool
from jllm.engine.prefix_cache import Match, PrefixCache

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, Phase, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)


def make(num_pages: int, page_size: int, kind=PrefixCache) -> PrefixCache:
    pool = PagePool(num_pages, page_size)
    pool.evictor = cache = kind(pool)
    return cache


def keep(cache: PrefixCache, tokens) -> list[int]:
    """A sequence that computes all of `tokens` and ends; the pages that it had."""
    pages = cache.pool.allocate(cache.pool.pages_for(len(tokens)))
    cache.insert(tuple(tokens), pages, leaving=True)
    cache.pool.free(pages)
    return pages


def test_finds_full_pages_and_the_beginning_of_the_next():
    cache = make(8, 4)
    pages = keep(cache, range(10))
    assert cache.pool.num_free == 6, "the third page is not full: it is not kept"
    assert cache.pool.num_available == 8
    assert cache.lookup((0, 1, 2, 3, 4, 5, 6, 7, 8)) == Match(tuple(pages[:2]), None, 8)
    assert cache.lookup((0, 1, 2, 3, 4, 5, 9, 9)) == Match((pages[0],), pages[1], 6)
    assert cache.lookup((0, 1, 9, 9)) == Match((), pages[0], 2)
    assert cache.lookup((1, 2, 3, 4, 5)) == Match()


def test_the_last_token_is_always_computed():
    cache = make(8, 4)
    pages = keep(cache, range(8))
    assert cache.lookup(tuple(range(8))) == Match((pages[0],), pages[1], 7)
    assert cache.lookup(tuple(range(4))) == Match((), pages[0], 3)
    assert cache.lookup((0,)) == Match()


def test_small_parts_are_not_worth_a_copy():
    cache = make(8, 8)
    pages = keep(cache, range(8))
    assert cache.lookup((0, 9, 9)) == Match()
    assert cache.lookup((0, 1, 9)) == Match((), pages[0], 2)


def test_the_part_is_the_longest_that_any_page_has():
    cache = make(64, 4)
    held = {key: keep(cache, key)[0] for key in [(1, 2, 3, 4), (1, 2, 9, 0), (1, 5, 0, 0), (0, 0, 0, 0), (2, 2, 3, 4)]}
    assert cache.lookup((1, 2, 9, 1, 7)) == Match((), held[1, 2, 9, 0], 3)
    assert cache.lookup((1, 2, 3, 9, 7)) == Match((), held[1, 2, 3, 4], 3)
    assert cache.lookup((1, 5, 9, 9, 7)) == Match((), held[1, 5, 0, 0], 2)
    assert cache.lookup((2, 9, 9, 9, 7)) == Match((), held[2, 2, 3, 4], 1)
    assert cache.lookup((3, 2, 3, 4, 7)) == Match()
    for key in [(0, 5, 5, 5), (3, 0, 0, 0), (1, 4, 0, 0)]:  # kept after somebody looked
        held[key] = keep(cache, key)[0]
    assert cache.lookup((3, 0, 9, 9, 7)) == Match((), held[3, 0, 0, 0], 2)
    assert cache.lookup((1, 4, 9, 9, 7)) == Match((), held[1, 4, 0, 0], 2)
    assert cache.lookup((0, 5, 9, 9, 7)) == Match((), held[0, 5, 5, 5], 2)


def test_least_recently_used_first_and_children_before_parents():
    cache = make(8, 2)
    a = keep(cache, (1, 1, 2, 2, 3, 3))
    b = keep(cache, (1, 1, 4, 4))
    c = keep(cache, (5, 5, 6, 6))
    shared = a[0]
    assert b[0] not in [shared], "b computed its own first page, which was not kept"
    match = cache.lookup((1, 1, 2, 2, 3, 3, 7))
    cache.take(match)
    cache.pool.free(match.pages)  # used again: b's page is now the oldest, then c's
    order = []
    for _ in range(6):
        before = set(cache.pool.free_pages)
        cache.evict(1)
        order += set(cache.pool.free_pages) - before
    assert order == [b[1], c[1], c[0], a[2], a[1], shared]
    assert cache.num_pages == cache.evictable == 0
    assert cache.counts.pages_evicted == 6


def test_what_is_held_is_not_given_back():
    cache = make(4, 2)
    keep(cache, (1, 1, 2, 2))
    match = cache.lookup((1, 1, 5))
    cache.take(match)
    assert cache.pool.num_available == 3
    assert cache.pool.allocate(4) is None
    assert len(cache.pool.allocate(3)) == 3
    assert cache.lookup((1, 1, 2, 2, 5)) == match


def test_two_that_computed_the_same_at_a_time():
    cache = make(8, 2)
    one, two = cache.pool.allocate(2), cache.pool.allocate(3)
    cache.insert((1, 1, 2, 2), one)
    cache.insert((1, 1, 2, 2, 3, 3), two)
    assert cache.num_pages == 2, "the third page would outlive what stands before it in the cache"
    cache.insert((1, 1, 2, 2, 3, 3), two, leaving=True)
    cache.pool.free(two)
    assert cache.lookup((1, 1, 2, 2, 3, 3, 4)).pages == (*one, two[2])
    cache.pool.free(one)
    assert cache.pool.num_available == 8
    assert len(cache.pool.allocate(8)) == 8


def test_clear_forgets_and_takes_nothing_from_anyone():
    cache = make(4, 2)
    pages = cache.pool.allocate(2)
    cache.insert((1, 1, 2, 2), pages)
    keep(cache, (3, 3))
    cache.clear()
    assert (cache.num_pages, cache.evictable, cache.pool.num_free) == (0, 0, 2)
    assert cache.lookup((1, 1, 2, 2, 3)) == Match()
    cache.pool.free(pages)
    assert cache.pool.num_free == 4


def test_a_long_sequence_costs_what_its_pages_do():
    """Work is counted, not timed: looks into the tree."""
    looks = []

    class Counting(dict):
        def get(self, key, default=None):
            looks.append(key)
            return super().get(key, default)

    cache = make(1024, 4)
    keep(cache, range(4096))
    node = cache._roots[None]
    while node.children:
        node.children = Counting(node.children)
        node = next(iter(node.children.values()))
    assert len(cache.lookup(tuple(range(4096))).pages) == 1023
    assert len(looks) == 1023


class Alike(int):
    """A token that hashes as every other does, and so do tuples of as many."""

    __slots__ = ()

    def __hash__(self):
        return 0


class Seq:
    def __init__(self, tokens, pages, computed, key):
        self.tokens, self.pages, self.computed, self.key = tokens, pages, computed, key


class Machine(RuleBasedStateMachine):
    """Sequences come, find what is cached, compute the rest, grow, fork and leave; pages have a memory. It holds
    tokens, and the key that K and V depend on beside them."""

    cache_type = PrefixCache
    token = int

    @initialize(pages=st.integers(2, 12), size=st.integers(1, 3))
    def start(self, pages, size):
        self.cache = make(pages, size, self.cache_type)
        self.pool, self.size = self.cache.pool, size
        self.memory = {page: [None] * size for page in range(pages)}
        self.seqs: list[Seq] = []
        self.dropped: list[int] = []

    def write(self, seq: Seq, position: int):
        page = seq.pages[position // self.size]
        users = sum(page in other.pages for other in self.seqs if other is not seq)
        assert not users, "a page is written that another sequence holds"
        assert page not in self.cache._nodes, "a cached page is written"
        self.memory[page][position % self.size] = seq.key, seq.tokens[position]

    def compute(self, seq: Seq):
        while seq.computed < len(seq.tokens):
            self.write(seq, seq.computed)
            seq.computed += 1
        for i, token in enumerate(seq.tokens):
            got = self.memory[seq.pages[i // self.size]][i % self.size]
            assert got == (seq.key, token), "a sequence reads other tokens than its own"

    @rule(
        tokens=st.integers(1, 6).map(lambda n: [0] * n) | st.lists(st.integers(0, 1), min_size=1, max_size=9),
        computes=st.booleans(),
        key=st.sampled_from([None, None, b"a"]),
    )
    def come(self, tokens, computes, key):
        tokens = tuple(map(self.token, tokens))
        match = self.cache.lookup(tokens, key)
        assert match.tokens < len(tokens), "nothing is left to compute"
        idle = self.cache.idle(match.pages)
        free = self.pool.num_available - idle
        self.cache.take(match)
        rest = self.pool.pages_for(len(tokens)) - len(match.pages)
        pages = self.pool.allocate(rest)
        assert (pages is not None) or rest > free - (match.source is not None), "available, but not given"
        if pages is not None and match.source is not None:
            self.memory[pages[0]] = list(self.memory[match.source])
        if match.source is not None:
            self.pool.free([match.source])
        if pages is None:
            self.pool.free(match.pages)
            return
        seq = Seq(tokens, [*match.pages, *pages], match.tokens, key)
        self.seqs.append(seq)
        if computes:
            self.compute(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, data, more):
        seq = data.draw(st.sampled_from(self.seqs), "seq")
        tokens = (*seq.tokens, *map(self.token, more))
        pages = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(seq.pages))
        if pages is not None:
            seq.tokens, seq.pages = tokens, seq.pages + pages
            self.compute(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def read(self, data):
        seq = data.draw(st.sampled_from(self.seqs), "seq")
        self.cache.insert(seq.tokens[: seq.computed], seq.pages, seq.key)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def fork(self, data):
        seq = data.draw(st.sampled_from(self.seqs), "seq")
        full = seq.computed // self.size
        page = self.pool.allocate(1)
        if page is not None:
            self.memory[page[0]] = list(self.memory[seq.pages[full]]) if full < len(seq.pages) else [None] * self.size
            self.pool.share(seq.pages[:full])
            twin = Seq(seq.tokens[: seq.computed], [*seq.pages[:full], *page], seq.computed, seq.key)
            self.seqs.append(twin)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), known=st.booleans())
    def leave(self, data, known):
        seq = data.draw(st.sampled_from(self.seqs), "seq")
        self.seqs.remove(seq)
        if known:
            self.cache.insert(seq.tokens[: seq.computed], seq.pages, seq.key, leaving=True)
        self.pool.free(seq.pages)

    @rule(pages=st.integers(0, 5))
    def evict(self, pages):
        idle, free = self.cache.evictable, self.pool.num_free
        self.cache.evict(pages)
        assert self.pool.num_free - free == min(pages, idle), "available, but not given"

    @rule()
    def clear(self):
        self.cache.clear()
        assert self.cache.num_pages == self.cache.evictable == 0

    @invariant()
    def state(self):
        if not hasattr(self, "cache"):
            return
        nodes = self.cache._nodes
        held = [page for seq in self.seqs for page in seq.pages]
        for page in range(self.pool.num_pages):
            assert self.pool.refcount(page) == held.count(page) + (page in nodes), "references are miscounted"
        assert self.pool.num_available == self.pool.num_pages - len(set(held)), "a page is lost"
        for page, node in nodes.items():
            assert [each and each[1] for each in self.memory[page]] == list(node.tokens), (
                "a cached page holds other tokens"
            )
            assert node.parent.parent is None or nodes.get(node.parent.page) is node.parent, "a page lost its parent"
            assert node.parent.children[node.tokens] is node
            assert node.parent.sorted in (None, sorted(node.parent.children))
            assert node.idle == (page not in held)
            assert node.parent.parent is None or node.idle or not node.parent.idle, "a parent idle below a held page"
        assert {id(root) for root in self.cache._roots.values()} == {
            id(node.parent) for node in nodes.values() if node.parent.parent is None
        }, "the root of nothing is kept"
        assert len(self.cache._leaves) <= 2 * len(nodes) + 16

    def teardown(self):
        if hasattr(self, "cache") and not isinstance(sys.exception(), Exception):
            for seq in self.seqs:
                self.pool.free(seq.pages)
            assert self.pool.allocate(self.pool.num_pages) is not None, "a page is lost"


CONFIG = settings(
    max_examples=80,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
Machine.TestCase.settings = CONFIG
TestPrefixCache = Machine.TestCase


class MachineOfCollisions(Machine):
    token = Alike


MachineOfCollisions.TestCase.settings = settings(CONFIG, max_examples=25)
TestCollisions = MachineOfCollisions.TestCase


class ComparesHashesOnly(PrefixCache):
    def lookup(self, tokens, key):
        return super().lookup(tuple(hash(token) for token in tokens), key)

    def insert(self, tokens, pages, key, *, leaving=False):
        super().insert(tuple(hash(token) for token in tokens), pages, key, leaving=leaving)


class SharesWithAll(PrefixCache):
    def lookup(self, tokens, key):
        return super().lookup(tokens)

    def insert(self, tokens, pages, key, *, leaving=False):
        super().insert(tokens, pages, leaving=leaving)


class EvictsParents(PrefixCache):
    def _is_leaf(self, node):
        return node.idle


class TakesNoHold(PrefixCache):
    def take(self, match):
        self.pool.share(() if match.source is None else (match.source,))


class SharesParts(PrefixCache):
    def lookup(self, tokens, key):
        found = super().lookup(tokens, key)
        pages = found.pages if found.source is None else (*found.pages, found.source)
        return Match(pages, None, found.tokens)


class FindsAll(PrefixCache):
    def lookup(self, tokens, key):
        return super().lookup((*tokens, 0), key)


class ForgetsWhoLeft(PrefixCache):
    def on_single(self, page):
        pass


class KeepsWhatIsHalfFull(PrefixCache):
    def insert(self, tokens, pages, key, *, leaving=False):
        super().insert(tokens + tokens[-1:] * (len(tokens) % 2), pages, key, leaving=leaving)


FAULTS = {
    ComparesHashesOnly: "holds other tokens|reads other tokens",
    SharesWithAll: "reads other tokens",
    EvictsParents: "lost its parent",
    TakesNoHold: "is freed but not taken|references are miscounted|cached page is written",
    SharesParts: "is written|references are miscounted",
    FindsAll: "nothing is left to compute",
    ForgetsWhoLeft: "a page is lost|available, but not given",
    KeepsWhatIsHalfFull: "holds other tokens|cached page is written",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_the_machine_catches(fault, message):
    token = Alike if fault is ComparesHashesOnly else int
    machine = type(fault.__name__, (Machine,), {"cache_type": fault, "token": token})
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(
            machine, settings=settings(CONFIG, max_examples=3000, phases=[Phase.generate], report_multiple_bugs=False)
        )
