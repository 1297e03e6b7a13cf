"""Requests that take adapters: each token is as its adapter alone draws it, to the bit, and as merged weights do."""

import random
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, RequestError, SnapshotError, WeightsError
from jllm.model.adapters import init_adapter, merge_params
from jllm.programs.packed_step import packed_step
from jllm.speculative.ngram import NGram
from jllm.step.buckets import Bucket
from tests.tiny import full_logits, log_softmax, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

OPTIONS = {
    "max_slots": 3,
    "page_size": 8,
    "num_pages": 7,  # less than what three requests need
    "max_step_tokens": 11,
    "buckets": (Bucket(3, 8, 2),),
    "executables": None,
    "max_adapters": 2,  # fewer than there are
    "adapter_rank": 4,
}
PROMPTS = [tuple(range(40, 57)), tuple(range(40, 53)), (*range(40, 50), 7, 8), (9, 9)]  # most begin alike
Name = tuple[int, int]  # request and sample


def some_adapter(config, rank: int, seed: int, targets=None):
    """An adapter that changes what is drawn."""
    rng = np.random.default_rng(seed)
    start = init_adapter(config, jax.random.key(seed), rank, alpha=2 * rank, targets=targets)
    return {name: replace(each, b=jnp.asarray(0.2 * rng.normal(size=each.b.shape))) for name, each in start.items()}


class Oracle:
    """Continues tokens by an engine in which nothing else runs."""

    def __init__(self):
        self.model = tiny_model("float64", num_layers=1)
        config = self.model.config
        self.values = {  # by name, the values that an adapter takes in turn
            "all": [some_adapter(config, 3, seed) for seed in (1, 2)],
            "two": [some_adapter(config, 4, seed, ["q_proj", "down_proj"]) for seed in (3, 4)],
            "out": [some_adapter(config, 2, 5, ["o_proj"])],
        }
        named = {f"{name}{i}": value for name, values in self.values.items() for i, value in enumerate(values)}
        self.engine = Engine(self.model, **OPTIONS, deterministic=True, prefix_cache=False, adapters=named)
        request = self.engine.submit((3,), SamplingParams(max_new_tokens=2))
        self.nothing = self.engine.snapshot(request)  # of a sample that waits: no K and V
        self.engine.abort(request)
        list(self.engine.run())
        self.known: dict = {}

    def continued(self, value: str | None, tokens, sampling: SamplingParams, sample: int):
        """Returns the tokens and log-probabilities of a sample that continues `tokens`."""
        key = value, tokens, sampling, sample
        if key not in self.known:
            start = replace(self.nothing, tokens=np.asarray(tokens, np.int32), weights=None)
            self.engine.resume(start, replace(sampling, n=sample + 1, adapter=value))
            self.known[key] = scores(
                next(e.completion for e in self.engine.run() if e.completion and e.sample == sample)
            )
            list(self.engine.run())
        return self.known[key]


def scores(completion) -> list[tuple[int, float]]:
    return [(one.token_id, one.logprob) for one in completion.logprobs]


@pytest.fixture(scope="module")
def oracle():
    with jax.enable_x64(True):
        yield Oracle()


@pytest.fixture(scope="module")
def engine(oracle):
    first = {name: values[0] for name, values in oracle.values.items()}
    return Engine(oracle.model, **OPTIONS, deterministic=True, adapters=first)


class Run:
    """Drives an engine with requests, forks and updates of adapters, and looks at what each sample got."""

    def __init__(self, engine: Engine, oracle: Oracle):
        self.engine, self.oracle, self.done = engine, oracle, {}
        list(engine.run())  # what a run that failed has left
        for name, values in oracle.values.items():
            engine.adapters.update(name, values[0])
        self.now = dict.fromkeys(oracle.values, 0)
        self.values = {engine.version: dict(self.now)}  # by version, the number of each adapter's value
        list(engine.run())
        engine.reset_prefix_cache()
        self.asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self.forks: dict[Name, tuple[Name, int]] = {}  # whose tokens a fork's first ones are, and how many
        self.kept: set[Name] = set()  # ran while values changed under them

    def submit(self, prompt, new: int, adapter: str | None, n: int = 1) -> int:
        seed = 1000 + len(self.asked)
        more = {"n": n, "max_new_tokens": new, "logprobs": 0, "ignore_eos": True, "adapter": adapter}
        request = self.engine.submit(prompt, SamplingParams(seed=seed, **more))
        self.asked[request] = tuple(prompt), SamplingParams(seed=seed, **more)
        return request

    def update(self, name: str, running: str = "recompute") -> None:
        if running == "keep":
            running_now = self.engine._scheduler.running
            self.kept.update((s.request_id, s.sample) for s in running_now if s.params.adapter == name)
        self.now[name] = (self.now[name] + 1) % len(self.oracle.values[name])
        version = self.engine.adapters.update(name, self.oracle.values[name][self.now[name]], running=running)
        self.values[version] = dict(self.now)

    def fork(self, name: Name) -> None:
        length = len(self.engine._ledger.find(*name).output)
        made = name[0], self.engine.fork(*name)
        self.forks[made] = name, length
        if name in self.kept:
            self.kept.add(made)

    def running(self) -> list[Name]:
        requests = self.engine._ledger._requests
        return [(request, sample) for request, samples in requests.items() for sample in samples.unfinished]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.done |= {(e.id, e.sample): e.completion for e in self.engine.step() if e.completion}

    def value_of(self, adapter: str | None, version: int) -> str | None:
        return (
            None if adapter is None else f"{adapter}{self.values[max(v for v in self.values if v <= version)][adapter]}"
        )

    def check(self) -> None:
        """Runs to the end. Then each run of tokens of one value is what the oracle gives there."""
        while self.engine.has_work:
            self.step()
        assert {request for request, _ in self.done} == self.asked.keys()
        for name, completion in self.done.items():
            if name in self.kept:
                continue
            prompt, sampling = self.asked[name[0]]
            got, tokens = scores(completion), completion.token_ids
            values, begin = [self.value_of(sampling.adapter, version) for version in completion.versions], 0
            if name in self.forks:
                origin, begin = self.forks[name][0], min(self.forks[name][1], len(tokens))
                assert origin in self.kept or got[:begin] == scores(self.done[origin])[:begin]
            cuts = [i for i in range(begin, len(tokens)) if i == begin or values[i] != values[i - 1]]
            for start, stop in zip(cuts, [*cuts[1:], len(tokens)]):
                one = replace(sampling, n=1, max_new_tokens=stop - start)
                want = self.oracle.continued(values[start], (*prompt, *tokens[:start]), one, name[1])
                assert got[start:stop] == want, (name, sampling.adapter, start, stop, completion.versions)


@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_any_interleaving_gives_each_token_as_its_adapter_alone_does(engine, oracle, rng: random.Random):
    run = Run(engine, oracle)
    for _ in range(rng.randint(6, 22)):
        what = rng.choice(["submit", "submit", "submit", "step", "step", "step", "update", "fork", "sleep"])
        if what == "submit" and len(run.asked) < 9:
            prompt = rng.choice(PROMPTS)
            new = rng.randint(2, 9) + (len(prompt) < 3) * 14
            run.submit(prompt, new, rng.choice(["all", "two", "out", None]), rng.choice([1, 1, 2]))
        elif what == "step":
            run.step(rng.randint(1, 4))
        elif what == "update":
            run.update(rng.choice(["all", "two"]), rng.choice(["recompute", "recompute", "keep"]))
        elif what == "fork" and run.running() and len(run.forks) < 3:
            run.fork(rng.choice(run.running()))
        elif what == "sleep":
            engine.sleep()
            engine.wake()
    run.check()


def scripted(engine: Engine, oracle: Oracle) -> Run:
    """Four adapters' worth of requests over two places, with prefixes alike, and an update while they run."""
    run = Run(engine, oracle)
    for prompt, adapter in zip((PROMPTS[0], *PROMPTS), ("all", "two", "out", None, "all")):
        run.submit(prompt, 8, adapter)
    run.step(5)
    run.update("all")
    run.submit(PROMPTS[0], 8, "two", n=2)
    run.check()
    return run


def share_prefixes(patch) -> None:
    """Plants a fault: prefixes are shared across adapters."""
    patch.setattr("jllm.engine.sequence.Sequence.key", None)


def share_generations(patch) -> None:
    """Plants a fault: prefixes outlive an adapter's values, and what runs is not computed again."""
    patch.setattr("jllm.engine.sequence.Sequence.key", property(lambda seq: seq.params.adapter))
    patch.setattr("jllm.engine.scheduler.Scheduler.start_over", lambda self, of=None: None)


def leave_places(patch) -> None:
    """Plants a fault: a place that is given away keeps the adapter that it had."""
    enter = "jllm.engine.device.Device.put_adapter"
    written, put = set(), Engine.__init__.__globals__["Device"].put_adapter

    def once(self, place, adapter):
        if place not in written:
            written.add(place)
            put(self, place, adapter)

    patch.setattr(enter, once)


@pytest.mark.parametrize("fault", [share_prefixes, share_generations, leave_places])
def test_the_oracle_notices(engine, oracle, monkeypatch, fault):
    scripted(engine, oracle)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        scripted(engine, oracle)


def test_an_update_that_waits_lets_all_requests_end_first(engine, oracle):
    run = Run(engine, oracle)
    run.submit(PROMPTS[0], 6, "all")
    run.step(3)
    run.update("all", "finish")
    run.submit(PROMPTS[1], 4, "all")
    run.check()
    first, second = (run.done[request, 0].versions for request in run.asked)
    assert max(first) < min(second) == max(second)


def test_an_update_that_waits_outlives_what_happens_meanwhile(engine, oracle):
    run = Run(engine, oracle)
    first, _ = run.submit(PROMPTS[0], 4, "all"), run.submit(PROMPTS[1], 12, "two")
    waiting = run.submit(PROMPTS[2], 9, "out")  # for the place of "all"
    run.step()
    given = jax.tree.map(jnp.copy, oracle.values["all"][1])
    engine.adapters.update("all", given, running="finish")
    jax.tree.map(lambda leaf: leaf.delete(), given)  # as an optimizer that donates does
    newest = engine.adapters.update("two", oracle.values["two"][0])
    while (first, 0) not in run.done:
        run.step()
    engine.adapters.unload("all")
    try:
        assert (waiting, 0) not in run.done
        assert engine.version == newest
        run.check()
        assert run.done[waiting, 0].versions == (newest,) * 9
        again = run.submit(PROMPTS[2], 3, "out")
        run.check()
        assert run.done[again, 0].versions == (newest + 1,) * 3, "other weights have another version, and a higher one"
        assert engine.adapters.update("two", oracle.values["two"][0]) == newest + 2
    finally:
        for name in ("two", "out"):  # in the order that other tests expect
            engine.adapters.unload(name)
        for name, values in oracle.values.items():
            engine.adapters.load(name, values[0])


def test_running_requests_are_kept_beside_others_that_begin_anew(engine, oracle):
    run = Run(engine, oracle)
    for name in ("all", "two"):
        run.submit(PROMPTS[3], 8, name)
    run.step(3)
    before = engine.metrics()["preemptions"]
    run.update("all")
    run.update("two", "keep")
    run.check()
    assert engine.metrics()["preemptions"] == before + 1


def test_other_values_compile_nothing(engine, oracle):
    scripted(engine, oracle)
    compiled = packed_step._cache_size()
    scripted(engine, oracle)
    assert packed_step._cache_size() == compiled


def test_merged_weights_give_the_same_to_1e_12(oracle):
    sampling = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, logprobs=0, seed=0)
    for name, values in oracle.values.items():
        merged = merge_params(oracle.model.params, oracle.model.config, values[0])
        got = oracle.continued(f"{name}0", PROMPTS[0], sampling, 0)
        tokens = [*PROMPTS[0], *(token for token, _ in got)]
        want = log_softmax(full_logits(replace(oracle.model, params=merged), tokens, pad=32))
        for at, (token, logprob) in enumerate(got, len(PROMPTS[0]) - 1):
            assert token == np.argmax(want[at])
            assert abs(logprob - want[at, token]) < 1e-12


def test_a_snapshot_belongs_to_its_adapter(engine, oracle):
    run = Run(engine, oracle)
    request = run.submit(PROMPTS[0], 8, "all")
    run.step(4)
    snapshot, sampling = engine.snapshot(request), SamplingParams(max_new_tokens=3, logprobs=0, ignore_eos=True, seed=7)
    assert snapshot.length > 0
    for other in (None, "two"):
        with pytest.raises(SnapshotError, match="made with other weights"):
            engine.resume(snapshot, replace(sampling, adapter=other))
    run.check()
    resumed = engine.resume(snapshot, replace(sampling, adapter="all"))
    got = next(event.completion for event in engine.run() if event.completion and event.id == resumed)
    assert scores(got) == oracle.continued("all0", tuple(snapshot.tokens.tolist()), sampling, 0)


def test_requests_wait_for_places_and_others_overtake_them(engine, oracle):
    run = Run(engine, oracle)
    long = [run.submit(PROMPTS[3], 12, name) for name in ("all", "two")]
    late, quick = run.submit(PROMPTS[3], 2, "out"), run.submit(PROMPTS[3], 2, None)
    run.step(6)
    assert [seq.request_id for seq in engine._loop.gate.waiting] == [late]
    assert (quick, 0) in run.done
    with pytest.raises(WeightsError, match="'out' is in use by 1 samples"):
        engine.adapters.unload("out")
    engine.abort(long[1])
    run.step(4)
    assert not engine._loop.gate.waiting
    held = engine._loop.adapters.held
    assert held["two"].place is None, "the idle one gives its place"
    while engine.has_work:
        run.step()
    assert scores(run.done[late, 0]) == oracle.continued("out0", PROMPTS[3], replace(run.asked[late][1], n=1), 0)
    engine.adapters.unload("out")
    with pytest.raises(RequestError, match="adapter 'out' is unknown: loaded are all, two"):
        run.submit(PROMPTS[3], 2, "out")
    engine.adapters.load("out", oracle.values["out"][0])


def test_drafts_change_no_token(oracle):
    named = {name: values[0] for name, values in oracle.values.items()}
    options = {"buckets": (Bucket(3, 8, 2), Bucket(3, 0, 0, 3)), "speculate": NGram(2), "drafts": 2, "num_pages": 12}
    engine = Engine(oracle.model, **OPTIONS | options, deterministic=True, adapters=named)
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0, seed=3)
    for name in (*named, None):
        engine.submit(PROMPTS[0], replace(sampling, adapter=name))
    done = {event.id: event.completion for event in engine.run() if event.completion}
    for i, name in enumerate((*named, None)):
        assert scores(done[i]) == oracle.continued(None if name is None else f"{name}0", PROMPTS[0], sampling, 0)


def test_steps_without_adapters_are_those_of_an_engine_without_places(engine, oracle):
    named = {name: values[0] for name, values in oracle.values.items()}
    plain = Engine(oracle.model, **OPTIONS, adapters=named)
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=0, seed=3)
    assert plain.compile_ahead([sampling]) == 1
    took, programs = [], plain._device.programs
    ask = programs.run
    programs.run = lambda key, params, *rest: took.append(params.adapters is not None) or ask(key, params, *rest)
    for name, new in ((None, 16), ("all", 2)):
        plain.submit(PROMPTS[3], replace(sampling, adapter=name, max_new_tokens=new))
        plain.step()
    done = {event.id: event.completion for event in plain.run() if event.completion}
    begun = took.index(True)
    assert took == [*[False] * begun, True, True, *[False] * (len(took) - begun - 2)], "its prompt and one token"
    assert 0 < begun < len(took) - 2
    for i, (value, new) in enumerate(((None, 16), ("all0", 2))):
        want = oracle.continued(value, PROMPTS[3], replace(sampling, max_new_tokens=new), 0)
        assert [token for token, _ in want] == list(done[i].token_ids)
        assert np.abs([got - one for (_, got), (_, one) in zip(scores(done[i]), want)]).max() < 1e-12
    assert plain.metrics()["compile_first_use"] == 0
    assert all(variant.adapters for _, variant, _ in engine._device.programs.used), "one order has one kind of program"


def test_what_does_not_fit_is_refused(engine, oracle):
    model, adapters = oracle.model, engine.adapters
    wide = tiny_model("float64", num_layers=1, hidden_size=64)
    good = oracle.values["out"][0]
    for wrong, why in {
        "its shapes": (some_adapter(wide.config, 2, 0), "this model takes"),
        "its rank": (some_adapter(model.config, 5, 0), "has rank 5, and there is room for 4"),
        "no matrix": ({"lm_head": good["o"]}, "changes lm_head, and there is room for qkv, o, gate_up, down"),
        "no adapter": (model.params, "must be a dict of LowRank"),
    }.values():
        with pytest.raises(WeightsError, match=why):
            adapters.load("new", wrong)
    version, gone = engine.version, jax.tree.map(jnp.copy, good)
    jax.tree.map(lambda leaf: leaf.delete(), gone)
    for name, take in (("new", adapters.load), ("out", adapters.update)):
        with pytest.raises(WeightsError, match=rf"{name}': \['o'\].a was donated or deleted: give weights that exist"):
            take(name, gone)
        with pytest.raises(WeightsError, match=rf"{name}': \['o'\].a is traced: .* call it outside of jit"):
            jax.jit(partial(take, name))(good)
    sampling = SamplingParams(max_new_tokens=3, logprobs=0, ignore_eos=True, seed=7, adapter="out")
    engine.submit(PROMPTS[0], sampling)
    (done,) = (event.completion for event in engine.run() if event.completion)
    assert scores(done) == oracle.continued("out0", PROMPTS[0], replace(sampling, adapter=None), 0)
    assert set(done.versions) == {version}, "what was refused has changed nothing"
    with pytest.raises(WeightsError, match="'out' is loaded already"):
        adapters.load("out", good)
    with pytest.raises(WeightsError, match="'new' is not loaded"):
        adapters.update("new", good)
    with pytest.raises(ConfigError, match="adapter target 'k': the model has q_proj, k_proj"):
        init_adapter(model.config, jax.random.key(0), 2, targets=["k"])
    with pytest.raises(ConfigError, match="must be a mapping of names to PEFT directories or adapters, not list"):
        Engine(model, adapters=[good])
    with pytest.raises(ConfigError, match="adapter_rank has no meaning without adapters"):
        Engine(model, adapter_rank=3)
    with pytest.raises(RequestError, match="adapter must be None or the name"):
        SamplingParams(adapter="")
    assert list(adapters) == ["all", "two", "out"]
