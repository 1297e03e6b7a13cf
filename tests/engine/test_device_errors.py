"""Whenever and wherever the device fails, each request gets the tokens that it gets alone, or the engine closes and
says so: a property over all kinds of requests. Single cases are in test_engine_errors.py."""

from dataclasses import replace

import jax
import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import EngineClosed
from jllm.step.buckets import Bucket
from tests.tiny import CONFIG, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, event, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

OPTIONS = {
    "max_slots": 3, "page_size": 8, "num_pages": 12, "max_step_tokens": 8,
    "buckets": (Bucket(3, 0, 0), Bucket(3, 8, 2)),
}  # fmt: skip
ALONE = {"max_slots": 1, "page_size": 64, "max_step_tokens": 64, "buckets": (Bucket(1, 64, 1),)}
PLACES = ("run", "copy_pages", "load", "read")
STEM = tuple(range(60, 72))  # which prompts share, so that pages are found and copied

prompts = st.builds(
    lambda shared, rest: (*STEM[:shared], *rest),
    st.sampled_from([0, 0, 11, 12]),
    st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=12),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    max_new_tokens=st.integers(1, 12),
    ignore_eos=st.just(True),
    seed=st.integers(0, 5),
    n=st.sampled_from([1, 1, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.booleans(),
)
ALL = SamplingParams(repetition_penalty=1.4, logprobs=2, prompt_logprobs=True)
jobs = st.lists(st.tuples(prompts, samplings, st.integers(0, 6)), min_size=1, max_size=5)
errors = st.dictionaries(st.sampled_from(PLACES), st.sets(st.integers(0, 14), max_size=3), max_size=3)


class Faults:
    """Fails the n-th call of each operation of an engine's device, for every n that is asked for."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, errors: dict[str, set[int]]):
        self.errors, self.calls, self.raised = errors, dict.fromkeys(PLACES, 0), 0
        self.device, self.get = engine._device, jax.device_get
        for name in ("run", "copy_pages", "load"):
            patch.setattr(self.device, name, self.wrapped(name, getattr(self.device, name)))
        patch.setattr(jax, "device_get", self.wrapped("read", jax.device_get))

    def wrapped(self, name, call):
        def wrapper(*args):
            at, self.calls[name] = self.calls[name], self.calls[name] + 1
            if at in self.errors.get(name, ()):
                self.raised += 1
                for leaf in jax.tree.leaves(self.device._state):
                    leaf.delete()  # as donated to what failed
                raise jax.errors.JaxRuntimeError(f"INTERNAL: {name} fell over")
            return call(*args)

        return wrapper


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        yield tiny_model("float64", num_layers=1)


def play(model, jobs, options, errors=None):
    """Completions by job and sample; None where the engine closed. And the engine, and its faults."""
    engine, done, ids, clock = Engine(model, **options), {}, {}, 0
    engine.compile_ahead([ALL])  # which serves every request, so that no schedule depends on a compiler's time
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(engine, patch, errors or {})
        try:
            while len(ids) < len(jobs) or engine.has_work:
                for i, (prompt, sampling, arrival) in enumerate(jobs):
                    if arrival == clock:
                        ids[engine.submit(list(prompt), sampling)] = i
                for e in engine.step():
                    if e.completion:
                        done[ids[e.id], e.sample] = e.completion
                clock += 1
                assert clock < 1000, "a request hangs"
        except EngineClosed:
            return None, engine, faults
    return done, engine, faults


def close(got, want) -> bool:
    return got is None or all(abs(a - b) < 1e-9 for a, b in zip(got, want, strict=True))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=jobs, errors=errors)
def test_same_tokens_or_closed(model, jobs, errors):
    with jax.enable_x64(True):
        got, engine, faults = play(model, jobs, OPTIONS, errors)
        m = engine.metrics()
        event(f"closed: {got is None}, errors: {min(faults.raised, 3)}")
        assert m["device_errors"] == faults.raised
        if got is None:
            with pytest.raises(EngineClosed, match="failed again right after recovery: INTERNAL: .* fell over"):
                engine.step()
            with pytest.raises(EngineClosed):
                engine.submit([3], SamplingParams())
            return
        assert m["pages_free"] == m["pages_total"]
        assert len(got) == sum(sampling.n for _, sampling, _ in jobs)
        for i, (prompt, sampling, _) in enumerate(jobs):
            alone, _, _ = play(model, [(prompt, sampling, 0)], ALONE)
            for sample in range(sampling.n):
                mine, want = got[i, sample], alone[0, sample]
                assert (mine.token_ids, mine.finish_reason) == (want.token_ids, want.finish_reason)
                assert close(mine.prompt_logprobs, want.prompt_logprobs)
                if sampling.logprobs is not None:
                    assert close([x.logprob for x in mine.logprobs], [x.logprob for x in want.logprobs])


def test_forks_and_snapshots_survive(model):
    """A fork shares pages that are lost; a snapshot is on the host, and goes to the new pool once more."""
    greedy = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True, seed=1)
    prompt = list(STEM)
    with jax.enable_x64(True):
        want = play(model, [(prompt, greedy, 0)], ALONE)[0][0, 0].token_ids
        for place in ("run", "read", "load"):
            engine = Engine(model, **OPTIONS)
            first = engine.submit(prompt, greedy)
            for _ in range(8):
                engine.step()
            snapshot = engine.snapshot(first)
            known = len(snapshot.tokens) - len(prompt)
            with pytest.MonkeyPatch.context() as patch:
                faults = Faults(engine, patch, {})
                engine.fork(first)
                resumed = engine.resume(snapshot, replace(greedy, max_new_tokens=20 - known))
                faults.errors[place] = {faults.calls[place]}
                done, steps = {}, 0
                while engine.has_work:
                    done |= {(e.id, e.sample): e.completion.token_ids for e in engine.step() if e.completion}
                    steps += 1
                    assert steps < 200, "a request hangs"
                assert faults.raised == 1
            assert done[first, 0] == done[first, 1] == want
            assert done[resumed, 0] == want[known:]
