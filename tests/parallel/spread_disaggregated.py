"""Prefill and decode apart: each request's tokens are those of one engine, on two devices, in two processes, and when
one of them goes."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest

from jllm.distributed.channel import Channel, encoded
from jllm.distributed.disaggregated import Disaggregated
from jllm.distributed.handover import JOINING, DecodeEngine, PrefillEngine
from jllm.distributed.remote import RemotePrefill, serve_prefills
from jllm.engine.moved import DevicePages, Handover
from jllm.engine.request import SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.engine.sequence import Sequence
from jllm.errors import ConfigError, EngineClosed, RemoteError, RequestError
from jllm.guides.guide import Guide
from jllm.programs.sizes import Limits
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from tests.ascii import TOKENIZER
from tests.parallel.meshes import on_mesh
from tests.parallel.spread_replicas import (
    JOBS,
    PREFIX,
    SIZES,
    after,
    alone,
    as_their_versions,
    broken,
    finish,
    in_time,
    rest,
    same,
    until,
)
from tests.tiny import one_size, tiny_model

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

jax.config.update("jax_enable_x64", True)
SEEDED = [(prompt, replace(params, seed=i)) for i, (prompt, params) in enumerate(JOBS)]
FEW = [SEEDED[i] for i in (0, 2, 5)]  # which need one program


@pytest.fixture(scope="module")
def model():
    return tiny_model("float64")


@pytest.fixture(scope="module")
def wanted(model):
    return alone(model, SEEDED)


def samples(ends):
    return [ends[key] for key in sorted(ends)]


def apart(model, **options):
    """On the same two devices in all tests, so that programs are compiled for these once."""
    return Disaggregated(model, jax.devices()[2:4], **(SIZES | options))


def test_both_engines_take_other_weights_and_what_is_between_them_is_computed_again(model):
    other, greedy = tiny_model("float64", seed=1), SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True)
    engine, models, prompts, ends = apart(model), {0: model}, {}, {}
    for turn in range(6):
        for prompt in (PREFIX, (*PREFIX, 5 + turn), (7 + turn,)):
            prompts[engine.submit(prompt, greedy)] = prompt
        ends |= after(engine, 1 + turn)
        new = (other, model)[turn % 2]
        models[engine.update(new.params)] = new
        with pytest.raises(ConfigError, match='running="finish" is not there'):
            engine.update(new.params, running="finish")
    versions = as_their_versions(ends | rest(engine), prompts, models)
    assert {0, 6} <= versions
    assert engine.version == 6
    engine.close()


@pytest.mark.parametrize(
    ("options", "prefill"),
    [
        ({}, {}),
        ({"max_slots": 1, "num_pages": 12, "prefix_cache": False, "buckets": (Bucket(1, 13, 1),)}, {}),
        ({"kv_cache": "int8-g8"}, {"max_slots": 2, "max_step_tokens": 40, "buckets": (Bucket(2, 38, 2),)}),
        ({"speculate": "ngram", "drafts": 2}, {}),
    ],
    ids=["same", "little room", "int8 and own sizes", "drafts"],
)
def test_tokens_are_those_of_one_engine(model, wanted, options, prefill):
    jobs = SEEDED if options.keys().isdisjoint(("kv_cache", "speculate")) else FEW
    wanted = wanted if jobs is SEEDED else alone(model, jobs, kv_cache=options.get("kv_cache"))
    engine = apart(model, prefill=prefill, **options)
    first, second = (replica.engine for replica in engine._all)
    engine.compile_ahead([params for _, params in jobs])
    for prompt, params in jobs:
        engine.submit(prompt, params)
    same(samples(finish(engine)), wanted)
    assert not engine.has_work
    for place, one in ((2, first), (3, second)):
        there = {array.device for array in jax.tree.leaves((one._device._state, one._device._params))}
        assert there == {jax.devices()[place]}
        assert one.metrics()["pages_used"] == 0
        assert one.metrics()["output_tokens"] > 0
    assert second.metrics()["prefix_forked_tokens"] > 0, "what was computed elsewhere"
    assert engine._moved == {}
    assert engine._reserved == 0
    assert [replica.load.tokens for replica in engine._all] == [0, 0]
    found = engine.metrics()
    assert found["requests"] == found["requests_finished"] == len(jobs)
    assert found["output_tokens"] == found["inter_token_s"]["count"] + found["first_token_s"]["count"]
    engine.close()


def test_what_moves_is_not_computed_again_and_decoding_does_not_wait_for_it(model):
    sizes = {"max_slots": 4, "page_size": 8, "num_pages": 60, "max_step_tokens": 44}
    prefill = {"max_slots": 2, "max_step_tokens": 42, "buckets": (Bucket(2, 40, 2),)}
    engine = Disaggregated(model, prefill=prefill, **sizes)
    first, second = (replica.engine for replica in engine._all)
    buckets = second.sizes.buckets
    assert {bucket.tokens for bucket in buckets} == {0, 16, 40}
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    for start in range(3, 7):
        engine.submit(list(range(start, start + 40)), params)
    for _ in engine.run():
        pass
    assert first.metrics()["prefill_tokens"] == 4 * 40
    assert second.metrics()["prefill_tokens"] < 4 * 8, "no prompt token"
    assert second.metrics()["prefix_forked_tokens"] == 4 * 40
    engine.close()


def test_pages_are_on_their_way_before_the_step_after_that_of_their_prompt(model):
    engine = PrefillEngine(model, to=jax.devices()[1], **SIZES)
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    engine.submit(list(range(3, 30)), params)
    engine.submit(list(range(3, 20)), replace(params, presence_penalty=0.5))  # stays where its prompt is
    steps, dispatch = [], engine._loop.device.run
    engine._loop.device.run = lambda *given: (steps.append({**engine.leaving.sent}), dispatch(*given))[1]
    moves, sent = [], {}
    while not moves:
        moves = [one for one in engine.step() if isinstance(one, Handover)]
        sent = sent or {**engine.leaving.sent}
    assert len(steps) > 1, "a step was dispatched behind that of the prompts"
    assert (len(sent), [one.id for one in moves]) == (1, list(sent))
    assert steps[-1] == sent, "and pages before it"
    assert moves[0].kv is sent[moves[0].id]
    assert moves[0].kv.arrays[0].devices() == {jax.devices()[1]}
    assert not engine.leaving.sent
    engine.close()


def test_pages_of_a_request_that_stays_are_not_kept_where_it_does_not_go(model):
    engine = PrefillEngine(model, to=jax.devices()[1], **SIZES)
    engine.leaving.room = lambda samples: False
    engine.submit(list(range(3, 30)), SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True))
    sent = [bool(engine.leaving.sent) for _ in iter(lambda: engine.has_work and engine.step() is not None, False)]
    assert sent.count(True) == 1, "until its first token is read, which says that it stays"
    engine.close()


@pytest.mark.parametrize(
    ("n", "prompt", "options", "likely", "times"),
    [
        (3, 27, {}, True, 1),  # the pages of all samples
        (1, 27, {}, False, 0),
        (1, 5, {"kv_cache": "kivi2-g8", "page_size": 8}, True, 0),  # no whole block
    ],
    ids=["samples", "no room", "nothing to send"],
)
def test_pages_are_sent_once_and_where_they_are_wanted(model, monkeypatch, n, prompt, options, likely, times):
    engine = PrefillEngine(model, to=jax.devices()[1], **(SIZES | options))
    engine.leaving.likely = lambda samples: likely
    engine.leaving.room = lambda samples: likely
    packed, pack = [], engine._device.pack
    monkeypatch.setattr(engine._device, "pack", lambda *given: (packed.append(given), pack(*given))[1])
    engine.submit(list(range(3, 3 + prompt)), SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True, n=n))
    moves = []
    while engine.has_work:
        moves += [one for one in engine.step() if isinstance(one, Handover)]
    assert [move.kv is None for move in moves] == ([not times] if likely else [])
    assert len(packed) == times
    engine.close()


def test_nothing_is_sent_to_a_device_that_has_failed(model):
    engine = apart(model)
    first, second = (replica.engine for replica in engine._all)
    assert first.leaving.likely(1)
    assert not first.leaving.likely(second.slots + 1)
    assert engine._reserved == 0, "who asks takes no room"
    second.close()
    assert not first.leaving.likely(1)
    engine.close()


def test_who_runs_does_not_wait_for_pages_that_are_on_their_way():
    class Array:
        here = False

        def is_ready(self):
            return self.here

    limits = Limits(
        max_slots=3, max_step_tokens=32, max_prompt_tokens=29, max_chunks=3, page_size=8, num_pages=9, max_deltas=9
    )
    scheduler, array = Scheduler(limits, most_joining=JOINING), Array()
    runs, comes = (Sequence(i, 0, (5,) * 9, SamplingParams(), 0, 30) for i in range(2))
    scheduler.add(runs)
    comes.output.append(7)
    comes.snapshot = DevicePages(9, (array,))
    first = scheduler.schedule()
    scheduler.add(comes)
    second = scheduler.schedule()
    assert [chunk.seq for chunk in first.chunks] == [runs]
    assert (second.decodes, second.chunks) == ((runs,), ())
    array.here = True
    scheduler.on_tokens(runs, [7])
    scheduler.step_read(0)
    third = scheduler.schedule()
    assert (third.decodes, third.loads) == ((runs,), (comes,))
    assert [(chunk.start, chunk.tokens) for chunk in third.chunks] == [(9, (7,))]
    assert third.size == (1, 1, 1)
    alone = Scheduler(limits, most_joining=JOINING)
    alone.add(Sequence(2, 0, (5,) * 9, SamplingParams(), 0, 30, output=[7], snapshot=DevicePages(9, (Array(),))))
    assert alone.schedule().chunks, "with nothing else to do the device waits"


def test_a_request_that_is_between_the_engines_can_be_aborted_and_forked(model):
    engine = apart(model)
    long = SamplingParams(temperature=0.8, seed=1, max_new_tokens=60, ignore_eos=True)
    names = [engine.submit([5, 6, 7, i], long) for i in range(3)]
    ends, twins, streamed = {}, {}, {}
    for event in engine.run():
        streamed.setdefault((event.id, event.sample), []).extend(event.token_ids)
        if event.completion is not None:
            ends[event.id, event.sample] = event.completion
        if event.id == names[0] and not twins:
            with suppress(RequestError):  # it is on its way from the one to the other
                twins[names[0]] = engine.fork(names[0])
        if event.id == names[1] and len(streamed[names[1], 0]) == 1 and (names[1], 0) not in ends:
            engine.abort(names[1])
    assert ends[names[1], 0].finish_reason == "abort"
    assert len(ends[names[1], 0].token_ids) < 60
    for name in (names[0], names[2]):
        assert len(ends[name, 0].token_ids) == 60
    fork = ends[names[0], twins[names[0]]]
    common = os.path.commonprefix([fork.token_ids, ends[names[0], 0].token_ids])
    assert 1 <= len(common) < 60
    with pytest.raises(RequestError, match="has ended or was never submitted"):
        engine.abort(names[1])
    engine.close()


def test_a_snapshot_goes_on_where_requests_decode(model):
    engine = apart(model)
    params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=30, ignore_eos=True)
    name = engine.submit([5, 6, 7], params)
    value, rest = None, []
    for event in engine.run():
        if value is None and engine._requests[name][1] is engine._decode and len(event.token_ids):
            value = engine.snapshot(name)
        end = event.completion or None
    tokens = [int(token) for token in value.tokens]
    assert tokens[3:] == list(end.token_ids[: len(tokens) - 3])
    again = engine.resume(value, replace(params, max_new_tokens=33 - len(tokens)))
    rest = [event.completion for event in engine.run() if event.id == again and event.completion]
    assert rest[0].token_ids == end.token_ids[len(tokens) - 3 :]
    engine.close()


@hypothesis.settings(max_examples=4)
@hypothesis.given(which=st.integers(0, 1), step=st.integers(0, 10), order=st.permutations(range(len(JOBS))))
def test_what_ran_on_a_device_that_failed_begins_again_on_the_other(model, wanted, which, step, order):
    engine = apart(model)
    failing = engine._all[which].engine
    advance, left = failing._loop.advance, [step]

    def fails():
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("this device is gone")
        advance()

    failing._loop.advance = fails
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = {engine.submit(*SEEDED[i]): i for i in order}
        ends = finish(engine)
        later = engine.submit(*SEEDED[0])
        again = finish(engine)[later, 0]
    by_job = {(names[name], sample): completion for (name, sample), completion in ends.items()}
    same(samples(by_job), wanted)
    assert again.token_ids == by_job[0, 0].token_ids
    assert sum("begins again elsewhere" in str(each.message) for each in told) == (left[0] < 0)
    engine.close()


def test_a_fork_that_comes_to_a_device_that_has_failed_ends_with_an_error(model):
    engine = apart(model)
    engine._prefill.engine.leaving.room = lambda samples: False
    params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=60, ignore_eos=True)
    name = engine.submit([5, 6, 7], params)
    while not any(event.token_ids for event in engine.step()):
        pass
    fork = engine.fork(name)
    engine._decode.failed = True  # just now
    room = iter([True])
    engine._prefill.engine.leaving.room = lambda samples: next(room, False)
    engine._decode.engine.close()
    ends = until(engine, (name, 0))
    assert not engine.has_work
    assert ends[name, fork].finish_reason == "error"
    assert ends[name, 0].token_ids == alone(model, [((5, 6, 7), params)])[0].token_ids
    assert [replica.load.tokens for replica in engine._all] == [0, 0]
    engine.close()


# What goes along, and what fails on the way


GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
LITTLE = {"max_slots": 1, "num_pages": 12, "prefix_cache": False, "buckets": (Bucket(1, 13, 1),)}


def hand_overs(engine, count):
    """The next requests that an engine lets go."""
    found = []

    def step():
        while len(found) < count:
            found.extend(one for one in engine.step() if isinstance(one, Handover))

    in_time(step)
    return found


def rest_of(engine, given):
    """The end of a request of one sample that an engine goes on with."""
    name = engine.take_in(given)
    return rest(engine)[name, 0]


@contextmanager
def served(engine):
    """The address of an engine that computes prompts in a thread of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve_prefills, args=(engine, listener), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)  # what it warns of is of this test


@pytest.fixture(params=["device", "process"])
def pair(request, model):
    """What lets requests go, on another device or over a socket; the engine that goes on with them; and the one that
    computes their prompts."""
    engine = apart(model)
    first, second = (replica.engine for replica in engine._all)
    if request.param == "device":
        yield first, second, first
        engine.close()
        return
    first.leaving.room, first.leaving.to = lambda samples: True, None
    with served(first) as address:
        prefill = RemotePrefill(address)
        yield prefill, second, first
        prefill.close()


def test_a_fork_gets_an_index_that_no_sample_of_its_request_ever_had(model, pair):
    """Two of three samples end with their first token, before the request goes on elsewhere."""
    first, second, _ = pair
    params = SamplingParams(temperature=1.2, max_new_tokens=9, n=3, ignore_eos=True)
    for seed in range(20):
        one = replace(params, seed=seed, max_new_tokens=1)
        goes_on, *stop = (end.token_ids[0] for end in alone(model, [((5, 6, 7), one)]))
        if goes_on not in stop:
            break
    first.submit((5, 6, 7), replace(params, seed=seed, stop_token_ids=tuple(stop)))
    (given,) = hand_overs(first, 1)
    assert ([begun.sample for begun in given.samples], given.started) == ([0], 3)
    assert second.fork(second.take_in(given)) == 3


def test_a_guide_goes_on_where_it_began(model, pair):
    first, second, computing = pair
    for engine in (second, computing):
        engine._loop.guides._tokenizer = TOKENIZER
    guide = Guide.choice(["a wolf and a wolf", "a girl and a girl"])
    prompt, params = tuple(TOKENIZER.encode("it was")), SamplingParams(seed=3, max_new_tokens=30, guide=guide)
    text = replace(model, tokenizer=TOKENIZER)
    (wanted,) = alone(text, [(prompt, params)])
    assert TOKENIZER.decode(wanted.token_ids[:-1]) in guide.text
    first.submit(prompt, params)
    assert rest_of(second, *hand_overs(first, 1)).token_ids == wanted.token_ids
    if first is computing:  # and a snapshot's begins before the end of what is its prompt
        name, computing.leaving.room = first.submit(prompt, params), lambda samples: False
        while not any(len(event.token_ids) and event.id == name for event in first.step()):
            pass
        first.step()
        value, computing.leaving.room = first.snapshot(name), lambda samples: True
        first.abort(name)
        assert value.guided == len(prompt) < len(value.tokens)
        more = len(value.tokens) - len(prompt)
        first.resume(value, params)
        assert rest_of(second, *hand_overs(first, 1)).token_ids == wanted.token_ids[more:]


def test_times_and_urgency_go_along(pair):
    first, second, _ = pair
    for _ in range(2):
        first.submit((5, 6, 7), GREEDY)
    late, given = hand_overs(first, 2)
    name = second.take_in(late, priority=-3, deadline=0.0)
    assert second._ledger.find(name, 0).priority == -3
    end = rest(second)[name, 0]
    assert (end.finish_reason, end.token_ids) == ("deadline", late.samples[0].output)
    (begun,) = given.samples
    begun = begun._replace(submitted=begun.submitted - 1000.0, first_token=7.0)
    end = rest_of(second, given._replace(samples=(begun,)))
    assert (end.timings.first_token, len(end.token_ids)) == (7.0, 20)
    assert end.timings.total > 1000.0


def test_what_is_asked_of_the_one_engine_is_asked_of_the_other(model, pair):
    first, second, computing = pair
    engine, asked = apart(model), []
    if first is not computing:
        engine = Disaggregated.over(first, second)
    else:
        computing, second = (replica.engine for replica in engine._all)
    for one, method in ((computing, "submit"), (second, "take_in")):
        call = getattr(one, method)
        setattr(one, method, lambda *args, to=call, **more: asked.append(more) or to(*args, **more))
    name = engine.submit((5, 6, 7), GREEDY, priority=-2, deadline=900.0)
    request = engine._requests[name][0]
    request.submitted -= 500.0
    end = rest(engine)[name, 0]
    assert [more["priority"] for more in asked] == [-2, -2]
    assert 0 < asked[1]["deadline"] <= 400.0, "what is left of it"
    assert end.timings.total > 500.0
    assert 500.0 < end.timings.first_token < end.timings.total
    engine.close()


def test_no_more_first_tokens_of_one_step_go_on_than_there_is_room_for(model):
    prefill = {name: SIZES[name] for name in ("max_slots", "num_pages", "buckets")}
    engine = Disaggregated(model, jax.devices()[2:4], prefill=prefill, **(SIZES | LITTLE))
    first, second = (replica.engine for replica in engine._all)
    most, take_in = [], second.take_in

    def count(*args, **more):
        name = take_in(*args, **more)
        most.append(len(second._scheduler.waiting) + len(second._scheduler.running))
        return name

    second.take_in = count
    with first._turns.turn():  # so that all three are there before its first step
        names = [engine.submit((5, 6, token), GREEDY) for token in (7, 8, 9)]
    ends = in_time(lambda: finish(engine))
    assert {name for name, _ in ends} == set(names)
    assert most == [1] * len(most) != []
    engine.close()


@pytest.mark.parametrize("what", ["take in", "second sample", "abort"])
def test_what_the_decoding_engine_cannot_do_ends_that_request_alone(model, what):
    jobs = [((5, 6, 7), replace(GREEDY, n=2, max_new_tokens=60)), ((8, 9), GREEDY)]
    engine = apart(model)
    second = engine._decode.engine
    take_in, add, step = second.take_in, second._loop.gate.add, second.step
    second.step = lambda: (time.sleep(0.02), step())[1]  # so that it runs when it is aborted
    bad, good = (engine.submit(*job) for job in jobs)
    if what == "take in":
        second.take_in = lambda given, **more: broken() if len(given.samples) == 2 else take_in(given, **more)
    elif what == "second sample":
        second._loop.gate.add = lambda seq: broken() if seq.sample == 1 else add(seq)
    else:
        second.abort = broken
    events = []

    def run():
        for event in engine.run():
            events.append(event)
            there = event.id == bad and engine._requests.get(bad, (None, None))[1] is engine._decode
            if what == "abort" and there and not any(e.completion for e in events if e.id == bad):
                engine.abort(bad)

    with pytest.warns(RuntimeWarning, match=rf"request {bad} ends: .*ZeroDivisionError: this is broken"):
        in_time(run)
    ends = {(event.id, event.sample): event.completion for event in events if event.completion}
    assert [ends[bad, sample].finish_reason for sample in (0, 1)] == ["error", "error"]
    assert ends[good, 0].token_ids == alone(model, jobs[1:])[0].token_ids
    assert (engine._moved, engine._reserved) == ({}, 0)
    assert [replica.load.tokens for replica in engine._all] == [0, 0]
    if what != "abort":  # whose engine has it still
        assert second.metrics()["pages_used"] == 0
    engine.close()


def test_a_copy_of_pages_that_failed_is_computed_where_it_should_have_come(model, monkeypatch):
    """The device that it was for goes on, though the one that sent it has failed."""
    engine = apart(model)
    first, second = (replica.engine for replica in engine._all)

    def fails(pages, snapshot):
        raise jax.errors.JaxRuntimeError("INTERNAL: what the copy comes from has failed")

    monkeypatch.setattr(second._device, "load", fails)
    first.submit(list(range(3, 30)), GREEDY)
    end = rest_of(second, *hand_overs(first, 1))
    assert end.token_ids == alone(model, [(list(range(3, 30)), GREEDY)])[0].token_ids
    engine.close()


def test_a_close_while_a_request_is_between_the_engines_ends_it(model):
    engine = apart(model)
    name, end = engine.submit((5, 6, 7), GREEDY), time.monotonic() + 60
    while not engine._reserved or engine._prefill.engine.has_work:  # nobody steps: it stays there
        assert time.monotonic() < end
        time.sleep(0.01)
    in_time(engine.close)
    ends = [event for event in engine.last_events if event.completion]
    assert [(event.id, event.completion.finish_reason) for event in ends] == [(name, "abort")]


def test_wrong_devices_and_options(model):
    for devices in (jax.devices()[:1], jax.devices()[:3]):
        with pytest.raises(ConfigError, match=f"take two devices, not {len(devices)}"):
            Disaggregated(model, devices, **SIZES)
    with pytest.raises(ConfigError, match="give page_size for both"):
        Disaggregated(model, prefill={"page_size": 16}, **SIZES)
    with pytest.raises(ConfigError, match="need at least one device, and each but once"):
        Disaggregated(model, [jax.devices()[0]] * 2, **SIZES)
    engine = Disaggregated(model, prefill={"num_pages": 10}, **SIZES)
    with pytest.raises(RequestError, match="the page pool has 10"):
        engine.submit([5] * 100, SamplingParams(max_new_tokens=100))
    engine.close()


# Two processes

SERVER = """
    import socket
    import jax
    jax.config.update("jax_enable_x64", True)
    from jllm.distributed.handover import PrefillEngine
    from jllm.distributed.remote import serve_prefills
    from tests.tiny import one_size, tiny_model

    engine = PrefillEngine(tiny_model("float64"), num_pages=30, **one_size(2, 16))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    serve_prefills(engine, listener)
"""


@pytest.fixture
def prefill_thread(model):
    """The address of an engine whose pages have another size."""
    with served(PrefillEngine(model, num_pages=30, **one_size(2, 16))) as address:
        yield address


@pytest.fixture
def prefill_process():
    """Starts processes that compute prompts; each gives its address, and itself."""
    started = []

    def start():
        command = [sys.executable, "-c", textwrap.dedent(SERVER)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return f"127.0.0.1:{int(started[-1].stdout.readline())}", started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_another_process_computes_prompts_for_pages_of_another_size(model, wanted, prefill_process):
    address, process = prefill_process()
    for turn in range(2):
        engine = Disaggregated.over(RemotePrefill(address), DecodeEngine(model, **SIZES))
        for prompt, params in SEEDED:
            engine.submit(prompt, params)
        same(samples(finish(engine)), wanted)
        assert engine._decode.engine.metrics()["prefix_forked_tokens"] >= 6 + 5 + 25
        if turn == 0:
            engine.close()
    process.send_signal(signal.SIGKILL)
    process.wait()
    for prompt, params in SEEDED:
        engine.submit(prompt, params)
    with pytest.warns(RuntimeWarning, match=f"{address.split(':')[1]}.*begins again elsewhere") as told:
        ends = finish(engine)
    same(samples(ends), wanted)
    assert len(told) == 1
    engine.close()


def test_a_process_that_goes_half_way_or_does_not_fit(model, wanted, prefill_process):
    address, process = prefill_process()
    with served(PrefillEngine(tiny_model("float64", seed=1), **SIZES)) as place:
        other = RemotePrefill(place)
        with pytest.raises(RemoteError, match="has another model than this engine"):
            Disaggregated.over(other, DecodeEngine(model, **SIZES))
        other.close()
    with pytest.raises(RemoteError, match="an address must be HOST:PORT"):
        RemotePrefill("nowhere")
    with pytest.raises(RemoteError, match="nothing listens at 127.0.0.1:1"):
        RemotePrefill("127.0.0.1:1")
    engine = Disaggregated.over(RemotePrefill(address), DecodeEngine(model, **SIZES))
    names = [engine.submit(prompt, params) for prompt, params in SEEDED]
    time.sleep(0.5)  # wherever it is then
    process.send_signal(signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match="begins again elsewhere"):
        ends = finish(engine)
    assert sorted({name for name, _ in ends}) == names
    same(samples(ends), wanted)
    engine.close()


@pytest.mark.filterwarnings("ignore:.*its .* requests end")  # of who computes the prompts
def test_when_the_engine_that_decodes_fails_all_ends_with_an_error(model, prefill_thread):
    engine = Disaggregated.over(RemotePrefill(prefill_thread), DecodeEngine(model, **SIZES))
    place, placed, submitted = engine._place, [], threading.Event()

    def count(request):
        placed.append(request.id)
        assert len(placed) <= 3 * len(SEEDED), "requests go round and round"
        return place(request)

    def fails():
        assert submitted.wait(60)  # once it has failed, nothing more can be submitted
        raise RuntimeError("this device is gone")

    engine._place, engine._decode.engine._loop.advance = count, fails
    names = [engine.submit(prompt, params) for prompt, params in SEEDED]
    submitted.set()
    found = []
    with pytest.raises(RuntimeError, match="this device is gone"):
        found += engine.run()
    ends = [event for event in (*found, *engine.last_events) if event.completion]
    assert {event.id for event in ends} == set(names)
    assert {event.completion.finish_reason for event in engine.last_events if event.completion} == {"error"}
    with pytest.raises(EngineClosed):
        engine.submit([5], SamplingParams())


def test_a_prompt_of_text(model, prefill_thread):
    params = SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    text = replace(model, tokenizer=TOKENIZER)
    ids = TOKENIZER.encode("to be")
    engine = Disaggregated.over(RemotePrefill(prefill_thread), DecodeEngine(text, **SIZES))
    assert engine.check("to be", params) == ids
    engine.submit("to be", params)
    (end,) = finish(engine).values()
    (wanted,) = alone(text, [(ids, params)])
    assert (end.token_ids, end.text) == (wanted.token_ids, wanted.text)
    engine.close()


@pytest.fixture
def other_end():
    """A RemotePrefill, and the channel of the process that it takes this one for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        met = []

        def greet():
            met.append(Channel(listener.accept()[0]))
            limits = Limits(1, 9, 8, 1, 8, 9, 9)
            met[0].send({"limits": asdict(limits), "max_pages": 9, "model": "", "formats": []})

        greeting = threading.Thread(target=greet)
        greeting.start()
        prefill = RemotePrefill(f"127.0.0.1:{listener.getsockname()[1]}")
        greeting.join()
        yield prefill, met[0]
        prefill.close()
        met[0].close()


def test_prompts_and_what_comes_back_do_not_wait_for_each_other(other_end):
    prefill, channel = other_end
    count, prompt, heard = 16, [9_000_000] * 200_000, []  # more than sockets hold

    def submit():
        for _ in range(count):
            prefill.submit(prompt, SamplingParams(seed=1))

    def answer():  # says all before it reads anything
        for i in range(count):
            channel.send({"refused": i, "why": "9" * 2_000_000})
        for _ in range(count):
            heard.append(channel.receive()[0]["id"])

    first, other = (threading.Thread(target=target, daemon=True) for target in (submit, answer))
    first.start()
    first.join(60)
    assert not first.is_alive()
    other.start()
    left = []
    while len(left) < count:
        left += prefill.step()
    other.join(60)
    assert [given.id for given in left] == heard == list(range(count))
    assert not prefill.has_work


def test_closing_wakes_who_sends_and_a_host_that_vanishes_is_noticed(other_end):
    prefill, channel = other_end
    for end in (prefill._channel, channel):
        assert end._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert end._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 20
    for _ in range(16):
        prefill.submit([9_000_000] * 200_000, SamplingParams())
    sender = prefill._sender
    assert sender.is_alive()
    prefill.close()
    sender.join(60)
    assert not sender.is_alive()


def test_what_fails_while_it_is_sent_is_told_by_the_next_step(other_end):
    prefill, _ = other_end
    prefill._channel.send = broken
    prefill.submit([5, 6], SamplingParams())
    with pytest.raises(RemoteError, match="this is broken") as error:
        in_time(lambda: [prefill.step() for _ in iter(int, 1)])
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineClosed):
        prefill.submit([5], SamplingParams())


def test_numbers_of_numpy_are_sent_and_what_cannot_be_is_told_at_once(other_end):
    prefill, channel = other_end
    params = SamplingParams(temperature=np.float32(0.5), seed=np.int64(3), stop_token_ids=(np.int32(4),))
    prefill.submit([np.int64(5), 6], params, priority=np.int8(-1))
    message, _ = channel.receive()
    assert message["prompt"] == [5, 6]
    assert message["sampling"] == {"temperature": 0.5, "seed": 3, "stop_token_ids": [4]}
    with pytest.raises(TypeError, match="cannot be sent"):
        prefill.submit([object()], params)
    assert len(prefill._known) == 1


def test_a_process_that_computes_prompts_outlives_bad_requests_and_bad_clients(model, wanted):
    """What it cannot do is done where it is decoded, and who says nonsense is let go."""
    computing = PrefillEngine(model, **SIZES)
    with served(computing) as address:
        bad = RemotePrefill(address)
        bad._outbox.put(encoded({"id": 0, "prompt": [5]}))
        with pytest.raises(RemoteError, match="has gone"):
            in_time(lambda: [bad.step() for _ in iter(int, 1)])
        engine = Disaggregated.over(RemotePrefill(address), DecodeEngine(model, **SIZES))
        computing.submit = broken

        def submit_and_finish():  # the other thread may warn as soon as a request is submitted
            name = engine.submit(*SEEDED[0])
            return finish(engine)[name, 0]

        with pytest.warns(UserWarning, match="a request is refused .ZeroDivisionError: this is broken"):
            end = in_time(submit_and_finish)
        same([end], wanted[:1])
        engine.close()


@pytest.mark.parametrize("devices", [(2, 1), (4, 2)])
def test_prompts_of_a_mesh_go_on_where_there_are_fewer_devices(model, devices):
    coded = replace(model, params=quantize(model.params, "w8a16"))
    here, there = (on_mesh(coded, n) if n > 1 else coded for n in devices)
    prompt, params = list(range(3, 40)), SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    (wanted,) = (c.token_ids for c in alone(coded, [(prompt, params)]))
    with served(PrefillEngine(here, **SIZES)) as address:
        engine = Disaggregated.over(RemotePrefill(address), DecodeEngine(there, **SIZES))
        engine.submit(prompt, params)
        found = [event.completion.token_ids for event in engine.run() if event.completion]
        assert (found, engine.metrics()["prefill_tokens"]) == ([wanted], 1)  # of the last one, for its logits
        engine.close()
