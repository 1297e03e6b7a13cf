"""The oracle with drafts: whatever is drafted, each request gets the tokens that it gets alone and without drafts.

In float64 this holds exactly, for log-probabilities within 1e-10.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jllm.engine.request import SamplingParams
from jllm.speculative.accept import accept
from jllm.speculative.ngram import NGram
from jllm.speculative.tree import Tree, chain
from jllm.step import rows
from jllm.step import sample as step_sample
from jllm.step.buckets import Bucket
from tests.engine.test_oracle import ASKING, COMPANY, TINY, Job, alone, assert_same, jobs, play
from tests.speculative.scripted import MOST, scripted
from tests.tiny import tiny_model

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

BUSHY = Tree((0, 0, 0, 1, 1, 2, 4))
SHAPES = {"1": chain(1), "3": chain(3), "7": chain(7), "tree": BUSHY, "wide tree": Tree((0, 0, 1, 1, 2, 2))}
POOL = "pool that forces preemption"
TIGHT = COMPANY[POOL] | {"buckets": (Bucket(4, 16, 3),)}  # the same with one size beside that of drafts
RUNS = [  # test_ngrams has two slots, test_right_drafts_take_fewer_steps whole prompts
    ("tree", POOL),
    ("3", TINY),
    *(pytest.param(name, POOL, marks=pytest.mark.exhaustive) for name in ("1", "7", "wide tree")),
    pytest.param("3", "two slots, pages of 16", marks=pytest.mark.exhaustive),
    pytest.param("tree", "pages of 32, whole prompts", marks=pytest.mark.exhaustive),
]


@pytest.fixture(scope="module")
def model64():
    with jax.enable_x64(True):
        yield tiny_model("float64", num_layers=1)


def with_drafts(shape: str, jobs, wants, **options) -> dict:
    drafter = scripted(SHAPES[shape], jobs, wants, **options)
    return {"speculate": drafter, "drafts": drafter.tree.size - 1}


@pytest.mark.parametrize(("shape", "company"), RUNS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(jobs, min_size=1, max_size=7),
    right=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    ragged=st.booleans(),
)
def test_any_drafts_same_tokens(model64, shape, company, jobs, right, ragged):
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        got = play(model64, jobs, COMPANY[company] | with_drafts(shape, jobs, wants, right=right, ragged=ragged))
    for job, completion, want in zip(jobs, got, wants, strict=True):
        assert_same(completion, want, job.abort_after is not None)


REPEATING = (tuple([5, 6, 7] * 8), (9, 9, 9, 9), tuple(range(40, 60)) * 2, (3,), tuple([8, 1] * 5))


def some_jobs(**changes) -> list[Job]:
    params = {"max_new_tokens": 24, "ignore_eos": True, **changes}
    return [
        Job(prompt, SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, **params), 2 * i, None)
        for i, prompt in enumerate(REPEATING)
    ]


@pytest.mark.parametrize("shape", ["3", "tree"])
def test_right_drafts_take_fewer_steps(model64, shape):
    """And their acceptance is counted: an answer that is always right is always accepted."""
    jobs, seen, plain = some_jobs(), {}, {}
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        company = COMPANY["pages of 32, whole prompts"]
        play(model64, jobs, company, plain)
        play(model64, jobs, company | with_drafts(shape, jobs, wants, right=1.0), seen)
    assert seen["output_tokens"] == plain["output_tokens"] == 24 * len(jobs)
    depth = SHAPES[shape].depth
    assert seen["steps"] < plain["steps"] * (1 + 1 / (1 + depth)) / 2
    assert seen["draft_acceptance"].keys() == set(range(1, depth + 1))
    assert seen["draft_acceptance"][1] > 0.9
    assert seen["draft_tokens_mean"] > 0.7 * (1 + depth)


@pytest.mark.usefixtures("compiled_in_turn")
def test_penalties_and_logprobs_count_accepted_tokens(model64):
    prompts = [(5, 6, 7, 5, 6), (9,), tuple(range(50, 60)), (3, 3, 4), (70, 71, 72)]
    jobs = [Job(p, s, i, None) for i, (p, s) in enumerate(zip(prompts, ASKING, strict=True))]
    seen: dict = {}
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        assert len({want.token_ids for want in wants}) == len(jobs)
        got = play(model64, jobs, TIGHT | with_drafts("tree", jobs, wants, right=0.9), seen)
    assert seen["preemptions"]
    assert seen["draft_tokens_mean"] > 1.1
    for completion, want in zip(got, wants, strict=True):
        assert_same(completion, want, False)
        np.testing.assert_allclose(completion.prompt_logprobs, want.prompt_logprobs, rtol=1e-10)
        for a, b in zip(completion.logprobs, want.logprobs, strict=True):
            assert [t for t, _ in a.top] == [t for t, _ in b.top]
            assert a.logprob == pytest.approx(b.logprob, rel=1e-10)


@pytest.mark.parametrize(
    ("kv_cache", "shape"),
    [("int8-g8", "tree"), pytest.param("k=int4-g8,v=f32", "3", marks=pytest.mark.exhaustive)],
)
def test_every_kv_format(kv_cache, shape):
    """Codes of accepted drafts are those that a plain step would have written."""
    jobs = some_jobs()
    with jax.enable_x64(True):
        model = tiny_model("float64", num_layers=1)
        options = TIGHT | {"kv_cache": kv_cache}
        wants = list(alone(model, jobs, kv_cache=kv_cache, page_size=8))
        for completion, want in zip(play(model, jobs, options | with_drafts(shape, jobs, wants)), wants, strict=True):
            assert_same(completion, want, False)


def test_windows():
    """A tree's nodes see by their positions, not by their places."""
    jobs = some_jobs()
    with jax.enable_x64(True):
        model = tiny_model("float64", windows=(11, None))
        wants = list(alone(model, jobs))
        for completion, want in zip(play(model, jobs, TIGHT | with_drafts("tree", jobs, wants)), wants, strict=True):
            assert_same(completion, want, False)


@pytest.mark.parametrize("policy", [{"kv_policy": "reserve"}, {"kv_policy": "extent"}, {"prefix_cache": False}])
def test_policies(model64, policy):
    jobs = some_jobs()
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        options = TIGHT | with_drafts("tree", jobs, wants) | policy
        for completion, want in zip(play(model64, jobs, options), wants, strict=True):
            assert_same(completion, want, False)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs=st.lists(jobs, min_size=1, max_size=MOST - 1), repeat=st.integers(1, 4))
def test_ngrams(model64, jobs, repeat):
    """With what the prefix cache skips told to the drafter."""
    jobs = [replace(job, prompt=(job.prompt * repeat)[:60]) for job in jobs]
    options = COMPANY["two slots, pages of 16"] | {"speculate": NGram(3, shortest=1), "drafts": 3, "num_pages": 12}
    with jax.enable_x64(True):
        for job, got, want in zip(jobs, play(model64, jobs, options), alone(model64, jobs), strict=True):
            assert_same(got, want, job.abort_after is not None)


FAULTS = {
    "what was drafted is accepted": (
        rows,
        "accept",
        lambda tree, drafted, drawn, used: (drafted[:, : tree.depth + 1] * 0, used),
    ),
    "a draft that was not verified is accepted": (
        rows,
        "accept",
        lambda tree, drafted, drawn, used: accept(tree, drafted, drawn, used * 0 + tree.size),
    ),
    "the tree's nodes stay where they are": (step_sample, "_compact", lambda state, *_: state.cache),
    "penalties forget drafts": (rows.HeadRows, "drafts_before", lambda rows: None),
}


@pytest.fixture(scope="module")
def drafted():
    """A model, jobs, options with drafts for which each gets what it gets alone, and what that is."""
    params = SamplingParams(temperature=0.7, repetition_penalty=1.3, max_new_tokens=40, ignore_eos=True, seed=4)
    jobs = [Job((5, 6, 7), params, 0, None), Job((9, 8), replace(params, seed=7), 0, None)]
    with jax.enable_x64(True):
        model = tiny_model("float64", num_layers=1)
        wants = list(alone(model, jobs))
        options = {"max_slots": 2, "page_size": 8, "max_step_tokens": 24, "buckets": (Bucket(2, 8, 2),)}
        options |= with_drafts("tree", jobs, wants, right=0.6, ragged=True)
        for got, want in zip(play(model, jobs, options), wants, strict=True):
            assert_same(got, want, False)
    return model, jobs, options, wants


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(drafted, fault, monkeypatch):
    (place, name, wrong), (model, jobs, options, wants) = FAULTS[fault], drafted
    config = replace(model.config, context=120 + list(FAULTS).index(fault))  # no step of it is compiled yet
    monkeypatch.setattr(place, name, wrong)
    with jax.enable_x64(True):
        faulty = play(replace(model, config=config), jobs, options)
    assert [got.token_ids for got in faulty] != [want.token_ids for want in wants]
