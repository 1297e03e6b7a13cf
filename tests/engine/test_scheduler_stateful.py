"""Any interleaving of requests, steps, late reads, stops, aborts and device errors under any KV policy; and faults that
must be caught."""

import random
import sys
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from jllm.engine.kv_policy import OnDemand
from jllm.engine.scheduler import Limits, Scheduler
from jllm.kv_policies.extent import OVERFLOWS, Extent
from jllm.kv_policies.length import Longest, Oracle, Quantile
from jllm.kv_policies.predicted import Predicted
from jllm.kv_policies.reserve import Reserve
from jllm.programs.sizes import StepSizes
from tests.engine.scheduler_harness import Loop, output_of

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)


@st.composite
def limits(draw):
    slots, rows = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3, 5]))
    return Limits(
        max_slots=slots,
        max_step_tokens=slots * rows + draw(st.integers(0, 12)),
        max_prompt_tokens=draw(st.integers(1, 12)),
        max_chunks=draw(st.integers(1, 3)),
        page_size=draw(st.integers(1, 4)),
        num_pages=slots + draw(st.integers(0, 8)),
        max_deltas=slots + draw(st.integers(0, 8)),
        short_rows=rows,
    )


def requests(most):
    """(max_length, stop_id, stop_text)"""
    return st.tuples(st.integers(2, most), st.booleans(), st.booleans())


class Wrong(Longest):
    """Any length from 1 to 16, too short as often as not."""

    def predict(self, prompt, params, quantile, produced=0):
        return produced + 1 + zlib.crc32(bytes((*prompt, produced))) % 16


@st.composite
def policies(draw):
    """A policy, and whether it never preempts: since all memory that it will need is taken at admission."""
    name = draw(st.sampled_from(["paged", "reserve", "extent"]))
    predictors = {
        "longest": Longest,
        "oracle": lambda: Oracle(lambda *request: len(output_of(*request))),
        "quantile": Quantile,
        "wrong": Wrong,
    }
    if name == "reserve":
        return Reserve(), True
    predictor = draw(st.sampled_from([*predictors, *(["none"] if name == "paged" else [])]))
    if name == "extent":
        policy = Extent(predictors[predictor](), overflow=draw(st.sampled_from(OVERFLOWS)))
        return policy, predictor in ("longest", "oracle")
    watermark = draw(st.sampled_from([0.0, 0.2]))
    if predictor == "none":
        return OnDemand(watermark=watermark), False
    return Predicted(predictors[predictor](), watermark=watermark), False


class Machine(RuleBasedStateMachine):
    """Requests come, run, stop, are aborted and lose their device in any order; reads are 0 or 1 steps late. Prompts
    are cut to any sizes."""

    @initialize(limits=limits(), data=st.data(), mixed=st.sets(st.tuples(st.integers(1, 4), st.integers(1, 12))))
    def start(self, limits, data, mixed):
        mock.patch("jllm.engine.scheduler.CHEAP", 1).start()
        policy, self.calm = data.draw(policies(), "policy")
        self.loop = Loop(limits, partial(Scheduler, sizes=StepSizes(tuple(sorted(mixed))), policy=policy))
        self.priorities = data.draw(st.sampled_from([(0,), (0,), (0, 1), (-1, 0, 7)]), "priorities")
        self.add(data)

    @rule(data=st.data())
    def add(self, data):
        most = self.loop.limits.num_pages * self.loop.limits.page_size + 1
        for length, stop_id, stop_text in data.draw(st.lists(requests(most), min_size=1, max_size=5), "requests"):
            prompt = data.draw(st.lists(st.integers(2, 11), min_size=1, max_size=min(length - 1, 9)), "prompt")
            priority = data.draw(st.sampled_from(self.priorities), "priority")
            self.loop.add(prompt, length - len(prompt), stop_id, stop_text, priority)

    @precondition(lambda self: len(self.loop.unread) <= 1)
    @rule()
    def dispatch(self):
        self.loop.dispatch()

    @precondition(lambda self: self.loop.unread)
    @rule()
    def read(self):
        self.loop.read()

    @rule(late=st.integers(0, 1), steps=st.integers(2, 8))
    def several_steps(self, late, steps):
        while len(self.loop.unread) > late:
            self.loop.read()
        for _ in range(steps):
            self.loop.step(late)

    @precondition(lambda self: self.loop.seqs)
    @rule(data=st.data())
    def abort(self, data):
        seq = data.draw(st.sampled_from(self.loop.seqs), "seq")
        self.loop.abort(seq)

    @precondition(lambda self: self.loop.unread)
    @rule()
    def lose_device(self):
        self.loop.lose_device()

    @invariant()
    def state(self):
        if hasattr(self, "loop"):
            self.loop.check_state()
            assert not (self.calm and self.loop.scheduler.counts.preempted), "preempted though all was known before"

    def teardown(self):
        try:
            if hasattr(self, "loop") and not isinstance(sys.exception(), Exception):  # else a rule failed: show that
                self.loop.run()
        finally:
            mock.patch.stopall()


CONFIG = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
Machine.TestCase.settings = CONFIG
TestScheduler = Machine.TestCase


class FreesAtOnce(Scheduler):
    """Gives pages back though the step in flight may write them."""

    def finish(self, seq, reason):
        super().finish(seq, reason)
        if seq in self.draining:
            self.draining.remove(seq)
            self._release(seq)


class ForgetsDelta(Scheduler):
    def schedule(self):
        plan = super().schedule()
        return plan and replace(plan, deltas=plan.deltas[: 2 if plan.step % 2 else None])


class PreemptsInFlight(Scheduler):
    """Does not wait for the step in flight."""

    def _make_room(self):
        while (decodes := super()._make_room()) is None:
            self.running[-1].in_flight = 0
            self._preempt(self.running[-1])
        return decodes


class LosesPages(Scheduler):
    def _release(self, seq):
        del seq.pages[3:]
        super()._release(seq)


class RequeuesBehind(Scheduler):
    def _requeue(self, seq):
        super()._requeue(seq)
        self.waiting.rotate(-1)


class WritesPastItsPages(Scheduler):
    def _grow(self, seq, tokens, parts, others=0):
        super()._grow(seq, tokens - (seq.computed > 5), parts, others)
        return tokens - seq.computed


class KeepsComputed(Scheduler):
    """Takes the KV of the first token to outlive a preemption."""

    def _begin(self, seq, reused, parts):
        seq.computed = min(seq.preemptions, 1)
        super()._begin(seq, reused, parts)


class AdmitsGreedily(Scheduler):
    """Leaves no page for what runs."""

    def _renew(self):
        super()._renew()
        self.policy.admit = lambda seq, running: self.pool.pages_for(seq.length) <= self.pool.num_free


class ForgetsCopies(Scheduler):
    def schedule(self):
        plan = super().schedule()
        return plan and replace(plan, copies=())


class FreesMovedPagesAtOnce(Scheduler):
    """Though the step before may write them, and the copy reads them."""

    def _grow(self, *args):
        found = super()._grow(*args)
        while self.retired:
            self.pool.free(self.retired.pop()[1])
        return found


class ForgetsMovedPages(Scheduler):
    def _grow(self, *args):
        found = super()._grow(*args)
        self.retired.clear()
        return found


class KeepsTheOldTable(Scheduler):
    """Writes only the new pages of a moved sequence into the page table."""

    def _grow(self, seq, tokens, parts, others=0):
        mapped, page = seq.mapped, seq.pages[:1]
        found = super()._grow(seq, tokens, parts, others)
        if page and seq.pages[:1] != page:
            parts.deltas[:] = [delta for delta in parts.deltas if delta[0] != seq.slot or delta[1] >= mapped]
        return found


class PreemptsTheOldest(Scheduler):
    def _renew(self):
        super()._renew()
        self.policy.victim = lambda running, pages: running[0]


class PreemptsAnybody(Scheduler):
    """Whatever their priority."""

    def _expendable(self):
        return self.running


class ForgetsPriorities(Scheduler):
    def _queue(self, seq):
        self.waiting.append(seq)


class AdmitsWhatFits(Scheduler):
    """Lets a later one pass the first that waits."""

    def _admit(self, seq, parts):
        if super()._admit(seq, parts):
            return True
        if len(self.waiting) > 1 and super()._admit(self.waiting[1], parts):
            self.waiting[0], self.waiting[1] = self.waiting[1], self.waiting[0]
            return True
        return False


class CountsNoRoom(Scheduler):
    def _release(self, seq):
        super()._release(seq)
        self.empty = 0


FAULTS = {
    FreesAtOnce: "given back though an unread step",
    ForgetsDelta: "the device's page table is another|a prompt waits though|a page is written that its",
    PreemptsInFlight: "given back though an unread step",
    LosesPages: "a page is lost or has two owners",
    RequeuesBehind: "one that came later stands before one that came earlier",
    WritesPastItsPages: "no page for a position that is written",
    KeepsComputed: "a position is left out or written twice|the oldest is held up|nothing can run",
    AdmitsGreedily: "admitted only to be preempted",
    PreemptsTheOldest: "the oldest was preempted",
    AdmitsWhatFits: "one that came later was admitted first",
    CountsNoRoom: "the room in pages is miscounted",
}
MOVING = {
    ForgetsCopies: "another output than alone",
    FreesMovedPagesAtOnce: "given back though an unread step",
    ForgetsMovedPages: "a page is lost or has two owners",
    KeepsTheOldTable: "the device's page table is another",
}


class IgnoresDrafts(Scheduler):
    """Takes a step that is unread to have advanced everyone by one token."""

    def _rows(self, decodes, most, parts):
        rows = super()._rows(decodes, most, parts)
        for seq in decodes:
            seq.ahead = 0
        return rows


class CountsOneToken(Scheduler):
    def on_tokens(self, seq, tokens, rows=1):
        super().on_tokens(seq, tokens, rows)
        if not seq.finished:
            seq.computed -= len(tokens) - 1


class ReturnsWhatMayBeWritten(Scheduler):
    """Gives pages of drafts back though the step in flight may write them."""

    def _return_borrowed(self):
        for seq in self.running:
            keep = self.pool.pages_for(seq.computed)
            self.pool.free(seq.pages[keep:])
            self.empty -= (len(seq.pages) - keep) * self.pool.page_size
            del seq.pages[keep:]
            seq.mapped = min(seq.mapped, keep)
        return False


class DraftsKeepTheirPages(Scheduler):
    def _return_borrowed(self):
        return False


class DraftsPastTheEnd(Scheduler):
    def _lend(self, seq, tokens, spare, parts):
        return super()._lend(seq, tokens - self.limits.short_rows - 1, spare, parts)


DRAFTS = {
    IgnoresDrafts: "another length than is known|a page is written that its sequence does not hold|no page for a",
    CountsOneToken: "another length|the room in pages is miscounted|the host knows another length",
    ReturnsWhatMayBeWritten: "given back though an unread|a page is written|the device's page|another output",
    DraftsKeepTheirPages: "preempted though drafts held pages",
    DraftsPastTheEnd: "no page for a position that is written|a page is written",
}
URGENT = {
    PreemptsAnybody: "a more urgent one was preempted",
    ForgetsPriorities: "one that came later stands before one that came earlier",
}
PAGED, EXTENT = OnDemand(), Extent(Wrong(), overflow="move")


def play(scheduler, policy, runs: int, rows: int = 1, page: int = 2, priorities=(0,)) -> Counter[str]:
    """Random requests, some of them aborted, on small pools; returns what happened in all runs together."""
    total: Counter[str] = Counter()
    for seed in range(runs):
        rng, urgency = random.Random(seed), random.Random(seed)
        loop = Loop(
            Limits(3, 12, 9, 3, page, rng.randint(8, 16) * 2 // page, 16, rows), partial(scheduler, policy=policy)
        )
        for _ in range(60):
            if len(loop.seqs) < 12 and rng.random() < 0.3:
                prompt = [rng.randint(2, 11) for _ in range(rng.randint(1, 5))]
                loop.add(prompt, rng.randint(1, 12), rng.random() < 0.5, priority=urgency.choice(priorities))
            if loop.seqs and rng.random() < 0.05:
                loop.abort(rng.choice(loop.seqs))
            loop.step(late=rng.randint(0, 1))
        loop.run()
        total.update({k: v for k, v in vars(loop.scheduler.counts).items() if isinstance(v, int)})
    return total


@pytest.mark.parametrize(("fault", "message"), DRAFTS.items())
def test_the_checks_catch_faults_with_drafts(fault, message):
    with pytest.raises(AssertionError, match=message):
        play(fault, PAGED, 100, rows=4, page=1)


@pytest.mark.parametrize(("fault", "message"), URGENT.items())
def test_the_checks_catch_faults_with_priorities(fault, message):
    with pytest.raises(AssertionError, match=message):
        play(fault, PAGED, 100, priorities=(0, 3))


def test_equal_priorities_change_nothing():
    plain, equal, mixed = (play(Scheduler, PAGED, 100, priorities=some) for some in ((0,), (-7,), (0, 3)))
    assert plain == equal != mixed
    assert mixed["preempted"] > 20


@pytest.mark.parametrize(("fault", "message"), {**FAULTS, **MOVING}.items())
def test_the_checks_catch(fault, message):
    """Of the same requests, which the right scheduler passes (see the next test)."""
    with pytest.raises(AssertionError, match=message):
        play(fault, EXTENT if fault in MOVING else PAGED, 100)


def test_what_the_faults_are_tried_on_does_happen():
    paged, moving = play(Scheduler, PAGED, 100), play(Scheduler, EXTENT, 100)
    assert paged["preempted"] > 20
    assert min(moving["preempted"], moving["moved"]) > 10
    assert moving["copied_pages"] > moving["moved"]
    assert moving["outgrown"] > moving["moved"]
    drafts = play(Scheduler, PAGED, 100, rows=4)
    assert drafts["preempted"] > 20
    assert drafts["steps"] < 0.8 * paged["steps"]
