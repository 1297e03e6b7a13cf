"""Other weights while requests run: each token is as a fresh engine with its version's weights draws it, to the bit."""

import gc
import random
import threading
import weakref
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lax.lax import _convert_element_type
from jax.experimental.layout import Format, Layout

import jllm.engine.weights as fitting
from jllm.engine.device import Device
from jllm.engine.engine import Engine
from jllm.engine.loop import Loop
from jllm.engine.request import SamplingParams
from jllm.engine.reuse import Sharing
from jllm.engine.samples import take_prompt_scores
from jllm.engine.sequence import Sequence
from jllm.engine.weights import Fit, Weights
from jllm.errors import ConfigError, EngineClosed, EngineNotReady, NoRoomError, SnapshotError, WeightsError
from jllm.files.snapshot import SEVERAL
from jllm.guides.guide import Guide
from jllm.programs.packed_step import WHOLE_STEP
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from jllm.step.state import Variant
from jllm.training.logprobs import token_logprobs
from tests.ascii import TOKENIZER
from tests.tiny import tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ROWS, LENGTH = 24, 40  # more than a run's samples and their tokens
OPTIONS = {
    "max_slots": 3,
    "page_size": 8,
    "num_pages": 7,  # less than what three requests need
    "max_step_tokens": 11,
    "buckets": (Bucket(3, 8, 2),),
    "deterministic": True,
    "executables": None,
}
MODELS = [tiny_model(seed=seed, num_layers=1, tokenizer=TOKENIZER, hidden_size=64) for seed in range(3)]
PROMPTS = [tuple(range(40, 57)), tuple(range(40, 53)), (*range(40, 50), 7, 8), (9, 9)]  # most begin alike
GUIDE = Guide.regex("[a-f]{9,12}") if find_spec("llguidance") else None
Name = tuple[int, int]  # request and sample


@dataclass
class Fork:
    """Says where a fork begins: whose tokens its first ones are, and how many."""

    origin: Name
    tokens: int


class Fresh:
    """Continues tokens with an engine of each model's own, as a request that begins there would."""

    def __init__(self, models=MODELS):
        self.models = models
        self.engines = [Engine(model, **OPTIONS, prefix_cache=False) for model in models]
        self.known: dict = {}
        engine = self.engines[0]
        request = engine.submit((3,), SamplingParams(max_new_tokens=2))
        self.nothing = engine.snapshot(request)  # of a sample that waits: no K and V
        engine.abort(request)
        list(engine.run())

    def continued(self, model: int, tokens, sampling: SamplingParams, sample: int, guided: int):
        """The tokens and log-probabilities of a sample that continues `tokens`, and whose guide began earlier."""
        key = model, tokens, sampling, sample, guided
        if key not in self.known:
            engine = self.engines[model]
            start = replace(self.nothing, tokens=np.asarray(tokens, np.int32), guided=guided, weights=None)
            request = engine.resume(start, replace(sampling, n=sample + 1))
            done = {event.sample: event.completion for event in engine.run() if event.completion}
            self.known[key] = scores(done[sample])
            assert not engine.has_work, request
        return self.known[key]


@pytest.fixture(scope="module")
def fresh():
    return Fresh()


@pytest.fixture(scope="module")
def engine():
    return Engine(MODELS[0], **OPTIONS)


def scores(completion) -> list[tuple[int, float]]:
    return [(one.token_id, one.logprob) for one in completion.logprobs]


class Run:
    """Drives an engine with requests, forks, updates, sleep and snapshots, and looks at what each sample got."""

    def __init__(self, engine: Engine, models=MODELS):
        self.engine, self.weights, self.done = engine, [model.params for model in models], {}
        engine.wake()
        list(engine.run())  # what a run that failed has left
        self.models = {engine.update(self.weights[0]): 0}  # by version
        list(engine.run())
        self.asked: dict[int, tuple[tuple[int, ...], SamplingParams, int]] = {}
        self.forks: dict[Name, Fork] = {}
        self.kept: set[Name] = set()  # ran while weights changed under them

    def submit(self, prompt, new: int, n: int = 1, guided: bool = False) -> int:
        more = {"guide": GUIDE} if guided and GUIDE else {"ignore_eos": True}
        seed = 1000 + len(self.asked)
        sampling = SamplingParams(seed=seed, n=n, max_new_tokens=new, logprobs=0, include_end=True, **more)
        request = self.engine.submit(prompt, sampling)
        self.asked[request] = tuple(prompt), sampling, len(prompt)
        return request

    def update(self, model: int, running: str = "recompute", form=lambda params: params) -> None:
        if running == "keep":
            self.kept.update((seq.request_id, seq.sample) for seq in self.engine._scheduler.running)
        self.models[self.engine.update(form(self.weights[model]), running=running)] = model

    def running(self) -> list[Name]:
        requests = self.engine._ledger._requests
        return [(request, sample) for request, samples in requests.items() for sample in samples.unfinished]

    def fork(self, name: Name) -> None:
        seq = self.engine._ledger.find(*name)
        made = name[0], self.engine.fork(*name)
        self.forks[made] = Fork(name, len(seq.output))
        if name in self.kept:
            self.kept.add(made)

    def resume(self, name: Name) -> None:
        """Lets a snapshot of a sample go on as a request of its own, if the weights are those that made it."""
        snapshot = self.engine.snapshot(*name)
        if len(snapshot.tokens) < 30:
            _, sampling, guided = self.asked[name[0]]
            sampling = replace(sampling, n=1, max_new_tokens=4, seed=5000 + len(self.asked), prompt_logprobs=False)
            request = self.engine.resume(snapshot, sampling, share=snapshot.length > 0)
            self.asked[request] = tuple(map(int, snapshot.tokens)), sampling, guided

    def rescore(self, name: Name) -> None:
        """Submits the tokens of a sample that has ended as a prompt, and asks for their log-probabilities."""
        tokens = (*self.asked[name[0]][0], *self.done[name].token_ids)
        sampling = SamplingParams(max_new_tokens=1, logprobs=0, include_end=True, prompt_logprobs=True, ignore_eos=True)
        sampling = replace(sampling, seed=5000 + len(self.asked))
        self.asked[self.engine.submit(tokens, sampling)] = tokens, sampling, len(tokens)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.done |= {(e.id, e.sample): e.completion for e in self.engine.step() if e.completion}

    def check(self, fresh: Fresh) -> None:
        """Runs to the end; then each run of tokens of one version is what a fresh engine gives there."""
        while self.engine.has_work:
            self.step()
        assert {request for request, _ in self.done} == self.asked.keys()
        for name, completion in self.done.items():
            if name in self.kept or completion.finish_reason == "abort":
                continue
            prompt, sampling, guided = self.asked[name[0]]
            got, versions, tokens = scores(completion), completion.versions, completion.token_ids
            assert len(got) == len(versions) == len(tokens)
            begin = 0
            if fork := self.forks.get(name):
                origin, begin = self.done[fork.origin], min(fork.tokens, len(tokens))
                if fork.origin not in self.kept:
                    assert (got[:begin], versions[:begin]) == (scores(origin)[:begin], origin.versions[:begin])
            cuts = [i for i in range(begin, len(tokens)) if i == begin or versions[i] != versions[i - 1]]
            for start, stop in zip(cuts, [*cuts[1:], len(tokens)]):
                one = replace(sampling, n=1, max_new_tokens=stop - start, prompt_logprobs=False)
                model, so_far = self.models[versions[start]], (*prompt, *tokens[:start])
                want = fresh.continued(model, so_far, one, name[1], guided if sampling.guide else len(so_far))
                assert got[start:stop] == want, (name, start, stop, versions)
        self.check_trainer(fresh.models)

    def check_trainer(self, models) -> None:
        """Checks that trainers compute all these log-probabilities, drawn ones and those of prompts, to the bit."""
        ends = [(name, end) for name, end in self.done.items() if name not in self.kept and end.token_ids]
        tokens, lengths = np.zeros((ROWS, LENGTH), np.int32), np.zeros(ROWS, np.int32)
        for row, (name, end) in enumerate(ends):
            whole = (*self.asked[name[0]][0], *end.token_ids)
            tokens[row, : len(whole)], lengths[row] = whole, len(whole)
        score = partial(token_logprobs, tokens=tokens, lengths=lengths, **self.engine.token_logprobs_options())
        found = [np.asarray(score(model.params, model.config), np.float64) for model in models]
        for row, (name, end) in enumerate(ends):
            begin = len(self.asked[name[0]][0]) - 1
            for i, (version, drawn) in enumerate(zip(end.versions, end.logprobs)):
                assert found[self.models[version]][row, begin + i] == drawn.logprob, (name, i, version)
            if end.prompt_logprobs:
                assert found[self.models[end.versions[0]]][row, :begin].tolist() == list(end.prompt_logprobs), name


HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
TURNED = Format(Layout((1, 0)), HERE)
FORMS = {  # as trainers may hold their weights
    "as they are": lambda params: params,
    "put on a device": lambda params: jax.device_put(params, HERE),
    "numpy": lambda params: jax.tree.map(np.asarray, params),
    "made by jit": jax.jit(lambda params: jax.tree.map(lambda x: x * 1, params)),
    "weak": lambda params: replace(params, norm=_convert_element_type(params.norm, weak_type=True)),
    "turned": lambda params: replace(params, embed=jax.device_put(params.embed, TURNED)),
}


WAYS = {"submit": 2, "step": 3, "update": 2, "fork": 1, "sleep": 1, "resume": 1, "rescore": 3}


def interleave(rng: random.Random, engine: Engine, fresh: Fresh, most: int = 22) -> Run:
    """Plays requests, forks, updates, sleep and snapshots in any order, and checks what comes."""
    run = Run(engine)
    guided = rng.random() < 0.3
    for _ in range(rng.randint(6, most)):
        ways = [
            "submit",
            "submit",
            "step",
            "step",
            "step",
            "update",
            "update",
            "fork",
            "sleep",
            "resume",
            *["rescore"] * 3,
        ]
        what, names = rng.choice(ways), run.running()
        ended = [name for name, end in run.done.items() if end.token_ids]
        if what == "submit" and len(run.asked) < 9:
            prompt = rng.choice(PROMPTS)
            new = rng.randint(2, 9) + (len(prompt) < 3) * 14
            run.submit(prompt, new, rng.choice([1, 1, 2]), guided and rng.random() < 0.5)
        elif what == "step":
            run.step(rng.randint(1, 4))
        elif what == "update":
            running = rng.choice(["recompute", "recompute", "finish", "keep"])
            run.update(rng.randrange(3), running, FORMS[rng.choice([*FORMS])])
        elif what == "sleep":
            engine.sleep()
            if rng.random() < 0.5:
                run.update(rng.randrange(3))
            engine.wake()
        elif what == "fork" and names and len(run.forks) < 3:
            run.fork(rng.choice(names))
        elif what == "resume" and names and (name := rng.choice(names)) not in run.kept:
            run.resume(name)
        elif what == "rescore" and ended and len(run.asked) < 9:
            run.rescore(rng.choice(ended))
    run.check(fresh)
    return run


@settings(max_examples=8, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_any_interleaving_gives_each_token_as_the_weights_of_its_version_do(engine, fresh, rng):
    interleave(rng, engine, fresh)


def scripted(engine: Engine, fresh: Fresh) -> Run:
    """Two updates, in whose company samples run, wait, share prefixes and are preempted for pages."""
    run = Run(engine, fresh.models)
    run.submit(PROMPTS[0], 14)
    run.submit(PROMPTS[2], 14, n=2)
    run.step(6)
    run.submit(PROMPTS[1], 14, guided=True)
    run.step(8)
    run.update(1)
    run.step(6)
    run.submit(PROMPTS[0], 3)
    run.step(4)
    run.update(2)
    run.submit(PROMPTS[0], 3)
    run.rescore(next(iter(run.done)))
    for token in (7, 8, 9):  # short prompts, whose outputs need more pages than there are
        run.submit((token, 9), 22)
    run.check(fresh)
    return run


def test_versions_preemptions_and_updates_are_told(engine, fresh):
    engine.reset_metrics()
    run = scripted(engine, fresh)
    assert len({version for done in run.done.values() for version in done.versions}) == 3, "another test than it was"
    told = engine.metrics()
    assert (told["version"], told["updates"]) == (engine.version, 3)
    assert told["preemptions_by_cause"]["update"] > 1
    assert told["preemptions"] > told["preemptions_by_cause"]["update"], "another test than it was: pages are enough"
    assert told["prefix_hits"] > 0


@pytest.mark.exhaustive
def test_and_in_float64():
    with jax.enable_x64(True):
        models = [tiny_model("float64", seed=seed, num_layers=1, tokenizer=TOKENIZER) for seed in range(3)]
        scripted(Engine(models[0], **OPTIONS), Fresh(models))


def keep_prefixes(patch) -> None:
    patch.setattr(Sharing, "clear", lambda self: None)


def update_between_halves(patch) -> None:
    """The logits are of the weights before, and the token is said to be of those after."""
    take, complete, halfway = Engine.take_weights, Device.complete, Loop._complete
    waiting: list = []

    def later(self, weights, running="recompute"):
        waiting.append(lambda: take.__wrapped__(self, weights, running))
        return self.version + 1 if any(seq.matcher for seq in self._scheduler.running) else waiting.pop()()

    def between(self, step):
        while waiting:
            waiting.pop()()
        return halfway(self, step)

    patch.setattr(Engine, "take_weights", later)
    patch.setattr(Loop, "_complete", between)
    patch.setattr(Device, "complete", lambda self, step: replace(complete(self, step), version=self.version))


def leave_a_layer(patch) -> None:
    patch.setattr(Weights, "after", lambda self, old, drafter, _: (replace(self.params, layers=old.layers), drafter))


def count_versions_late(patch) -> None:
    """A step has the version of the weights at its read, not at its dispatch."""
    read = Loop.read
    patch.setattr(Loop, "read", lambda self, step: read(self, replace(step, version=self.device.version)))


def go_on(patch) -> None:
    """Plants a fault: running samples are not computed again."""
    patch.setattr("jllm.engine.scheduler.Scheduler.start_over", lambda self, of=None: self.sharing.clear())


FAULTS = [keep_prefixes, leave_a_layer, count_versions_late, go_on] + [update_between_halves] * (GUIDE is not None)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_notices(engine, fresh, monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        scripted(engine, fresh)


def test_a_second_thread_updates_while_the_first_steps(engine, fresh):
    run, stop, errors = Run(engine), threading.Event(), []

    def train():
        try:
            for turn in range(200):
                if stop.wait(0.002):
                    return
                run.update(turn % 3, ("recompute", "finish")[turn % 2])
        except BaseException as error:
            errors.append(error)

    for prompt in PROMPTS:
        run.submit(prompt, 12)
    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(40):
        if engine.has_work:
            run.step()
        else:
            run.submit(PROMPTS[0], 6)
    stop.set()
    thread.join()
    assert not errors
    run.check(fresh)


def test_no_form_of_the_weights_compiles_a_step(engine, caplog, monkeypatch):
    """Nor sleep; and without the fitting some would."""
    forms = {name: form(MODELS[1].params) for name, form in FORMS.items()}

    def compiled(params) -> bool:
        caplog.clear()
        with jax.log_compiles():
            engine.update(params)
            engine.submit(PROMPTS[3], SamplingParams(max_new_tokens=4, logprobs=0, ignore_eos=True))
            engine.step()
            engine.sleep()
            engine.wake()
            list(engine.run())
        return any("packed_step" in record.getMessage() for record in caplog.records)

    assert forms["weak"].norm.weak_type
    assert forms["turned"].embed.format.layout.major_to_minor == (1, 0)
    list(engine.run())
    compiled(MODELS[0].params)  # if no test before has
    assert not compiled(MODELS[0].params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(MODELS[1].params))
    bytes_of = {"numpy": size, "turned": MODELS[1].params.embed.nbytes}
    for name, params in forms.items():
        engine.reset_metrics()
        assert not compiled(params), name
        told, taken = engine.metrics(), engine._device._params
        assert told["update_bytes"] == bytes_of.get(name, 0), name
        assert told["update_seconds"] > 0
        for new, old in zip(jax.tree.leaves(taken), jax.tree.leaves(MODELS[1].params), strict=True):
            np.testing.assert_array_equal(new, old)
    copies = (jax.tree.leaves(engine._device._params), jax.tree.leaves(forms["turned"]))
    assert all(one is other for one, other in zip(*copies) if other is not forms["turned"].embed), "copied for nothing"
    monkeypatch.setattr(Fit, "take", lambda self, params, copy: params)
    assert compiled(forms["put on a device"])
    monkeypatch.undo()
    engine.update(MODELS[0].params)
    engine.sleep()
    engine.wake()


def test_weights_that_do_not_fit_are_named(engine):
    params, version = MODELS[0].params, engine.version
    layer = params.layers[0]
    short = replace(layer, mlp=replace(layer.mlp, down=layer.mlp.down[:, :8]))
    biased = replace(layer, attention=replace(layer.attention, o_bias=params.norm))
    gone = jnp.array(params.norm)
    gone.delete()
    for wrong, says in (
        (replace(params, norm=params.norm.astype(jnp.bfloat16)), r"norm must be float32\[64\], .* not bfloat16\[64\]"),
        (replace(params, layers=(short,)), r"layers\[0\].mlp.down must be float32\[64,48\], .* not float32\[64,8\]"),
        (replace(params, head=3), "head must be .* not int"),
        (replace(params, head=None), "head is missing"),
        (replace(params, layers=(biased,)), r"layers\[0\].attention.o_bias is there"),
        (replace(params, layers=params.layers * 2), r"layers\[1\].attention.norm is there"),
        (replace(params, layers=[*params.layers]), "the weights have the names of the engine's, but other types"),
        (replace(params, norm=gone), "norm was donated or deleted"),
        (replace(params, norm=np.ones(64)), r"norm must be float32\[64\], .* not float64\[64\]"),
        (None, "an update takes params, a drafter or hooks"),
    ):
        with pytest.raises(WeightsError, match=says):
            engine.update(wrong)
    with pytest.raises(WeightsError, match="embed is traced: update.* takes arrays"):
        jax.jit(engine.update)(params)
    with pytest.raises(ConfigError, match="running must be one of recompute, keep, finish, not 'stop'"):
        engine.update(params, running="stop")
    with pytest.raises(WeightsError, match="drafter is given, and the engine has none"):
        engine.update(params, drafter=params)
    with pytest.raises(WeightsError, match="quantize='w8a8' does not give the engine's weights"):
        engine.update(params, quantize="w8a8")
    with pytest.raises(WeightsError, match="quantize='w9': "):
        engine.update(params, quantize="w9")
    assert engine.version == version


trained = jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)


def test_donated_weights_stop_the_engine_until_it_has_others(engine, fresh, monkeypatch):
    """Also where they are donated while a step is dispatched."""
    run, donated = Run(engine), jax.tree.map(jnp.array, MODELS[1].params)
    run.submit(PROMPTS[0], 6)
    run.step(3)
    run.models[engine.update(donated)] = 1
    run.step(3)
    trained(donated)
    for _ in range(2):
        with pytest.raises(EngineNotReady, match="embed was donated or deleted while the engine held it"):
            engine.step()
        with pytest.raises(EngineNotReady, match="embed was donated"):
            engine.resume(fresh.nothing, SamplingParams(max_new_tokens=2))
    run.submit(PROMPTS[1], 6)
    run.update(2)
    run.step(4)
    copied = jax.tree.map(jnp.array, MODELS[1].params)
    run.models[engine.update(copied, copy=True)] = 1
    trained(copied)
    run.step(4)
    donated = jax.tree.map(jnp.array, MODELS[0].params)
    run.models[engine.update(donated)] = 0
    plan = engine._scheduler.schedule
    monkeypatch.setattr(engine._scheduler, "schedule", lambda: (trained(donated), plan())[1])
    with pytest.raises(EngineNotReady, match="embed was donated or deleted"):
        engine.step()
    monkeypatch.undo()
    assert engine.metrics()["device_errors"] == 0
    run.update(2)
    run.check(fresh)


def test_kept_samples_go_on_over_their_old_k_and_v(engine, fresh):
    """Tokens are those of an engine alone whose weights change before that token. Forks and snapshots are marked."""
    run = Run(engine)
    names = [(run.submit(prompt, 9), 0) for prompt in (PROMPTS[0][:5], PROMPTS[1][:4])]
    run.step(4)
    run.update(1, "keep")
    run.fork(names[0])
    snapshot = engine.snapshot(*names[0])
    with pytest.raises(SnapshotError, match="made with other weights"):
        engine.resume(snapshot, SamplingParams(max_new_tokens=2))
    run.submit(PROMPTS[0], 3)  # begins like the kept ones, and finds nothing of theirs
    run.step(4)
    run.submit(PROMPTS[1], 3)
    run.check(fresh)
    for name in names:
        prompt, sampling, _ = run.asked[name[0]]
        done = run.done[name]
        at = done.versions.count(done.versions[0])
        assert 0 < at < 9
        swapped = Run(fresh.engines[0])
        swapped.asked = {-i: None for i in range(name[0])}
        alone = fresh.engines[0].submit(prompt, sampling)
        swapped.step(at)
        swapped.update(1, "keep")
        while fresh.engines[0].has_work:
            swapped.step()
        assert scores(swapped.done[alone, 0]) == scores(done)
        Run(fresh.engines[0])


def test_scores_of_a_prompt_stay_those_of_the_weights_that_drew_the_first_token():
    seq = Sequence(0, 0, (5, 6, 7), SamplingParams(prompt_logprobs=True), seed=0, max_length=9, live=True)
    plan = SimpleNamespace(chunks=[SimpleNamespace(seq=seq, start=0, tokens=seq.prompt)])

    def score(logprob: float) -> list[float]:
        of = dict.fromkeys(("prompt_logprobs", "prompt_best_logprobs"), np.full(3, logprob))
        take_prompt_scores(plan, SimpleNamespace(**of, prompt_ranks=np.ones(3, int), prompt_best=np.ones(3, int)))
        return [seq.prompt_scores[i][0] for i in (1, 2)]

    assert [score(-1.0), score(-2.0)] == [[-1.0] * 2, [-2.0] * 2]
    seq.output.append(8)
    assert score(-3.0) == [-2.0] * 2


def test_a_fork_of_what_begins_anew_is_not_kept(engine, fresh):
    run = Run(engine)
    request = run.submit(PROMPTS[0][:5], 9)
    run.step(4)
    run.update(1, "keep")
    run.step()
    run.update(2)
    run.fork((request, 0))
    run.step(3)
    snapshots = [engine.snapshot(request, sample) for sample in range(2)]
    assert all(one.length and one.weights != SEVERAL for one in snapshots)
    run.check(fresh)


def test_nothing_holds_weights_that_were_replaced_or_closed():
    """Not a program that waits for a compiler either."""
    held = Engine(MODELS[0], **OPTIONS)
    for end in (lambda: held.update(MODELS[0].params), held.close):
        params = jax.tree.map(jnp.array, MODELS[1].params)
        held.update(params)
        waiting = held._device.programs._recipe((OPTIONS["buckets"][0], Variant(), WHOLE_STEP))
        old = weakref.ref(params.norm)
        del params
        end()
        gc.collect()
        assert old() is None, waiting
    for of_weights in (held.token_logprobs_options, lambda: held.fingerprint):
        with pytest.raises(EngineClosed, match="it was closed"):
            of_weights()


def test_weights_that_replace_the_engines_take_their_memory(fresh):
    """Does so as in a process of its own, whose weights nobody else holds."""
    engine = Engine(MODELS[0], **OPTIONS)
    run = Run(engine)
    run.update(0, form=partial(jax.tree.map, jnp.array))
    request = run.submit(PROMPTS[0], 8)
    run.step(4)
    engine.sleep()
    assert engine.lacks_room(0)
    old, compiled = jax.tree.leaves(engine._device._params), engine.metrics()["compile_programs"]
    other = jax.tree.map(np.asarray, MODELS[1].params)
    with pytest.raises(WeightsError, match=r"norm must be .*, as the engine has it, not"):
        engine.fit_weights(replace(other, norm=other.norm[1:]), replaces=True)
    weights = engine.fit_weights(other, replaces=True)
    assert not any(leaf.is_deleted() for leaf in old)
    run.models[engine.take_weights(weights)] = 1
    assert all(leaf.is_deleted() for leaf in old)
    engine.wake()
    run.check(fresh)
    assert engine.metrics()["compile_programs"] == compiled
    assert run.done[request, 0].versions[-1] == max(run.models)
    engine.close()


def test_weights_that_replaced_a_part_of_the_engines_are_replaced_by_later_ones(fresh, monkeypatch):
    engine = Engine(MODELS[0], **OPTIONS)
    run, whole, left = Run(engine), fitting._moved, [3]
    run.update(0, form=partial(jax.tree.map, jnp.array))
    request = run.submit(PROMPTS[0], 8)
    run.step(4)

    def move_some(old, x):
        left[0] -= 1
        if left[0] < 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return whole(old, x)

    old, other = jax.tree.leaves(engine._device._params), jax.tree.map(np.asarray, MODELS[1].params)
    monkeypatch.setattr(fitting, "_moved", move_some)
    engine.take_weights(engine.fit_weights(other, replaces=True))
    with pytest.raises(EngineNotReady, match="could not be made"):
        engine.step()
    assert 0 < sum(leaf.is_deleted() for leaf in old) < len(old)
    monkeypatch.undo()
    run.models[engine.take_weights(engine.fit_weights(other, replaces=True))] = 1
    run.check(fresh)
    assert run.done[request, 0].versions[-1] == max(run.models)
    engine.close()


def test_what_is_kept_is_recomputed_if_it_is_preempted(engine, fresh):
    run = Run(engine)
    for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[2]):
        run.submit(prompt, 12)
    run.step(8)
    run.update(1, "keep")
    engine.sleep()
    engine.wake()
    run.kept.clear()
    run.check(fresh)


def test_finish_lets_requests_end_first_and_later_ones_wait(engine, fresh):
    run = Run(engine)
    version, before = engine.version, [run.submit(prompt, 8, n=2) for prompt in PROMPTS[:2]]
    run.step(4)
    run.update(1, "finish")
    run.fork((before[0], 0))
    later = run.submit(PROMPTS[0], 4)
    run.step()
    run.update(2, "finish")
    assert (engine.version, engine.metrics()["waiting"] > 0) == (version, True)
    dropped = run.submit(PROMPTS[3], 4)
    engine.abort(dropped)
    run.check(fresh)
    assert engine.version == version + 2
    for (request, _), done in run.done.items():
        want = version if request in before else version + 2
        assert set(done.versions) <= {want}, request
        assert (request == dropped) == (not done.versions)
    assert (later, 0) in run.done
    run = Run(engine)
    run.submit(PROMPTS[0], 4)
    run.step(2)
    run.update(1, "finish")
    run.submit(PROMPTS[1], 4)
    run.update(2)  # replaces it, and nobody waits
    run.step(2)
    assert engine.version == max(run.models)
    run.check(fresh)


def test_asleep_it_has_no_pages_and_says_so(engine, fresh, monkeypatch):
    run = Run(engine)
    request = run.submit(PROMPTS[0], 6)
    run.step(4)
    engine.sleep()
    engine.sleep()
    assert engine._device._state is None
    assert engine.metrics()["pages_used"] == engine.metrics()["running"] == 0
    with pytest.raises(EngineNotReady, match="the engine sleeps: call wake"):
        engine.step()
    with pytest.raises(EngineNotReady, match="the engine sleeps: call wake"):
        engine.snapshot(request)
    run.fork((request, 0))
    engine.abort(run.submit(PROMPTS[1], 6))
    run.update(1)
    monkeypatch.setattr(engine._device, "_memory", lambda: 1000)
    with pytest.raises(NoRoomError, match="7 KV pages of 8 tokens take"):
        engine.wake()
    monkeypatch.undo()
    engine.wake()
    engine.wake()
    run.check(fresh)


def test_weights_are_rounded_in_the_memory_of_the_old_codes(monkeypatch):
    """Without memory, or after they were donated, the engine waits for others."""
    scheme, models = "w8a8", [tiny_model(seed=seed, num_layers=1) for seed in range(2)]
    quantized = [replace(model, params=quantize(model.params, scheme)) for model in models]
    engine, other = (Engine(each, **OPTIONS) for each in quantized)
    with pytest.raises(WeightsError, match=r"embed|layers\[0\].attention.qkv.values is missing.* give quantize="):
        engine.update(models[1].params)
    pointer = quantized[0].params.layers[0].mlp.down.values.unsafe_buffer_pointer()
    engine.update(models[1].params, quantize=scheme)
    assert quantized[0].params.layers[0].mlp.down.values.is_deleted()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(models[1].params))
    taken = engine._device._params
    assert taken.layers[0].mlp.down.values.unsafe_buffer_pointer() == pointer
    for new, want in zip(jax.tree.leaves(taken), jax.tree.leaves(quantized[1].params), strict=True):
        np.testing.assert_array_equal(new, want)
    sampling = SamplingParams(seed=1, max_new_tokens=6, logprobs=0, ignore_eos=True)

    def drawn(each: Engine) -> list:
        request = each.submit(PROMPTS[0], sampling)
        return scores([e.completion for e in each.run() if e.completion and e.id == request][0])

    want = drawn(other)
    assert drawn(engine) == want

    def stops(says: str) -> None:
        engine.submit(PROMPTS[1], sampling)
        for _ in range(2):
            with pytest.raises(EngineNotReady, match=says):
                list(engine.run())
        engine.update(models[1].params, quantize=scheme)
        assert drawn(engine) == want

    engine.submit(PROMPTS[1], sampling)
    engine.step()
    donated = jax.tree.map(jnp.array, models[0].params)
    engine.update(donated, quantize=scheme, running="finish")
    trained(donated)
    stops("embed was donated or deleted")

    def no_room(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr("jllm.engine.weights._rounded", no_room)
    engine.update(models[0].params, quantize=scheme)
    monkeypatch.undo()
    stops("could not be made: RESOURCE_EXHAUSTED")


def accepted(engine: Engine) -> dict[int, int]:
    engine.reset_metrics()
    for prompt in PROMPTS:
        engine.submit(prompt, SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True))
    list(engine.run())
    return dict(engine._loop.drafting.counts.accepted)


def test_a_quantized_copy_is_made_again(monkeypatch):
    """It then has as many drafts accepted as that of a fresh engine, and a stale one has not."""
    options = OPTIONS | {"speculate": "copy:w8a8", "drafts": 1, "prefix_cache": False, "deterministic": False}
    models = [tiny_model(seed=seed, num_layers=1) for seed in (0, 1)]
    engine, want = Engine(models[0], **options), accepted(Engine(models[1], **options))
    engine.update(models[1].params)
    assert accepted(engine) == want
    engine.update(models[0].params)
    monkeypatch.setattr(Weights, "after", lambda self, old, drafter, fit: (self.params, drafter))
    engine.update(models[1].params)
    assert accepted(engine) != want
    monkeypatch.undo()
    given = Engine(models[1], **options)._device._drafter
    engine.update(models[1].params, drafter=given)
    assert engine._device._drafter.params.norm is given.params.norm
