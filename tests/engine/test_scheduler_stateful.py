"""Any interleaving of requests, steps, late reads, stops, aborts and device errors; and faults that must be caught."""

import sys

import pytest

from jllm.engine.scheduler import Limits, Plan, Scheduler
from tests.engine.scheduler_harness import Loop

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


@st.composite
def limits(draw):
    slots = draw(st.integers(1, 4))
    return Limits(
        max_slots=slots,
        max_step_tokens=slots + draw(st.integers(0, 12)),
        max_prompt_tokens=draw(st.integers(1, 12)),
        max_chunks=draw(st.integers(1, 3)),
        page_size=draw(st.integers(1, 4)),
        num_pages=slots + draw(st.integers(0, 8)),
        max_deltas=slots + draw(st.integers(0, 8)),
    )


def requests(most):
    """(max_length, stop_id, stop_text)"""
    return st.tuples(st.integers(2, most), st.booleans(), st.booleans())


class Machine(RuleBasedStateMachine):
    """Requests come, run, stop, are aborted and lose their device in any order; reads are 0 or 1 steps late."""

    scheduler = Scheduler

    @initialize(limits=limits(), data=st.data())
    def start(self, limits, data):
        self.loop = Loop(limits, self.scheduler)
        self.add(data)

    @rule(data=st.data())
    def add(self, data):
        most = self.loop.limits.num_pages * self.loop.limits.page_size + 1
        for length, stop_id, stop_text in data.draw(st.lists(requests(most), min_size=1, max_size=5), "requests"):
            prompt = data.draw(st.lists(st.integers(2, 11), min_size=1, max_size=min(length - 1, 9)), "prompt")
            self.loop.add(prompt, length - len(prompt), stop_id, stop_text)

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

    def teardown(self):
        if hasattr(self, "loop") and not isinstance(sys.exception(), Exception):  # else a rule failed: show that
            self.loop.run()


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
        return plan and Plan(plan.step, plan.decodes, plan.chunks, plan.deltas[: 2 if plan.step % 2 else None])


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
    def _grow(self, seq, tokens, draft, others=0):
        super()._grow(seq, tokens - (seq.computed > 5), draft, others)
        return tokens


class KeepsComputed(Scheduler):
    """Takes the KV of the first token to outlive a preemption."""

    def _requeue(self, seq):
        super()._requeue(seq)
        seq.computed = 1


class AdmitsGreedily(Scheduler):
    """Leaves no page for what runs."""

    def _admit(self, seq, draft):
        return super()._admit(seq, draft)

    def _renew(self):
        super()._renew()
        self.policy.admit = lambda seq, running: self.pool.pages_for(seq.length) <= self.pool.num_free


FAULTS = {
    FreesAtOnce: "given back though an unread step",
    ForgetsDelta: "the device's page table is another|a prompt waits though there is room",
    PreemptsInFlight: "given back though an unread step",
    LosesPages: "a page is lost or has two owners",
    RequeuesBehind: "one that came later stands before one that came earlier",
    WritesPastItsPages: "no page for a position that is written",
    KeepsComputed: "a position is left out or written twice|the oldest is held up|nothing can run",
    AdmitsGreedily: "admitted only to be preempted",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_the_machine_catches(fault, message):
    machine = type(fault.__name__, (Machine,), {"scheduler": fault})
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(
            machine, settings=settings(CONFIG, max_examples=5000, phases=[Phase.generate], report_multiple_bugs=False)
        )
