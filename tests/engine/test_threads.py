"""An engine in several threads: one steps, the others wait for their turn, and nothing overlaps."""

import threading
import time

import pytest

from jllm.engine.engine import Engine
from jllm.engine.turns import Turns
from jllm.errors import EngineBusy, EngineClosed
from jllm.step.buckets import Bucket
from tests.tiny import greedy, serve, tiny_model

OPTIONS = {"max_slots": 4, "page_size": 8, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 4),)}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


class Held:
    """An engine whose first step waits on the device until it is let go."""

    def __init__(self, model, monkeypatch):
        self.engine = Engine(model, **OPTIONS)
        self.inside, self.go_on = threading.Event(), threading.Event()
        run = self.engine._device.run

        def wait(*args):
            self.inside.set()
            assert self.go_on.wait(60)
            return run(*args)

        monkeypatch.setattr(self.engine._device, "run", wait)

    def waiting(self, count: int) -> None:
        """Returns once that many callers have the turn or wait for it."""
        end = time.monotonic() + 60
        while len(self.engine._turns._threads) < count:
            assert time.monotonic() < end
            time.sleep(0.001)


class Caller(threading.Thread):
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self.call, self.result, self.error = call, None, None
        self.start()

    def run(self):
        try:
            self.result = self.call()
        except Exception as error:
            self.error = error

    def ended(self):
        self.join(60)
        assert not self.is_alive()
        return self


def tokens(events):
    return {e.id: e.completion.token_ids for e in events if e.completion}


def test_a_second_thread_that_steps_is_refused_and_harms_nothing(model, monkeypatch):
    held = Held(model, monkeypatch)
    first = held.engine.submit(PROMPT, greedy(6))
    runner = Caller(lambda: list(held.engine.run()))
    assert held.inside.wait(60)
    with pytest.raises(EngineBusy, match="let one thread step, and others submit and abort"):
        held.engine.step()
    with pytest.raises(EngineBusy):
        next(held.engine.run())
    held.go_on.set()
    want = serve(model, [PROMPT], [greedy(6)], **OPTIONS)[0].token_ids
    assert tokens(runner.ended().result) == {first: want}
    second = held.engine.submit(PROMPT, greedy(6))  # one thread after another is no mistake
    assert tokens(held.engine.run()) == {second: want}


def test_other_calls_wait_for_the_step_and_come_in_order(model, monkeypatch):
    held = Held(model, monkeypatch)
    first = held.engine.submit(PROMPT, greedy(6))
    stepper = Caller(held.engine.step)
    assert held.inside.wait(60)
    calls = [
        lambda: held.engine.submit(PROMPT, greedy(4)),
        lambda: held.engine.abort(first),
        lambda: held.engine.metrics()["requests_aborted"],
        lambda: held.engine.submit([], greedy(4)),  # what is wrong with a request is said at once
        held.engine.close,
    ]
    callers = []
    for i, call in enumerate(calls):
        callers.append(Caller(call))
        if i != 3:
            held.waiting(len(callers) + (i < 3))
    assert "the prompt is empty" in str(callers[3].ended().error)
    assert [c.is_alive() for c in callers] == [True, True, True, False, True]
    held.go_on.set()
    stepper.ended()
    assert [c.ended().result for c in callers[:3]] == [first + 1, None, 1]
    callers[-1].ended()
    with pytest.raises(EngineClosed):
        held.engine.step()
    ends = {e.id: e.completion.finish_reason for e in held.engine.last_events if e.completion}
    assert ends == {first: "abort", first + 1: "abort"}


def test_a_call_from_inside_a_step_is_refused_rather_than_waiting_for_itself(model, monkeypatch):
    engine, said = Engine(model, **OPTIONS), []
    run = engine._device.run

    def call_back(*args):  # as a signal handler could
        for call in (engine.metrics, engine.step):
            with pytest.raises(EngineBusy) as error:
                call()
            said.append(str(error.value))
        return run(*args)

    monkeypatch.setattr(engine._device, "run", call_back)
    first = engine.submit(PROMPT, greedy(2))
    assert len(tokens(engine.run())[first]) == 2
    assert said[0] == "this thread is inside a call of this engine: call again once it has returned"


def test_turns_are_taken_in_order_and_one_that_gives_up_is_skipped(monkeypatch):
    turns, order = Turns(), []

    def call(name):
        with turns.turn():
            order.append(name)

    with turns.turn():
        callers = []
        for name in "abc":
            callers.append(Caller(lambda name=name: call(name)))
            while len(turns._threads) < 1 + len(callers):
                time.sleep(0.001)
    call("again")  # whoever had the turn does not get it before those that wait
    assert order == ["a", "b", "c", "again"]

    with turns.turn():
        wait = turns._changed.wait

        def interrupted():
            turns._changed.wait = wait
            raise KeyboardInterrupt

        def give_up():
            with pytest.raises(KeyboardInterrupt):
                call("never")

        turns._changed.wait = interrupted
        assert Caller(give_up).ended().error is None
    call("last")
    assert order[-1] == "last"
    assert not turns._threads


def test_a_signal_handler_that_calls_while_its_thread_waits_is_refused():
    """It would wait for the call that it interrupts, which waits for it to return."""
    turns, said = Turns(), []

    def interrupt():  # a signal handler runs in the thread that waits
        del turns._changed.wait
        with pytest.raises(EngineBusy) as error, turns.turn():
            pass
        said.append(str(error.value))
        return turns._changed.wait()

    def call():
        with turns.turn():
            said.append("had its turn")

    with turns.turn():
        turns._changed.wait = interrupt
        caller = Caller(call)
        end = time.monotonic() + 60
        while not said:
            assert time.monotonic() < end
            time.sleep(0.001)
    assert caller.ended().error is None
    assert said == ["this thread is inside a call of this engine: call again once it has returned", "had its turn"]
    assert not turns._threads
