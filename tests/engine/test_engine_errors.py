"""Bad requests and options, devices that fail, interrupts, and logits that are no numbers."""

import inspect
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.api import as_prompts
from jllm.engine import device as device_module
from jllm.engine.engine import Engine
from jllm.engine.kv_policy import OnDemand
from jllm.engine.request import SamplingParams
from jllm.engine.samples import PendingEvent
from jllm.errors import ConfigError, EngineClosed, RequestError
from jllm.step.buckets import Bucket
from pallas_kernels.formats.kv_formats import KVFormat
from tests.tiny import greedy, serve, tiny_model

OPTIONS = {"max_slots": 4, "page_size": 8, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 4),)}
PROMPTS = [[5, 6, 7], list(range(30, 60)), [9]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_layers=1)


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([], greedy(), "empty"),
        ([97], greedy(), r"token id 97 is not in \[0, 97\)"),
        ([-1], greedy(), "token id -1"),
        ("text", greedy(), "needs a tokenizer"),
        ([3] * 128, greedy(), "128 tokens is too long: the model's context leaves room for 127"),
        ([3], greedy(stop=("x",)), "stop strings need a tokenizer"),
        ([3], greedy(stop_token_ids=(99,)), "stop_token_ids: token id 99"),
        ([3], greedy(logit_bias={99: 1.0}), "logit_bias: token id 99"),
        (jnp.ones(3), greedy(), r"integers in one row, not an array of float32 and shape \[3\]"),
        (np.ones((1, 3), int), greedy(), r"integers in one row, not an array of int64 and shape \[1, 3\]"),
        (jnp.asarray([5, 97]), greedy(), r"token id 97 is not in \[0, 97\)"),
    ],
)
def test_bad_requests_are_named_and_leave_the_engine_alone(model, prompt, params, says):
    engine = Engine(model, **OPTIONS)
    with pytest.raises(RequestError, match=says):
        engine.submit(prompt, params)
    assert not engine.has_work


@pytest.mark.parametrize("call", ["submit", "fork"])
def test_what_could_not_be_added_as_a_whole_is_not_there(model, monkeypatch, call):
    """And what runs goes on, since nobody would know whose the rest is."""
    engine = Engine(model, **OPTIONS)
    name = engine.submit(PROMPTS[0], greedy(9))
    engine.step()
    seqs, add = [], engine._loop.gate.add

    def fails(seq):
        seqs.append(seq)
        if len(seqs) == (2 if call == "submit" else 1):
            raise ZeroDivisionError
        add(seq)

    with monkeypatch.context() as patch:
        patch.setattr(engine._loop.gate, "add", fails)
        with pytest.raises(ZeroDivisionError):
            engine.submit(PROMPTS[2], greedy(9, n=3)) if call == "submit" else engine.fork(name)
    ends = [(e.id, e.sample, e.completion.token_ids) for e in engine.run() if e.completion]
    assert ends == [(name, 0, serve(model, PROMPTS[:1], [greedy(9)], **OPTIONS)[0].token_ids)]
    assert engine.metrics()["pages_used"] == engine.metrics()["waiting"] == 0


def test_an_array_of_token_ids_is_a_prompt(model):
    engine = Engine(model, **OPTIONS)
    for kind in (jnp.asarray, np.asarray, lambda ids: np.asarray(ids, np.uint8)):
        assert engine.check(kind(PROMPTS[0])) == PROMPTS[0]
        assert as_prompts(kind(PROMPTS[0]))[0].shape == (3,)
        with pytest.raises(RequestError, match=r"integers in one row, not an array of u?int\d+ and shape \[\]"):
            list(map(engine.check, as_prompts(kind(5))))
        assert [engine.check(row) for row in as_prompts(kind([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    assert all(type(token) is int for token in engine.check(jnp.asarray(PROMPTS[0])))


@pytest.mark.parametrize("policy", ["paged", "reserve", "extent"])
def test_what_the_pool_cannot_hold_is_refused_and_not_cut(model, policy):
    engine = Engine(model, **{**OPTIONS, "num_pages": 4, "kv_policy": policy})
    says = (
        "30 prompt tokens and 4 new ones need 5 pages of 8, the page pool has 4: shorten the request or raise num_pages"
    )
    with pytest.raises(RequestError, match=says):
        engine.submit([3] * 30, greedy(4))
    assert not engine.has_work
    done = serve(model, [[3] * 30], [greedy(3)], **{**OPTIONS, "num_pages": 4, "kv_policy": policy})[
        0
    ]  # the last token needs no KV
    assert len(done.token_ids) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"page_size": 7}, "page_size must be one of 8, 16, 32, 64, 128, not 7"),
        ({"max_slots": 0}, "max_slots must be an integer >= 1, not 0"),
        ({"num_pages": 10**30}, "num_pages must be at most 2147483647, not 1000000"),
        ({"max_slots": 8, "max_step_tokens": 4}, "max_step_tokens must be at least max_slots = 8"),
        ({"kv_cache": "int3"}, "int3"),
        ({"kv_cache": "int8-g32"}, "32"),  # a group over D = 16
        ({"kv_cache": 5}, "kv_cache must be the name of a format, a KVFormat or two, not 5"),
        ({"kv_cache": ("int8-g8", "int8-g8")}, "kv_cache must be the name of a format, a KVFormat or two, not"),
        ({"kv_cache": KVFormat("int8", 24)}, "KV format int8-g24 does not fit the head dim"),
        ({"backend": "foo"}, "backend must be one of xla, mosaic, triton, deterministic, not 'foo'"),
        ({"max_slot": 4}, "unknown engine option 'max_slot'; known are max_slots"),
        ({"kv_policy": "pooled"}, "kv_policy must be one of paged, reserve, extent, or an object .*, not 'pooled'"),
        ({"kv_policy": OnDemand}, "kv_policy must be one of paged, reserve, extent, or an object"),
        ({"length_predictor": "quantile"}, r"length_predictor.* is gone.* give kv_policy=Predicted\(pred"),
        ({"admission_quantile": 0.9}, r"admission_quantile.* is gone.* give kv_policy=Predicted\(predictor, quantile="),
        ({"watermark": 0.1}, r"'watermark' is gone: it belongs to a KV policy.* give kv_policy=OnDemand\(watermark="),
        ({"extent_overflow": "move"}, r"extent_overflow.* is gone.* give kv_policy=Extent\(overflow="),
        ({"num_pages": 3}, r"num_pages must be at least max_slots = 4 \(one page a slot\), not 3"),
        ({"buckets": ()}, "buckets must have one that holds 4 decode rows"),
        ({"buckets": (Bucket(4, 0, 0), Bucket(1, 16, 4))}, "buckets must have one that holds 4 decode rows"),
        ({"buckets": (Bucket(4, 0, 0),)}, r"at least one: add Bucket\(4, 1, 1\) to buckets$"),
        ({"buckets": (Bucket(2, 16, 4),)}, r"add Bucket\(4, 16, 4\) to buckets, or lower max_slots to 2$"),
        ({"buckets": (Bucket(4, 16, 4), Bucket(4, 8, 0))}, "with prompt tokens must have chunks"),
    ],
)
def test_bad_options_are_named(model, options, says):
    with pytest.raises(ConfigError, match=says):
        Engine(model, **{"max_slots": 4, **options})


@pytest.mark.parametrize("failing", [1, 2, 5])
def test_a_device_error_recomputes_what_runs(model, monkeypatch, failing):
    want = serve(model, PROMPTS, [greedy(20)] * 3, **OPTIONS)
    engine = Engine(model, **OPTIONS)
    run, calls = engine._device.run, iter(range(1, 1000))

    def fail_once(*args):
        if next(calls) == failing:
            engine._device._state = None  # what was donated is lost
            raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")
        return run(*args)

    monkeypatch.setattr(engine._device, "run", fail_once)
    ids = [engine.submit(p, greedy(20)) for p in PROMPTS]
    done = {e.id: e.completion for e in engine.run() if e.completion}
    assert [done[i].token_ids for i in ids] == [w.token_ids for w in want]
    assert engine.metrics()["device_errors"] == 1


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("INTERNAL: the device fell over", ""),
        ("RESOURCE_EXHAUSTED: Out of memory", r"; take fewer pages \(num_pages\), so that steps have room"),
    ],
)
def test_a_device_that_keeps_failing_closes_the_engine_clearly(model, monkeypatch, problem, said):
    engine = Engine(model, **OPTIONS)
    engine.submit(PROMPTS[0], greedy())

    def fail(*args):
        raise jax.errors.JaxRuntimeError(f"{problem}\nlong trace")

    monkeypatch.setattr(engine._device, "run", fail)
    with pytest.raises(EngineClosed, match=f"failed again right after recovery: {problem}{said}$"):
        list(engine.run())
    with pytest.raises(EngineClosed):
        engine.submit(PROMPTS[0], greedy())
    assert [(e.id, e.completion.finish_reason, e.completion.token_ids) for e in engine.last_events] == [
        (0, "error", ())
    ]
    engine.close()  # again: no mistake
    assert len(engine.last_events) == 1


def test_device_errors_apart_in_time_are_each_recovered_from(model, monkeypatch):
    """Errors surface where outputs are read."""
    want = serve(model, PROMPTS, [greedy(20)] * 3, **OPTIONS)
    engine = Engine(model, **OPTIONS)
    read, calls = jax.device_get, iter(range(1, 1000))

    def fail_twice(x):
        if next(calls) in (3, 9):
            raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")
        return read(x)

    monkeypatch.setattr(jax, "device_get", fail_twice)
    ids = [engine.submit(p, greedy(20)) for p in PROMPTS]
    done = {e.id: e.completion for e in engine.run() if e.completion}
    assert [done[i].token_ids for i in ids] == [w.token_ids for w in want]
    assert engine.metrics()["device_errors"] == 2


def test_recovery_frees_the_old_pool_first_and_closes_when_there_is_no_room(model, monkeypatch):
    engine = Engine(model, **OPTIONS)
    engine.submit(PROMPTS[0], greedy())

    def fail(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")

    def no_room(*args, **options):
        assert engine._device._state is None
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine._device, "run", fail)
    monkeypatch.setattr(device_module, "init_state", no_room)
    with pytest.raises(EngineClosed, match="no room for a new state after a device error: RESOURCE_EXHAUSTED"):
        list(engine.run())


def test_an_interrupted_step_closes_the_engine_and_every_request_has_its_end(model, monkeypatch):
    """What runs, what waits for a slot, what has ended in the very step, and nothing of what was handed out before."""
    want = serve(model, PROMPTS, [greedy(20)] * 3, **OPTIONS)
    engine = Engine(model, **OPTIONS)
    done = engine.submit(PROMPTS[2], greedy(2))
    events = list(engine.run())
    assert engine.last_events == ()
    two, short = engine.submit(PROMPTS[0], greedy(20, n=2)), engine.submit(PROMPTS[2], greedy(3))
    waits = engine.submit(PROMPTS[1], greedy(20, n=2))  # the second one: there are four slots

    def interrupt(seq, tokens=(), reason=None, seconds=0.0):  # right when the short one has ended
        if reason == "length":
            raise KeyboardInterrupt
        return PendingEvent(seq, tokens, reason, seconds)

    monkeypatch.setattr("jllm.engine.ledger.PendingEvent", interrupt)
    with pytest.raises(KeyboardInterrupt):
        events.extend(engine.run())
    with pytest.raises(EngineClosed, match="a step was interrupted half-way"):
        engine.step()
    last = {(e.id, e.sample): e.completion for e in engine.last_events if e.completion}
    assert sorted(last) == [(two, 0), (two, 1), (short, 0), (waits, 0), (waits, 1)]
    assert {c.finish_reason for c in last.values()} == {"abort"}
    assert done not in {e.id for e in engine.last_events}
    assert last[short, 0].token_ids == want[2].token_ids[:3]
    for sample in (0, 1):
        mine = [e for e in (*events, *engine.last_events) if (e.id, e.sample) == (two, sample)]
        got = sum((e.token_ids for e in mine), ())
        assert got == last[two, sample].token_ids == want[0].token_ids[: len(got)]
        assert len(got) > 1
    assert last[waits, 1].token_ids == ()
    m = engine.metrics()
    assert (m["requests"], m["requests_finished"], m["requests_aborted"]) == (4, 2, 2)  # the short one had ended


def test_to_close_is_to_abort(model):
    engine = Engine(model, **OPTIONS)
    done, runs = engine.submit(PROMPTS[2], greedy(2)), engine.submit(PROMPTS[0], greedy(20))
    while done not in {e.id for e in engine.step() if e.completion}:
        pass
    engine.close()
    (end,) = engine.last_events
    assert (end.id, end.completion.finish_reason) == (runs, "abort")
    assert 1 < len(end.completion.token_ids) < 20


def test_logits_that_are_not_finite_end_a_request_as_an_error(model):
    broken = replace(model, params=replace(model.params, norm=model.params.norm.at[0].set(float("nan"))))
    done = serve(broken, PROMPTS, [greedy(5)] * 3, **OPTIONS)
    assert [(c.finish_reason, c.token_ids) for c in done] == [("error", ())] * 3


@pytest.mark.parametrize(
    "bad",
    [
        {"stop": None},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"logit_bias": [1]},
        {"top_k": 0.5},
        {"seed": "x"},
        {"temperature": 10**400},
    ],
)
def test_sampling_values_of_the_wrong_type_are_named(bad):
    with pytest.raises(RequestError, match=next(iter(bad))):
        SamplingParams(**bad)
    SamplingParams(seed=np.int64(3), temperature=np.float32(0.5), top_k=np.int32(3))


def test_an_unknown_sampling_parameter_is_named_with_the_one_that_was_meant():
    says = "^SamplingParams has no 'max_tokens': did you mean max_new_tokens\\?$"
    for kind in (TypeError, RequestError):  # as from any constructor, and as from a request that cannot be
        with pytest.raises(kind, match=says):
            SamplingParams(max_tokens=5)
    with pytest.raises(RequestError, match="'zzz': known are temperature, top_k"):
        SamplingParams(zzz=1)
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["temperature", "top_k"]
    with pytest.raises(RequestError, match="did you mean seed"):
        replace(SamplingParams(), seeds=3)
    assert pickle.loads(pickle.dumps(SamplingParams(0.5, seed=3))) == SamplingParams(temperature=0.5, seed=3)
