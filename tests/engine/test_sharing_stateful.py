"""Sequences that share pages: cached prefixes, forks, samples, snapshots; in any interleaving with updates of the
weights, under any KV policy."""

import random
from dataclasses import dataclass
from functools import partial

import pytest

from jllm.engine.reuse import ReusedPrefix, Sharing
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.programs.sizes import Limits
from tests.engine.scheduler_harness import Device, Loop

pytest.importorskip("hypothesis")
from hypothesis import settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import initialize, precondition, rule  # noqa: E402

from tests.engine.test_scheduler_stateful import CONFIG, Machine, limits, policies  # noqa: E402


@dataclass(frozen=True)
class Snap:
    """Stands for a snapshot: all that the scheduler looks at is how long it is."""

    length: int
    ready = True


class SharingDevice(Device):
    """Begins sequences in the middle, and looks at who else holds a page that is written."""

    def run(self, plan):
        size, pool, cache = self.limits.page_size, self.loop.scheduler.pool, self.loop.scheduler.sharing.cache
        for seq in plan.loads:
            assert not any(cache and cache.holds(page) for page in seq.pages), "a snapshot goes to a cached page"
            for i, token in enumerate(seq.tokens[: seq.snapshot.length]):
                if i // size < len(seq.pages):
                    self.memory[seq.pages[i // size], i % size] = token
        for page, _ in plan.copies:
            assert pool.refcount(page), "a page is given back before it is copied"
        return super().run(plan)

    def begins(self, row, chunk):
        return chunk.start == self.loop.scheduler.begun.pop(chunk.seq, None)

    def write(self, row, tokens):
        scheduler, size = self.loop.scheduler, self.limits.page_size
        copied = [page for _, pages in scheduler.retired for page in pages]  # before this step
        for position in range(row.length, row.length + len(tokens)):
            page = row.table.get(position // size)
            others = 0 if page is None else scheduler.pool.refcount(page) - copied.count(page) - 1
            assert not others, "a page is written that others hold"
        super().write(row, tokens)


class Watched(Scheduler):
    """Remembers where sequences began that have had no chunk yet."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.begun = {}

    def _begin(self, seq, reused, parts):
        super()._begin(seq, reused, parts)
        self.begun[seq] = seq.computed


class SharingLoop(Loop):
    def make_device(self, limits):
        device = SharingDevice(limits)
        device.loop = self
        return device

    def check(self, plan, before):
        super().check(plan, before | self.scheduler.begun)

    def lose_device(self):
        self.scheduler.begun.clear()
        super().lose_device()

    def update(self):
        """Other weights: K and V so far mean nothing."""
        while self.unread:
            self.read()
        self.scheduler.start_over()
        self.device.memory.clear()

    def check_pages(self, taken):
        pool, cache, memory = self.scheduler.pool, self.scheduler.sharing.cache, self.device.memory
        nodes = {} if cache is None else cache._nodes
        for page in range(pool.num_pages):
            assert pool.refcount(page) == taken.count(page) + (page in nodes), "references are miscounted"
        assert pool.num_available == pool.num_pages - len(set(taken)), "a page is lost"
        for page, node in nodes.items():
            held = tuple(memory.get((page, i)) for i in range(pool.page_size))
            assert held == node.tokens, "a cached page holds other tokens"
            assert node.idle == (page not in taken)
            assert node.parent.parent is None or node.idle or not node.parent.idle, "a parent idle below a held page"

    def continue_from(self, seq: Sequence, common: int) -> Sequence:
        twin = Sequence(len(self.seqs), 1, seq.prompt, seq.params, 0, seq.max_length)
        twin.output = list(seq.output)[: max(0, common - len(seq.prompt))]
        twin.origin, twin.common, twin.snapshot, twin.private = seq, common, seq.snapshot, seq.private
        self.scheduler.add(twin)
        self.seqs.append(twin)
        return twin


class SharingMachine(Machine):
    """As Machine, with few different prompts."""

    scheduler = Watched
    prompts = (st.integers(2, 3).map(lambda n: [n] * 9), st.lists(st.integers(2, 3), min_size=9, max_size=9))

    @initialize(limits=limits(), data=st.data(), keep=st.sampled_from([True, True, False]))
    def start(self, limits, data, keep):
        policy, self.calm = data.draw(policies(), "policy")
        self.loop = SharingLoop(limits, partial(self.scheduler, policy=policy, prefix_cache=keep))
        self.add(data)

    @rule(data=st.data())
    def add(self, data):
        most = self.loop.limits.num_pages * self.loop.limits.page_size + 1
        for _ in range(data.draw(st.integers(1, 3), "requests")):
            self.one(data, most)

    def one(self, data, most) -> Sequence:
        length = data.draw(st.integers(2, most), "length")
        prompt = data.draw(st.one_of(self.prompts), "prompt")[: data.draw(st.integers(1, min(length - 1, 9)), "tokens")]
        return self.loop.add(prompt, length - len(prompt), data.draw(st.booleans(), "stop id"), False)

    @rule(data=st.data())
    def add_samples(self, data):
        seq = self.one(data, self.loop.limits.num_pages * self.loop.limits.page_size + 1)
        for _ in range(data.draw(st.integers(1, 2), "samples")):
            self.loop.continue_from(seq, len(seq.prompt))

    @rule(data=st.data())
    def add_snapshot(self, data):
        seq = self.one(data, self.loop.limits.num_pages * self.loop.limits.page_size + 1)
        seq.snapshot = Snap(data.draw(st.integers(1, len(seq.prompt)), "snapshot"))
        seq.private = data.draw(st.booleans(), "private")

    @rule()
    def update(self):
        self.calm = False  # what runs is preempted
        self.loop.update()

    @precondition(lambda self: any(not seq.finished for seq in self.loop.seqs))
    @rule(data=st.data())
    def fork(self, data):
        seq = data.draw(st.sampled_from([seq for seq in self.loop.seqs if not seq.finished]), "seq")
        self.loop.continue_from(seq, seq.length)


SharingMachine.TestCase.settings = settings(CONFIG, max_examples=40)
TestSharing = SharingMachine.TestCase


def of(sharing) -> type[Watched]:
    """A scheduler with this kind of Sharing."""

    class Faulty(Watched):
        def __init__(self, *args, prefix_cache=False, **kw):
            self.faulty = sharing(prefix_cache)
            super().__init__(*args, prefix_cache=prefix_cache, **kw)

        sharing = property(lambda self: self.faulty, lambda self, value: None)

    return Faulty


class SharesTheLastPage(Sharing):
    """Instead of copying it."""

    def candidates(self, seq, alone):
        for b in super().candidates(seq, alone):
            yield b if b.source is None else ReusedPrefix((*b.pages, b.source), None, b.tokens, cached=b.cached)


class TrustsTokensInFlight(Sharing):
    """Keeps K and V of tokens that may never have been written."""

    def on_release(self, seq):
        if self.cache is not None and not seq.private:
            self.cache.insert((*seq.tokens, *[0] * seq.in_flight)[: seq.computed], seq.pages, leaving=True)


class DoesNotWait(Sharing):
    """And takes what the sequence that it continues has not computed yet."""

    def must_wait(self, seq):
        return False

    def _continues(self, seq):
        origin = seq.origin
        if origin is None or origin.slot is None or not origin.prefilling:
            return super()._continues(seq)
        computed, origin.computed = origin.computed, origin.prefill_end
        found = super()._continues(seq)
        origin.computed = computed
        return found


class KeepsPrefixes(Sharing):
    """Over an update."""

    def clear(self):
        pass


class ForgetsLoads(Watched):
    def _begin(self, seq, reused, parts):
        super()._begin(seq, reused, parts)
        parts.loads.clear()


FAULTS = {
    of(SharesTheLastPage): "is written that others hold",
    of(TrustsTokensInFlight): "a cached page holds other tokens",
    of(DoesNotWait): "another output than alone|is written that others hold|index out of range",
    of(KeepsPrefixes): "a cached page holds other tokens",
    ForgetsLoads: "another output than alone",
}


def play(scheduler, runs: int) -> None:
    """Random requests that begin alike, samples, forks, snapshots and updates, on small pools."""
    for seed in range(runs):
        play_one(scheduler, random.Random(seed))


def play_one(scheduler, rng: random.Random) -> None:
    limits = Limits(3, 12, 9, 3, rng.choice([1, 2, 3]), rng.randint(10, 20), 16)
    loop = SharingLoop(limits, partial(scheduler, prefix_cache=True))
    for _ in range(40):
        if len(loop.seqs) < 12 and rng.random() < 0.4:
            prompt = [rng.choice([2, 2, 3]) for _ in range(rng.randint(1, 6))]
            seq = loop.add(prompt, rng.randint(1, 4), rng.random() < 0.5)
            if rng.random() < 0.3:
                seq.snapshot, seq.private = Snap(len(prompt)), True
            if rng.random() < 0.5:
                loop.continue_from(seq, len(prompt))
        alive = [seq for seq in loop.seqs if not seq.finished]
        if alive and rng.random() < 0.2:
            seq = rng.choice(alive)
            loop.continue_from(seq, seq.length)
        if rng.random() < 0.05:
            loop.update()
        loop.step()
    loop.run()


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_the_checks_catch(fault, message):
    """Of the same requests, which the right scheduler passes."""
    play(Watched, 12)
    with pytest.raises((AssertionError, IndexError), match=message):
        play(fault, 40)
