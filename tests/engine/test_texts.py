"""Text made in a thread: the same events in the same order, whatever the thread does, and nothing is left behind."""

import itertools
import threading
from contextlib import suppress

import pytest

from jllm.engine import samples
from jllm.engine.engine import Engine
from jllm.engine.gate import variant_for
from jllm.engine.request import SamplingParams
from jllm.engine.samples import Texts
from jllm.errors import EngineClosed, RequestError
from jllm.step.buckets import Bucket
from tests.engine.test_engine import Letters
from tests.tiny import greedy, serve, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

OPTIONS = {"max_slots": 4, "page_size": 8, "num_pages": 12, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 4),)}


class Pieces(Letters):
    """Like Letters, but every third token's text comes with the next: as of characters of several bytes."""

    def stream_decoder(self, prompt_ids=()):
        return Decoder()


class Decoder:
    def __init__(self):
        self.held = ""

    def push(self, id):
        text, self.held = self.held + chr(id + 32), ""
        if id % 3 == 0:
            text, self.held = "", text
        return text

    def finish(self):
        text, self.held = self.held, ""
        return text


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1, tokenizer=Pieces())


samplings = st.builds(
    SamplingParams,
    temperature=st.just(1.0),
    max_new_tokens=st.integers(1, 14),
    stop=st.sampled_from([(), (), ("a",), ("Q", "7")]),
    stop_token_ids=st.sampled_from([(), (5, 17, 40)]),
    logprobs=st.sampled_from([None, 1]),
    ignore_eos=st.just(True),
    n=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
prompts = st.lists(st.integers(3, 90), min_size=1, max_size=20)
job = st.tuples(prompts, samplings, st.integers(0, 5), st.none() | st.integers(0, 9))  # arrival, abort after
jobs = st.lists(job, min_size=1, max_size=6)


def play(model, jobs, few: int, forks: set[int]):
    """What each sample's events say, all events in order, and the steps that there were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "FEW", few)
        engine, events, ids, clock = Engine(model, **OPTIONS), [], {}, 0
        # What is compiled in the background lets others overtake, by the clock.
        engine._device.programs.permit(variant_for([sampling for _, sampling, _, _ in jobs]))
        while len(ids) < len(jobs) or engine.has_work:
            for i, (prompt, sampling, arrival, abort) in enumerate(jobs):
                if arrival == clock:
                    ids[i] = engine.submit(prompt, sampling)
                if abort is not None and arrival + abort == clock:
                    with suppress(RequestError):  # it has ended
                        engine.abort(ids[i])
            if clock in forks:
                fork_first(engine, ids.values())
            events += engine.step()
            clock += 1
            assert clock < 500, "a request hangs"
        steps = engine.metrics()["steps"]
        engine.close()
    assert not text_threads()
    return events, steps


def text_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("texts")]


def fork_first(engine, ids):
    """Forks the first sample that runs, if one does."""
    for request, sample in itertools.product(sorted(ids), range(4)):
        with suppress(RequestError):  # it has ended
            engine.fork(request, sample)
            return


def plain(events):
    """Events without what depends on the clock."""
    done = [(e.completion.text, e.completion.token_ids, e.completion.finish_reason, e.completion.logprobs,
             e.completion.timings.output_tokens) if e.completion else None for e in events]  # fmt: skip
    return [(e.id, e.sample, e.text, e.token_ids, c) for e, c in zip(events, done)]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=jobs, few=st.integers(0, 3), forks=st.sets(st.integers(1, 12), max_size=2))
def test_the_same_events_in_the_same_order(model, jobs, few, forks):
    want, steps = play(model, jobs, 10**6, forks)
    got, same_steps = play(model, jobs, few, forks)
    assert plain(got) == plain(want)
    assert same_steps == steps
    by_sample: dict = {}
    for e in got:
        by_sample.setdefault((e.id, e.sample), []).append(e)
    for mine in by_sample.values():
        assert [e.completion is not None for e in mine] == [False] * (len(mine) - 1) + [True]
        assert "".join(e.text for e in mine) == mine[-1].completion.text
        assert sum((e.token_ids for e in mine), ()) == mine[-1].completion.token_ids


def test_the_loop_does_not_wait(model, monkeypatch):
    """While a step's text is made, the next step is dispatched and read; its events come one call later."""
    monkeypatch.setattr(samples, "FEW", 0)
    goes_on, made_in, push = threading.Event(), [], Decoder.push

    def slow(self, id):
        made_in.append(threading.current_thread().name)
        assert goes_on.wait(60)
        return push(self, id)

    monkeypatch.setattr(Decoder, "push", slow)
    engine = Engine(model, **OPTIONS)
    engine.submit([5, 6, 7], greedy(6))
    assert [engine.step(), engine.step()] == [[], []]
    assert engine.metrics()["output_tokens"] == 1
    goes_on.set()
    events = list(engine.run())
    assert sum(len(e.token_ids) for e in events) == 6
    assert made_in[0].startswith("texts")
    assert made_in[-1] == "MainThread"  # nothing runs any more: nothing to wait for
    engine.close()


def test_few_tokens_are_made_at_once(model):
    engine = Engine(model, **OPTIONS)
    engine.submit([5, 6, 7], greedy(6))
    while engine.has_work:
        engine.step()
        assert not engine._ledger.has_news
    assert not text_threads()


def test_a_stop_string_that_the_length_limit_brings_out_is_the_reason(model):
    """The last token's text comes with the next one's, or at the end."""
    (free,) = serve(model, [[5, 6, 7]], [greedy(60)], **OPTIONS)
    ids = free.token_ids
    last = next(i for i, id in enumerate(ids) if i and id % 3 == 0 and id not in ids[:i])
    (done,) = serve(model, [[5, 6, 7]], [greedy(last + 1, stop=chr(ids[last] + 32), logprobs=0)], **OPTIONS)
    assert (done.finish_reason, done.text, done.token_ids) == ("stop", free.text[:last], ids[:last])
    assert len(done.logprobs) == last


@pytest.mark.parametrize("few", [0, 64])
def test_an_exception_reaches_the_caller_and_closes(model, monkeypatch, few):
    """And nothing is lost: neither what ends well in the same step, nor what is known of the rest."""
    monkeypatch.setattr(samples, "FEW", few)

    class Broken(Decoder):
        def push(self, id):
            raise ValueError("a broken tokenizer")

        def finish(self):
            raise ValueError("a broken tokenizer")

    engine = Engine(model, **OPTIONS)
    broken, ends, runs = (engine.submit([5, 6, 7], greedy(count)) for count in (9, 1, 9))
    engine._ledger.find(broken, 0).answer.decoder = Broken()
    with pytest.raises(ValueError, match="a broken tokenizer"):
        list(engine.run())
    last = {e.id: e.completion for e in engine.last_events if e.completion}
    assert {id: done.finish_reason for id, done in last.items()} == {broken: "error", ends: "length", runs: "error"}
    for id in (ends, runs):
        mine = [e for e in engine.last_events if e.id == id]
        assert "".join(e.text for e in mine) == last[id].text == "".join(chr(t + 32) for t in last[id].token_ids)
        assert sum((e.token_ids for e in mine), ()) == last[id].token_ids != ()
    with pytest.raises(EngineClosed, match=r"a step failed \(ValueError: a broken tokenizer\) half-way"):
        engine.step()
    assert not text_threads()


def test_close_joins_while_text_is_made(model, monkeypatch):
    monkeypatch.setattr(samples, "FEW", 0)
    goes_on, begun, push = threading.Event(), threading.Event(), Decoder.push

    def slow(self, id):
        begun.set()
        assert goes_on.wait(60)
        return push(self, id)

    monkeypatch.setattr(Decoder, "push", slow)
    engine = Engine(model, **OPTIONS)
    engine.submit([5, 6, 7], greedy(6))
    engine.step(), engine.step()
    assert begun.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert closing.is_alive()
    goes_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not text_threads()


def test_nothing_is_nothing():
    made = Texts()
    assert made.news(now=False) == made.news(now=True) == made.rest() == []
    assert not made.waiting
    made.join()
