"""The oracle of the whole engine: any company in the batch, same tokens.

Whatever the interleaving, page size, chunk size, buckets, preemption or aborts of others, each request gets the tokens
that it gets alone. In float64 this holds exactly. In float32 the rows of an XLA CPU matmul change in their last bits
with the number of rows, so tokens are compared up to the first position where the two best logits nearly tie.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.engine.scheduler import Scheduler
from jllm.kv_policies.extent import Extent
from jllm.kv_policies.length import Longest, Quantile
from jllm.kv_policies.predicted import Predicted
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from tests.tiny import CONFIG, full_logits, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, assume, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ALONE = {"max_slots": 1, "page_size": 128, "max_step_tokens": 64, "buckets": (Bucket(1, 64, 1),)}
TINY = "pages of 8, tiny chunks"
COMPANY = {  # each compiles one or two steps, once
    TINY: {"max_slots": 3, "page_size": 8, "max_step_tokens": 5, "buckets": (Bucket(3, 5, 3),)},
    "pool that forces preemption": {
        "max_slots": 4,
        "page_size": 8,
        "num_pages": 9,  # 72 tokens: more than any one of the requests here needs, less than four do
        "max_step_tokens": 16,
        "buckets": (Bucket(4, 0, 0), Bucket(4, 16, 3)),
    },
    "pages of 32, whole prompts": {
        "max_slots": 6,
        "page_size": 32,
        "max_step_tokens": 64,
        "buckets": (Bucket(6, 64, 6),),
    },
    "two slots, pages of 16": {
        "max_slots": 2,
        "page_size": 16,
        "num_pages": 6,
        "max_step_tokens": 8,
        "buckets": (Bucket(1, 0, 0), Bucket(2, 8, 2)),
    },
}


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int  # engine steps before it is submitted
    abort_after: int | None  # engine steps after arrival
    priority: int = 0


tokens = st.integers(0, CONFIG.vocab_size - 1)
sampled = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    max_new_tokens=st.integers(1, 24),
    stop_token_ids=st.sampled_from([(), (5, 17), tuple(range(20, 32))]),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
jobs = st.builds(
    Job,
    prompt=st.lists(tokens, min_size=1, max_size=40).map(tuple),
    params=sampled,
    arrival=st.integers(0, 12),
    abort_after=st.none() | st.none() | st.integers(0, 15),
    priority=st.sampled_from([0, 0, 0, -1, 5]),
)


def play(model, jobs: list[Job], options: dict, seen: dict | None = None) -> list[Completion]:
    """Submits and aborts at the given engine steps; completions in the order of the jobs, and metrics in `seen`."""
    engine = Engine(model, **options)
    ids: dict[int, int] = {}
    done: dict[int, Completion] = {}
    clock = 0
    while len(done) < len(jobs):
        for i, job in enumerate(jobs):
            if job.arrival == clock:
                ids[i] = engine.submit(list(job.prompt), job.params, priority=job.priority)
            if job.abort_after is not None and job.arrival + job.abort_after == clock and ids[i] not in done:
                engine.abort(ids[i])
        done.update({e.id: e.completion for e in engine.step() if e.completion})
        clock += 1
        assert clock < 2000, "the engine makes no progress"
    while engine.has_work:
        engine.step()
    pool = engine.metrics()
    assert pool["pages_free"] == pool["pages_total"], "pages were lost"
    (seen if seen is not None else {}).update(pool)
    return [done[ids[i]] for i in range(len(jobs))]


def alone(model, jobs: Iterable[Job], **options) -> Iterator[Completion]:
    """What each job gets by itself: one engine has them one after the other."""
    engine = Engine(model, **{**ALONE, "prefix_cache": False, **options})
    for job in jobs:
        engine.submit(list(job.prompt), job.params)
        *_, last = engine.run()
        yield last.completion


def assert_same(got: Completion, want: Completion, aborted: bool):
    if aborted and got.finish_reason == "abort":
        assert got.token_ids == want.token_ids[: len(got.token_ids)]
    else:
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)


@pytest.fixture(scope="module")
def model64():
    with jax.enable_x64(True):
        yield tiny_model("float64")


@pytest.mark.parametrize("company", COMPANY)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(jobs, min_size=1, max_size=7))
def test_any_company_same_tokens(model64, company, jobs):
    with jax.enable_x64(True):
        got = play(model64, jobs, COMPANY[company])
        for job, completion, want in zip(jobs, got, alone(model64, jobs), strict=True):
            assert_same(completion, want, job.abort_after is not None)


class Wrong(Longest):
    """Outputs of 1 to 12 tokens, then as many more, whatever they are."""

    def predict(self, prompt, params, quantile, produced=0):
        return produced + 1 + (7 * sum(prompt) + 5 * produced) % 12


def told() -> Quantile:
    """Of many short outputs."""
    quantile = Quantile()
    for n in range(40):
        quantile.observe((), SamplingParams(), 1 + n % 8, ended=True)
    return quantile


POLICIES = {
    "reserve": lambda: "reserve",
    "paged, quantile": lambda: Predicted(told(), quantile=0.5, watermark=0.1),
    "paged, wrong": lambda: Predicted(Wrong()),
    "extent, scattered": lambda: Extent(Wrong(), overflow="scatter"),
    "extent, moved": lambda: Extent(Wrong(), overflow="move"),
}
POOLS = {  # the pool of COMPANY, and one of large pages
    8: COMPANY["pool that forces preemption"],
    64: {"max_slots": 4, "page_size": 64, "num_pages": 5, "max_step_tokens": 16, "buckets": (Bucket(4, 16, 3),)},
}
JOBS = {8: (14, (1, 40), 30), 64: (65, (30, 64), 80)}  # arguments of random_jobs for which every policy does its own


def random_jobs(seed: int, prompts: tuple[int, int], new: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    jobs = []
    for i in range(10):
        tokens = tuple(rng.integers(0, CONFIG.vocab_size, rng.integers(*prompts)).tolist())
        stops = tuple(rng.integers(0, CONFIG.vocab_size, 2).tolist())
        kind = {"temperature": float(i % 3) / 2, "stop_token_ids": stops, "ignore_eos": True, "seed": i}
        params = SamplingParams(max_new_tokens=int(rng.integers(new // 2, new)), **kind)
        jobs.append(Job(tokens, params, int(rng.integers(0, 9)), 9 if i % 5 == 4 else None))
    return jobs


@pytest.fixture(scope="module", params=POOLS)
def policy_jobs(request, model64):
    """The options of a pool, jobs for it, and what each job gets alone."""
    page_size = request.param
    jobs = random_jobs(*JOBS[page_size])
    with jax.enable_x64(True):
        return POOLS[page_size], jobs, list(alone(model64, jobs))


@pytest.mark.parametrize("policy", POLICIES)
def test_any_company_same_tokens_under_every_policy(model64, policy_jobs, policy):
    options, jobs, wants = policy_jobs
    seen: dict = {}
    with jax.enable_x64(True):
        got = play(model64, jobs, {**options, "kv_policy": POLICIES[policy]()}, seen)
    for job, completion, want in zip(jobs, got, wants, strict=True):
        assert_same(completion, want, job.abort_after is not None)
    assert (seen["preemptions"] > 0) == (seen["outgrown"] > 0) == (policy != "reserve"), "another test than it was"
    assert (seen["moves"] > 0) == (policy == "extent, moved"), "another test than it was"


FREE = {"max_new_tokens": 24, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": True}
ASKING = [
    SamplingParams(temperature=0.0, repetition_penalty=1.5, seed=1, **FREE),
    SamplingParams(temperature=0.8, logit_bias={3: 4.0, 9: -float("inf")}, seed=3, **FREE),
    SamplingParams(temperature=0.0, **FREE),  # asks for no penalty, and must get none
    SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=1.0, seed=2, **FREE),
    SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0, repetition_penalty=1.2, **FREE),
]


def test_penalties_and_logprobs_survive_company_and_preemption(model64, monkeypatch):
    prompts = [(5, 6, 7, 5, 6), (9,), tuple(range(50, 60)), (3, 3, 4), (70, 71, 72)]
    jobs = [Job(p, s, i, None) for i, (p, s) in enumerate(zip(prompts, ASKING, strict=True))]
    preempted = []
    preempt = Scheduler._preempt

    def spy(self, seq):
        preempted.append((seq.request_id, len(seq.output)))
        preempt(self, seq)

    monkeypatch.setattr(Scheduler, "_preempt", spy)
    with jax.enable_x64(True):
        got = play(model64, jobs, COMPANY["pool that forces preemption"])
        assert any(id >= 3 and tokens > 2 for id, tokens in preempted), "counts of the output must be recomputed"
        for completion, want in zip(got, alone(model64, jobs), strict=True):
            assert_same(completion, want, False)
            np.testing.assert_allclose(completion.prompt_logprobs, want.prompt_logprobs, rtol=1e-10)
            for a, b in zip(completion.logprobs, want.logprobs, strict=True):
                assert [t for t, _ in a.top] == [t for t, _ in b.top]
                assert a.logprob == pytest.approx(b.logprob, rel=1e-10)


def test_windows_that_cross_pages_and_chunks():
    """Against the forward without a cache, whose mask knows nothing of pages."""
    with jax.enable_x64(True):
        model = tiny_model("float64", windows=(11, None))
        prompts = [tuple(range(3, 60)), (5, 6, 7), tuple(range(10, 40))]
        params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
        for job, done in zip(
            prompts, play(model, [Job(p, params, 0, None) for p in prompts], COMPANY[TINY]), strict=True
        ):
            logits = full_logits(model, [*job, *done.token_ids])
            assert list(done.token_ids) == logits[len(job) - 1 : -1].argmax(axis=-1).tolist()


FORMATS = ["fp8", "k=int8-g16,v=f32", "k=int4-g8-h,v=int4-g16-zp"]


@pytest.mark.parametrize("kv_cache", FORMATS)
def test_every_kv_format(kv_cache):
    """Attention reads K and V only as stored, so rounding does not depend on chunks or on company either."""
    prompts = [tuple(range(3, 30)), (50, 3, 3), tuple(range(60, 80)), (7,)]
    jobs = [
        Job(p, SamplingParams(temperature=t, max_new_tokens=16, seed=i, ignore_eos=True), i, None)
        for i, (p, t) in enumerate(zip(prompts, (0.0, 1.0, 0.7, 0.0), strict=True))
    ]
    with jax.enable_x64(True):
        model = tiny_model("float64", num_layers=1)
        options = COMPANY[TINY] | {"kv_cache": kv_cache}  # also for each alone, so that one step is compiled
        for completion, want in zip(play(model, jobs, options), alone(model, jobs, **options), strict=True):
            assert_same(completion, want, False)


QUANTIZED = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1}  # groups of 32 fit


@pytest.fixture(scope="module", params=["w8a8-all", pytest.param("w4a16-g32", marks=pytest.mark.exhaustive)])
def quantized64(request):
    with jax.enable_x64(True):
        model = tiny_model("float64", **QUANTIZED)
        yield replace(model, params=quantize(model.params, request.param))


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(jobs, min_size=2, max_size=7))
def test_any_company_same_tokens_with_quantized_weights(quantized64, jobs):
    """A token's activations are quantized by a scale of its own."""
    with jax.enable_x64(True):
        got = play(quantized64, jobs, COMPANY["pool that forces preemption"])
        for job, completion, want in zip(jobs, got, alone(quantized64, jobs), strict=True):
            assert_same(completion, want, job.abort_after is not None)


def in_company(scheme: str) -> list[tuple[Completion, Completion]]:
    """What each of some requests gets together with the others, and alone."""
    prompts = [tuple(range(3, 30)), (50, 3, 3), tuple(range(60, 80)), (7,)]
    jobs = [Job(p, SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True), 0, None) for p in prompts]
    with jax.enable_x64(True):
        model = tiny_model("float64", **QUANTIZED)
        model = replace(model, params=quantize(model.params, scheme))
        options = COMPANY[TINY] | {"kv_cache": "int8-g8"}
        return list(zip(play(model, jobs, options), alone(model, jobs, **options), strict=True))


@pytest.mark.parametrize("scheme", ["w8a8-groups", "fp8-b128", "llm-int8-t1"])
def test_every_kind_of_activations(scheme):
    for got, want in in_company(scheme):
        assert_same(got, want, False)


def test_the_oracle_notices_a_scale_that_all_tokens_share():
    """The fault that per-token scales are there for; so w8a8-tensor is for experiments."""
    assert any(got.token_ids != want.token_ids for got, want in in_company("w8a8-tensor"))


TIE = 1e-3  # a top-two gap (natural log) under which float32 may choose either


@settings(max_examples=8)
@given(prompts=st.lists(st.lists(tokens, min_size=1, max_size=30), min_size=2, max_size=6))
def test_float32_up_to_the_first_near_tie(prompts):
    model = tiny_model(num_layers=1)
    params = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True, logprobs=2)
    jobs = [Job(tuple(p), params, i, None) for i, p in enumerate(prompts)]
    compared = 0
    together = play(model, jobs, COMPANY["two slots, pages of 16"])
    for got, want in zip(together, alone(model, jobs), strict=True):
        for a, b, info in zip(got.token_ids, want.token_ids, want.logprobs, strict=True):
            if info.top[0][1] - info.top[1][1] < TIE:
                break
            assert a == b
            compared += 1
    assume(compared >= 8)  # were that never so, hypothesis would say that nothing satisfies it


def test_the_oracle_notices_a_stale_page_table(model64, monkeypatch):
    """Seeded fault: page table changes that are forgotten must change tokens."""
    from jllm.step import forward as step_forward

    monkeypatch.setattr(step_forward, "_change_pages", lambda slots, deltas: slots)
    job = Job(tuple(range(3, 40)), SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True), 0, None)
    other = Job(tuple(range(50, 80)), job.params, 0, None)
    with jax.enable_x64(True):
        # A context of its own gives the faulty step a compilation of its own.
        faulty = play(tiny_model("float64", context=120), [job, other], COMPANY["pages of 32, whole prompts"])
        monkeypatch.undo()
        assert faulty[0].token_ids != next(alone(model64, [job])).token_ids
