"""Replicas in threads: each request's tokens are those of one engine alone, wherever it runs and whatever fails.

test_replicas.py has those in processes.
"""

import asyncio
import threading
import time
import warnings
from collections import defaultdict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jllm.distributed import replicas
from jllm.distributed.replica import Request
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, EngineClosed, EngineNotReady, RequestError, WeightsError
from jllm.guides.guide import Guide
from jllm.programs import executables
from jllm.programs.packed_step import packed_step
from jllm.serve.async_engine import AsyncEngine
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.tree import chain
from jllm.step.buckets import Bucket
from tests.ascii import TOKENIZER
from tests.tiny import serve, tiny_model

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

jax.config.update("jax_enable_x64", True)
Replicas = partial(replicas.Replicas, threads=True)
SIZES = {"max_slots": 3, "page_size": 8, "num_pages": 60, "max_step_tokens": 16, "buckets": (Bucket(3, 13, 3),)}
PREFIX = tuple(range(3, 27))
JOBS = [
    ((5, 6, 7, 8, 9, 10), SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)),
    ((3, 1, 4, 1, 5), SamplingParams(max_new_tokens=9, seed=3, logprobs=2, prompt_logprobs=True, ignore_eos=True)),
    ((*PREFIX, 7), SamplingParams(temperature=0.9, top_p=0.8, max_new_tokens=14, seed=4, n=2, ignore_eos=True)),
    ((*PREFIX, 9), SamplingParams(temperature=1.1, max_new_tokens=7, seed=5, repetition_penalty=1.3)),
    ((40,), SamplingParams(temperature=1.2, max_new_tokens=16, seed=6, ignore_eos=True)),
    ((41, 42), SamplingParams(temperature=1.2, max_new_tokens=1, seed=7)),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model("float64")


def alone(model, jobs=JOBS, **options):
    """What one engine says to all jobs, by job and sample."""
    engine = Engine(model, **{**SIZES, **options})
    for prompt, params in jobs:
        engine.submit(prompt, params)
    ends = {(event.id, event.sample): event.completion for event in engine.run() if event.completion}
    return [ends[key] for key in sorted(ends)]


@pytest.fixture(scope="module")
def wanted(model):
    return alone(model)


class Slow(Engine):
    """One that can be met while it runs."""

    def step(self):
        time.sleep(0.02)
        return super().step()


class Failing(Slow):
    """One whose steps fail from a given one on: by device, of a mesh by its first."""

    def __init__(self, model, fails, **options):
        super().__init__(model, **options)
        advance, left = self._loop.advance, fails.get(min(device.id for device in model.params.norm.devices()))

        def advance_or_fail():
            nonlocal left
            if left == 0:
                raise RuntimeError("this device is gone")
            left = None if left is None else left - 1
            advance()

        self._loop.advance = advance_or_fail


def finish(engine):
    """What was streamed, and the completions, by (id, sample)."""
    streamed, texts, scored, ends = defaultdict(tuple), defaultdict(str), defaultdict(list), {}
    for event in engine.run():
        key = event.id, event.sample
        assert key not in ends
        streamed[key] += event.token_ids
        texts[key] += event.text
        scored[key] += [one.token_id for one in event.logprobs]
        if event.completion is not None:
            ends[key] = event.completion
    for key, completion in ends.items():
        assert streamed[key][: len(completion.token_ids)] == completion.token_ids
        assert completion.text is None or texts[key] == completion.text
        assert scored[key] == list(completion.token_ids if completion.logprobs else ()), "each once"
        times = completion.timings
        assert times.first_token is None or 0 < times.first_token <= times.total
    return ends


def in_time(work, seconds=120.0):
    """What work gives, in a thread, since it might wait for ever."""
    done = Future()

    def run():
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)


def rest(engine):
    """The completions that are still to come."""
    return {(event.id, event.sample): event.completion for event in engine.run() if event.completion}


def broken(*args, **more):
    raise ZeroDivisionError("this is broken")


def same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.finish_reason, mine.seed) == (theirs.finish_reason, theirs.seed)
        for name in ("logprobs", "prompt_logprobs"):
            assert (getattr(mine, name) is None) == (getattr(theirs, name) is None)
        for a, b in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, rel=1e-10)
        if theirs.prompt_logprobs is not None:
            assert mine.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, rel=1e-10)


def test_tokens_are_those_of_one_engine(model, wanted):
    engine = Replicas(model, 4, **SIZES)
    assert engine.slots == 12
    assert engine.sizes.limits.max_slots == 3
    assert engine.vocab_size == 97
    assert engine.compile_ahead([params for _, params in JOBS]) == 1
    for prompt, params in JOBS:
        engine.submit(prompt, params)
    assert engine.has_work
    ends = finish(engine)
    assert not engine.has_work
    greedy = replace(ends[0, 0], seed=wanted[0].seed)  # its seed is drawn
    same([greedy, *(ends[key] for key in sorted(ends)[1:])], wanted)
    for place, replica in enumerate(engine._all):
        there = {
            array.device for array in jax.tree.leaves((replica.engine._device._state, replica.engine._device._params))
        }
        assert there == {jax.devices()[place]}
        assert replica.load.tokens == 0
        assert replica.engine.metrics()["pages_used"] == 0
        assert replica.engine.metrics()["requests"] > 0
    found = engine.metrics()
    assert found["requests"] == found["requests_finished"] == len(JOBS)
    assert found["output_tokens"] == found["inter_token_s"]["count"] + found["first_token_s"]["count"]
    assert found["replicas"] == 4
    assert found["replicas_failed"] == 0
    engine.reset_metrics()
    assert engine.metrics()["requests"] == 0
    engine.close()


def test_requests_go_where_there_is_least_to_do_and_their_beginning_is_known(model):
    engine = Replicas(model, 3, **SIZES)
    where = lambda name: engine._all.index(engine._requests[name][1])  # noqa: E731
    short, long = (SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in (2, 60))
    first = [engine.submit((7, 8, 9), long) for _ in range(3)]
    assert {where(name) for name in first} == {0, 1, 2}
    assert where(engine.submit(PREFIX, short)) == 0
    assert where(engine.submit((50,), short)) == 1
    assert where(engine.submit((*PREFIX, 77), short)) in (0, 2)
    list(engine.run())
    hits = engine.metrics()["prefix_hit_tokens"]
    one = engine.submit((*PREFIX, 30), short)
    place = where(one)
    list(engine.run())
    assert engine.metrics()["prefix_hit_tokens"] == hits + len(PREFIX)
    engine.reset_prefix_cache()
    again = engine.submit((*PREFIX, 31), short)
    assert where(again) == 0
    assert place in (0, 2)
    list(engine.run())
    assert engine.metrics()["prefix_hit_tokens"] == hits + len(PREFIX), "nothing is cached after a reset"
    engine.close()


@hypothesis.settings(max_examples=4)
@hypothesis.given(
    fails=st.dictionaries(st.integers(0, 2), st.integers(0, 14), min_size=1, max_size=2),
    order=st.permutations(range(len(JOBS))),
)
def test_what_ran_on_a_device_that_failed_begins_again(model, wanted, fails, order):
    index = [i for i, (_, params) in enumerate(JOBS) for _ in range(params.n)]
    engine = Replicas(model, 3, make=partial(Failing, fails=fails), **SIZES)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = {engine.submit(*JOBS[i]): i for i in order}
        ends = finish(engine)
    by_job = {(names[name], sample): completion for (name, sample), completion in ends.items()}
    found = [by_job[key] for key in sorted(by_job)]
    assert [job for job, _ in sorted(by_job)] == index
    same([replace(found[0], seed=wanted[0].seed), *found[1:]], wanted)
    failed = engine.metrics()["replicas_failed"]
    assert sum("begins again elsewhere" in str(each.message) for each in told) == failed <= len(fails)
    assert all(replica.load.tokens == 0 for replica in engine._all if not replica.failed)
    if 0 in fails.values():
        assert failed >= 1
    engine.close()


def test_text_that_was_streamed_comes_no_second_time():
    model = tiny_model("float64", tokenizer=TOKENIZER)
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, stop=("zzz",))
    wanted = serve(model, ["Once upon a time"], [params], **SIZES)[0]
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 9}), **SIZES)
    name = engine.submit("Once upon a time", params)
    with pytest.warns(RuntimeWarning, match="this device is gone"):
        ends = finish(engine)
    assert ends[name, 0].text == wanted.text
    assert engine.metrics()["replicas_failed"] == 1
    engine.close()


def test_when_all_have_failed_all_that_ran_has_ended(model):
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 3, 1: 6}), **SIZES)
    names = [engine.submit(*job) for job in JOBS]
    events = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="this device is gone"):
            events.extend(engine.run())
    ended = sorted((event.id, event.sample) for event in [*events, *engine.last_events] if event.completion)
    assert ended == [(name, sample) for name, (_, params) in zip(names, JOBS) for sample in range(params.n)]
    assert {event.completion.finish_reason for event in engine.last_events if event.completion} <= {"error", "abort"}
    with pytest.raises(EngineClosed, match="this device is gone"):
        engine.submit((1,))
    with pytest.raises(EngineClosed):
        engine.step()


def test_forks_snapshots_and_aborts(model):
    greedy = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    want = serve(model, [(5, 6, 7)], [greedy], **SIZES)[0].token_ids
    engine = Replicas(model, 2, make=Slow, **SIZES)
    name, other = engine.submit((5, 6, 7), greedy), engine.submit((8, 9), greedy)
    while not any(event.id == name and event.token_ids for event in engine.step()):
        pass
    engine.abort(other)
    sample = engine.fork(name)
    taken = engine.snapshot(name)
    assert taken.length >= 3
    known = len(taken.tokens)
    again = engine.resume(taken, replace(greedy, max_new_tokens=33 - known))
    ends = {}
    for event in engine.run():
        if event.completion is not None:
            ends[event.id, event.sample] = event.completion
    assert ends[name, 0].token_ids == ends[name, sample].token_ids == want
    assert (*(int(token) for token in taken.tokens[3:]), *ends[again, 0].token_ids) == want
    assert ends[other, 0].finish_reason == "abort"
    for ended in (lambda: engine.abort(name), lambda: engine.fork(other), lambda: engine.snapshot(99)):
        with pytest.raises(RequestError, match="is not running"):
            ended()
    with pytest.raises(RequestError, match="penalties"):
        engine.resume(taken, replace(greedy, repetition_penalty=1.2))
    assert not engine.has_work
    assert [replica.load.tokens for replica in engine._all] == [0, 0]
    engine.close()


def test_a_fork_has_its_events_though_another_thread_steps_meanwhile(model):
    greedy = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    engine, ends = Replicas(model, 2, make=Slow, **SIZES), {}
    name = engine.submit((5, 6, 7), greedy)
    while not any(event.token_ids for event in engine.step()):
        pass
    for replica in engine._all:

        def fork(request, sample, fork=replica.fork):
            index = fork(request, sample)
            while engine.has_work:  # as another thread may, before this one goes on
                ends.update({(event.id, event.sample): event.completion for event in engine.step()})
            return index

        replica.fork = fork
    sample = engine.fork(name)
    assert ends[name, sample].token_ids == ends[name, 0].token_ids
    assert not engine.has_work
    engine.close()


def test_priorities_and_deadlines_go_along_and_a_deadline_is_of_the_first_begin(model):
    greedy = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    engine, asked = Replicas(model, 2, **SIZES), []
    for replica in engine._all:
        submit = replica.engine.submit
        replica.engine.submit = lambda *args, to=submit, **more: asked.append(more) or to(*args, **more)
    engine.submit((5, 6, 7), greedy, priority=-2)
    engine.submit((5, 6, 7), greedy, deadline=0.0)
    reasons = {event.id: event.completion.finish_reason for event in engine.run() if event.completion}
    assert reasons == {0: "length", 1: "deadline"}
    assert sorted((more["priority"], more["deadline"]) for more in asked) == [(-2, None), (0, 0.0)]
    late = Request(0, (5,), greedy, None, False, time.perf_counter() - 1000.0, {0}, deadline=900.0)
    assert late.urgency() == {"priority": 0, "deadline": 0.0}
    with pytest.raises(RequestError, match="priority must be an integer"):
        engine.submit((5,), greedy, priority="high")
    engine.close()


def until(engine, key):
    """The completions up to that of a sample."""
    ends = {}
    while key not in ends:
        ends |= {(event.id, event.sample): event.completion for event in engine.step() if event.completion}
    return ends


def after(engine, steps):
    """The completions that come in so many calls."""
    found = [event for _ in range(steps) for event in engine.step()]
    return {(event.id, event.sample): event.completion for event in found if event.completion}


def as_their_versions(ends, prompts, models):
    """Checks that greedy tokens are those of one engine with the weights of their version; returns all versions."""
    spans = {version: [] for version in models}
    for (name, _), done in ends.items():
        tokens, versions = done.token_ids, done.versions
        starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        for start, stop in zip(starts, [*starts[1:], len(tokens)]):
            params = SamplingParams(temperature=0.0, max_new_tokens=stop - start, ignore_eos=True)
            job = (*prompts[name], *tokens[:start]), params
            spans[versions[start]].append((job, tokens[start:stop]))
    for version, some in spans.items():
        wanted = alone(models[version], [job for job, _ in some]) if some else []
        assert [tokens for _, tokens in some] == [want.token_ids for want in wanted]
    return {version for done in ends.values() for version in done.versions}


def test_all_engines_take_other_weights_or_none(model):
    """And stand still while they sleep or their weights are gone, and go on."""
    models = {0: model, 1: tiny_model("float64", seed=1), 2: model}
    engine = Replicas(model, 2, make=Slow, **SIZES)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    prompts = {engine.submit(prompt, greedy): prompt for prompt in (PREFIX, (8,), (*PREFIX, 7), (9, 9))}
    ends = after(engine, 6)
    with pytest.raises(WeightsError, match=r"norm must be float64\[32\]"):
        engine.update(replace(models[1].params, norm=models[1].params.norm[:3]))
    assert engine.version == 0
    assert engine.update(models[1].params) == engine.version == 1
    prompts[engine.submit(PREFIX, greedy)] = PREFIX
    ends |= after(engine, 4)
    engine.sleep()
    with pytest.raises(EngineNotReady, match="the engine sleeps"):
        list(engine.run())
    engine.wake()
    ends |= after(engine, 2)
    donated = jax.device_put(jax.tree.map(jnp.array, model.params), jax.devices()[0])
    assert engine.update(donated) == 2
    prompts |= {engine.submit(prompt, greedy): prompt for prompt in ((5,), (6,))}  # each engine has one that still runs
    donated.norm.delete()
    with pytest.raises(EngineNotReady, match="norm was donated or deleted"):
        ends |= after(engine, 1000)
    models[3] = models[1]
    assert engine.update(models[1].params) == 3
    assert as_their_versions(ends | rest(engine), prompts, models) >= {0, 1, 3}
    assert engine.metrics()["version"] == 3
    assert engine.metrics()["replicas_failed"] == 0
    engine.close()


def test_a_second_thread_updates_while_the_first_steps(model):
    models = [model, tiny_model("float64", seed=1)]
    engine, stop, errors, taken = Replicas(model, 2, make=Slow, **SIZES), threading.Event(), [], {0: model}

    def train():
        try:
            while not stop.wait(0.03):
                new = models[(len(taken)) % 2]
                taken[engine.update(new.params, running=("recompute", "finish")[len(taken) % 3 == 0])] = new
        except BaseException as error:
            errors.append(error)

    greedy = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
    thread = threading.Thread(target=train)
    thread.start()
    prompts, ends = {}, {}
    for prompt in (PREFIX, (8,), (*PREFIX, 7), (9, 9), PREFIX, (5, 6)):
        prompts[engine.submit(prompt, greedy)] = prompt
        ends |= after(engine, 5)
    ends |= rest(engine)
    stop.set()
    thread.join()
    assert not errors
    assert len(ends) == len(prompts)
    assert len(as_their_versions(ends, prompts, taken)) > 2
    engine.close()


def test_tokens_of_older_weights_cannot_begin_again(model):
    other = tiny_model("float64", seed=1)
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 14}), **SIZES)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    names = {engine.submit(prompt, greedy): prompt for prompt in ((5, 6, 7), (8,))}
    known = set()
    while known != set(names):
        known |= {event.id for event in engine.step() if event.token_ids}
    engine.update(other.params)
    later = engine.submit((5, 6, 7, 8), greedy)
    with pytest.warns(RuntimeWarning, match="this device is gone"):
        ends = rest(engine)
    lost, kept = sorted(names)
    assert [ends[name, 0].finish_reason for name in (lost, kept, later)] == ["error", "length", "length"]
    del ends[lost, 0]
    assert 1 in as_their_versions(ends, {**names, later: (5, 6, 7, 8)}, {0: model, 1: other})
    engine.close()


def test_a_request_that_began_before_its_engine_took_the_weights_cannot_begin_again(model):
    """The others had them already."""
    engine = Replicas(model, 2, make=partial(Failing, fails={1: 14}), **SIZES)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    first, last = engine._all
    take, names = last.engine.take_weights, []

    def take_late(*given):
        first.load.tokens += 1 << 20
        names.append(engine.submit((5, 6, 7), greedy))
        first.load.tokens -= 1 << 20
        while not any(event.token_ids for event in engine.step()):
            pass
        return take(*given)

    last.engine.take_weights = take_late
    engine.update(tiny_model("float64", seed=1).params)
    with pytest.warns(RuntimeWarning, match="this device is gone"):
        ends = rest(engine)
    assert ends[names[0], 0].finish_reason == "error"
    fit = engine._fit

    def fit_and_close(*given):
        taking = fit(*given)
        first.engine.close()
        return taking

    engine._fit = fit_and_close
    with pytest.raises(EngineClosed, match="no engine took the weights"):
        engine.update(model.params)
    engine.close()


def test_an_update_while_a_request_draws_its_tokens_again_ends_it_with_an_error(model):
    """Else other weights would go on behind tokens of the old ones."""
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 16}), **SIZES)
    name = engine.submit((5, 6, 7), SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True))
    while not engine._all[0].failed:
        with warnings.catch_warnings(action="ignore"):
            engine._hear(*engine._news.get())
    engine.update(tiny_model("float64", seed=1).params)
    assert rest(engine)[name, 0].finish_reason == "error"
    engine.close()


def wait_for_the_failure(engine, place):
    while not engine._all[place].engine.closed:
        time.sleep(0.01)


@pytest.mark.parametrize("known", [True, False], ids=["there", "on its way there"])
def test_forks_of_a_device_that_failed_end_with_an_error(model, known):
    greedy = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 12}), **SIZES)
    name = engine.submit((5, 6, 7), greedy)
    while not any(event.token_ids for event in engine.step()):
        pass
    sample = engine.fork(name)
    wait_for_the_failure(engine, 0)
    if not known:
        engine._all[0].engine._last = ()
    with pytest.warns(RuntimeWarning, match="begins again elsewhere"):
        ends = until(engine, (name, sample))
    again = engine.fork(name)
    assert again == sample + 1, "no number twice"
    ends |= rest(engine)
    assert ends[name, sample].finish_reason == "error"
    assert ends[name, again].token_ids == ends[name, 0].token_ids
    assert engine._all[1].load.tokens == 0
    assert ends[name, 0].token_ids == serve(model, [(5, 6, 7)], [greedy], **SIZES)[0].token_ids
    engine.close()


def test_an_abort_that_a_failed_device_did_not_come_to_holds_on_the_next(model):
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 4}), **SIZES)
    name = engine.submit((5, 6, 7), SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True))
    wait_for_the_failure(engine, 0)
    engine.abort(name)
    with pytest.warns(RuntimeWarning, match="begins again elsewhere"):
        ends = finish(engine)
    assert ends[name, 0].finish_reason == "abort"
    engine.close()


@pytest.mark.parametrize("what", ["submit", "resume", "abort"])
def test_what_an_engine_cannot_do_for_a_request_ends_it_alone(model, what):
    greedy = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    engine = Replicas(model, 2, make=Slow, **SIZES)
    good, bad = engine.submit((5, 6, 7), greedy), engine.submit((8, 9), replace(greedy, n=2))
    while not any(event.id == good and event.token_ids for event in engine.step()):
        pass
    value = engine.snapshot(good)
    for replica in engine._all:
        setattr(replica.engine, what, broken)
    if what == "resume":  # whose caller waits
        with pytest.raises(ZeroDivisionError):
            in_time(lambda: engine.resume(value, greedy))
        assert in_time(lambda: rest(engine)).keys() == {(good, 0), (bad, 0), (bad, 1)}
    else:
        bad = engine.submit((8, 9), replace(greedy, n=2)) if what == "submit" else bad
        if what == "abort":
            engine.abort(bad)
        with pytest.warns(RuntimeWarning, match=rf"request {bad} ends: .*ZeroDivisionError: this is broken"):
            ends = in_time(lambda: rest(engine))
        assert {sample: ends[bad, sample].finish_reason for sample in (0, 1)} == {0: "error", 1: "error"}
        assert ends[good, 0].token_ids == serve(model, [(5, 6, 7)], [greedy], **SIZES)[0].token_ids
    assert not engine.has_work
    assert [replica.load.tokens for replica in engine._all] == [0, 0]
    for replica in engine._all:
        replica.engine.__dict__.pop(what)
    assert len(in_time(lambda: (engine.submit((5,), greedy), finish(engine))[1])) == 1
    engine.close()


@pytest.mark.parametrize("what", ["submit", "resume", "abort"])
def test_an_engine_that_turns_out_to_be_closed_has_failed(model, what):
    """Nothing ran there that would have told so."""
    greedy = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    engine = Replicas(model, 2, **SIZES)
    name = engine.submit((5, 6, 7), greedy)
    value = engine.snapshot(name)
    if what != "abort":
        in_time(lambda: finish(engine))
    first = engine._all[0].engine
    call = getattr(first, what)

    def closed(*args, **more):
        first.close("just now")
        return call(*args, **more)

    setattr(first, what, closed)
    asks = {
        "submit": lambda: engine.submit((5, 6, 7), greedy),
        "resume": lambda: engine.resume(value, greedy),
        "abort": lambda: engine.abort(name) or name,
    }
    name = in_time(asks[what])
    with pytest.warns(RuntimeWarning, match="begins again elsewhere"):
        ends = in_time(lambda: finish(engine))
    assert ends.keys() == {(name, 0)}
    assert ends[name, 0].finish_reason == ("abort" if what == "abort" else "length")
    engine.close()


def test_a_close_that_fails_raises_once_all_the_rest_is_closed(model):
    engine = Replicas(model, 2, **SIZES)
    engine._all[0].engine.close = broken
    names = [engine.submit(*JOBS[i]) for i in (0, 5)]
    with pytest.raises(ZeroDivisionError):
        in_time(engine.close)
    assert {event.id for event in engine.last_events if event.completion} == set(names)
    assert engine._all[1].engine.closed
    in_time(engine.close)


def test_what_was_there_when_the_last_engine_failed_is_in_the_last_events(model):
    engine = Replicas(model, 1, **SIZES)
    name, replica = engine.submit(*JOBS[5]), engine._all[0]
    end = time.monotonic() + 60
    while not engine._news.qsize():
        assert time.monotonic() < end
        time.sleep(0.01)
    replica.close("gone")
    engine._news.put((replica, RuntimeError("this device is gone")))
    engine._all[0].close = lambda reason: None
    with pytest.raises(RuntimeError, match="this device is gone"):
        engine.step()
    assert [event.completion.finish_reason for event in engine.last_events if event.completion] == ["length"]
    assert {event.id for event in engine.last_events} == {name}


def test_a_seed_that_was_drawn_stays_where_a_request_begins_again(model):
    """Else what was streamed would be two continuations, one behind the other."""
    sampled = SamplingParams(temperature=1.2, max_new_tokens=24, ignore_eos=True)
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 10}), **SIZES)
    name = engine.submit((40,), sampled)
    with pytest.warns(RuntimeWarning, match="begins again elsewhere"):
        end = finish(engine)[name, 0]
    same([end], alone(model, [((40,), replace(sampled, seed=end.seed))]))
    engine.close()


def test_times_are_those_of_the_first_beginning(model):
    engine = Replicas(model, 2, make=partial(Failing, fails={0: 10}), **SIZES)
    name = engine.submit((5, 6, 7), SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True))
    request = engine._requests[name][0]
    request.submitted -= 1000.0
    while not any(event.token_ids for event in engine.step()):
        pass
    request.sent[0].first -= 500.0
    first = request.sent[0].first - request.submitted
    with pytest.warns(RuntimeWarning, match="begins again elsewhere"):
        times = until(engine, (name, 0))[name, 0].timings
    assert times.first_token == first
    assert times.total > 1000.0
    engine.close()


def test_prefixes_that_were_forgotten_draw_no_request(model):
    engine = Replicas(model, 2, **SIZES)
    one = SamplingParams(max_new_tokens=1, temperature=0.0)
    places = []
    for prompts in [((50,), PREFIX), ((*PREFIX, 30),), ((*PREFIX, 31),)]:
        if prompts[0][-1] == 31:
            engine.reset_prefix_cache()
        names = [engine.submit(prompt, one) for prompt in prompts]
        places.append(engine._all.index(engine._requests[names[-1]][1]))
        finish(engine)
    assert places == [1, 1, 0], "where it was computed, and then the first of two that know nothing"
    engine.close()


def test_a_request_has_to_fit_the_engine_with_the_fewest_pages(model):
    def make(here, **options):
        pages = 60 if jax.devices()[0] in here.params.norm.devices() else 4
        return Engine(here, **{**options, "num_pages": pages})

    engine = Replicas(model, 2, make=make, **SIZES)
    assert engine.most_tokens == 4 * 8 + 1
    with pytest.raises(RequestError, match="the page pool has 4"):
        engine.submit((5, 6, 7), SamplingParams(max_new_tokens=40))
    engine.submit((5, 6, 7), SamplingParams(max_new_tokens=20))
    assert len(finish(engine)) == 1
    engine.close()


def test_what_cannot_be_compiled_on_one_device_is_an_error(model):
    def fail(samplings, *, wait):
        raise RuntimeError("no program for this device")

    engine = Replicas(model, 3, **SIZES)
    for replica in engine._all:
        replica.engine.compile_ahead = lambda samplings, *, wait: 1
    assert engine.compile_ahead() == 1
    engine._all[1].engine.compile_ahead = fail
    with pytest.raises(RuntimeError, match="no program for this device"):
        engine.compile_ahead()
    engine.close()


def test_each_device_keeps_and_finds_programs_of_its_own(model, tmp_path):
    """A warning would be an error here: JAX loads a program on the device that it was compiled for, and no other."""
    first, other = jax.devices()[:2], jax.devices()[1:3]
    for devices, loaded, files in ((first, 0, 2), (first, 2, 2), (other, 1, 3)):
        executables._read.cache_clear()  # as in another process
        engine = Replicas(model, devices, **SIZES, executables=tmp_path)
        with warnings.catch_warnings(action="error"):
            engine.compile_ahead()
            for _ in range(4):
                engine.submit(*JOBS[0])
            assert len(finish(engine)) == 4
        assert (engine.metrics()["compile_loaded"], len(list(tmp_path.iterdir()))) == (loaded, files)
        engine.close()


def test_what_is_left_at_a_close_has_its_end(model):
    engine = Replicas(model, 2, **SIZES)
    names = [engine.submit(*job) for job in JOBS]
    engine.step()
    engine.close("that was all")
    engine.close()
    ended = [(event.id, event.sample) for event in engine.last_events if event.completion is not None]
    assert len(ended) == len(set(ended)) >= len(names)
    assert not engine.has_work
    with pytest.raises(EngineClosed, match="that was all"):
        engine.check((1, 2))


def test_what_was_compiled_ahead_is_what_runs(model, wanted):
    engine = Replicas(model, 2, **SIZES)
    engine.compile_ahead([params for _, params in JOBS])
    before, programs = packed_step._cache_size(), engine.metrics()["compile_programs"]
    names = [engine.submit(*job) for job in JOBS]
    assert len(finish(engine)) == len(wanted)
    assert len(names) == len(JOBS)
    assert packed_step._cache_size() == before
    assert (engine.metrics()["compile_programs"], engine.metrics()["compile_first_use"]) == (programs, 0)
    engine.close()


def test_guided_steps_that_were_compiled_ahead_run_on_each_device(model):
    """The second half of such a step has no weights, which would say where it runs."""
    guided = SamplingParams(temperature=0.0, max_new_tokens=4, guide=Guide.choice(["yes", "no"]))
    engine = Replicas(replace(model, tokenizer=TOKENIZER), 2, **SIZES)
    engine.compile_ahead([guided])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a device that fails, whose work goes elsewhere
        names = [engine.submit((5 + i, 6), guided) for i in range(2)]
        ends = finish(engine)
    assert len(ends) == len(names)
    assert engine.metrics()["compile_first_use"] == 0
    engine.close()


def test_an_asynchronous_engine_over_replicas(model, wanted):
    async def run():
        host = AsyncEngine(Replicas(model, 4, **SIZES))
        streams = [await host.submit(*job) for job in JOBS]
        ends = [[event.completion async for event in stream if event.completion] for stream in streams]
        await host.close()
        return [end for some in ends for end in some]

    found = asyncio.run(run())
    assert sorted(end.token_ids for end in found) == sorted(end.token_ids for end in wanted)


def test_a_device_without_work_does_not_wait_for_one_that_has(model):
    class Held(Engine):
        def step(self):
            if jax.devices()[0] in self._device._params.norm.devices():
                free.wait(400)
            return super().step()

    async def run():
        host = AsyncEngine(Replicas(model, 2, make=Held, **SIZES))
        try:
            held = await host.submit(*JOBS[0])
            await asyncio.sleep(0.3)  # step() waits by now
            events = await asyncio.wait_for(ends_of(await host.submit(*JOBS[5])), 300)
            assert not held._events
            free.set()
            return events + await ends_of(held)
        finally:
            free.set()
            await host.close()

    async def ends_of(stream):
        return [event async for event in stream if event.completion]

    free = threading.Event()
    assert len(asyncio.run(run())) == 2


def test_a_step_that_waits_ends_where_another_thread_closes(model):
    class Silent(Slow):
        def step(self):
            time.sleep(0.02)
            return []

    def step():
        begun.set()
        with suppress(EngineClosed):  # a busy machine comes to it late
            engine.step()

    engine, begun = Replicas(model, 2, make=Silent, **SIZES), threading.Event()
    engine.submit(*JOBS[0])
    waits = threading.Thread(target=step, daemon=True)
    waits.start()
    begun.wait()
    time.sleep(0.1)
    engine.close()
    waits.join(60)
    assert not waits.is_alive()
    assert [event.completion.finish_reason for event in engine.last_events] == ["abort"]


def test_drafters_have_their_weights_on_each_device(model, wanted):
    small = tiny_model("float64", num_layers=1)
    drafter = DraftModel(small.params, small.config, chain(2))
    engine = Replicas(model, 2, speculate=drafter, **(SIZES | {"buckets": (Bucket(3, 13, 3), Bucket(3, 0, 0, 3))}))
    for i in (0, 2, 5):  # which need one program; the third has two samples
        engine.submit(*JOBS[i])
    some = [wanted[i] for i in (0, 2, 3, 6)]
    ends = [end for _, end in sorted(finish(engine).items())]
    same([replace(ends[0], seed=some[0].seed), *ends[1:]], some)
    for place, replica in enumerate(engine._all):
        assert {array.device for array in jax.tree.leaves(replica.engine._device._drafter)} == {jax.devices()[place]}
    assert engine.metrics()["draft_segments"] > 0
    engine.close()


@pytest.mark.parametrize(
    ("devices", "options", "why"),
    [
        (9, {}, "9 replicas need 9 devices, and there are 8: give 1 to 8"),
        (0, {}, "give 1 to 8"),
        ([], {}, "at least one device, and each but once"),
        (jax.devices()[:1] * 2, {}, "at least one device, and each but once"),
        (2, {"trace": []}, "a trace records one engine"),
        (2, {"max_slots": 0}, "max_slots"),
    ],
)
def test_bad_input(model, devices, options, why):
    with pytest.raises(ConfigError, match=why):
        Replicas(model, devices, **options)
