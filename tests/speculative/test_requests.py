"""What requests ask for ends, is cut and is told as without drafts, wherever in a step's accepted tokens it falls."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jllm
from jllm.engine.engine import Engine
from jllm.engine.request import Completion, SamplingParams
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.tree import Tree, chain
from jllm.step.buckets import Bucket
from tests.engine.test_engine import Letters
from tests.engine.test_oracle import Job, alone, assert_same, play
from tests.speculative.scripted import scripted
from tests.speculative.test_oracle import BUSHY, REPEATING, TIGHT
from tests.tiny import tiny_model

CONTEXT = 40
SMALL = {"max_slots": 3, "page_size": 8, "num_pages": 24, "max_step_tokens": 24, "buckets": (Bucket(3, 16, 3),)}
PROMPT = (5, 6, 7, 8)
TREES = {"chain": chain(3), "tree": BUSHY}
PAIRS = [(shape, kind) for shape in TREES for kind in ("right", "fallible")]


def one_of_pairs(*one: str) -> list:
    """All of PAIRS, of which the others are exhaustive."""
    return [pytest.param(*pair, marks=[pytest.mark.exhaustive] * (pair != one)) for pair in PAIRS]


FREE = SamplingParams(temperature=0.8, max_new_tokens=24, ignore_eos=True, seed=3)


@pytest.fixture(scope="module", autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model(wide):
    return tiny_model("float64", tokenizer=Letters(), num_layers=1)


def fallible(model, tree: Tree) -> DraftModel:
    """The target with noise on its weights, so that some of what it drafts is accepted."""
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(lambda x: x * (1 + 0.15 * rng.normal(size=x.shape)), model.params)
    return DraftModel(noisy, model.config, tree)


def drafted(drafter) -> dict:
    return {"speculate": drafter, "drafts": drafter.tree.size - 1}


def same_logprobs(got: Completion, want: Completion) -> None:
    assert got.token_ids == want.token_ids
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        assert (a.token_id, [t for t, _ in a.top]) == (b.token_id, [t for t, _ in b.top])
        np.testing.assert_allclose([a.logprob, *(p for _, p in a.top)], [b.logprob, *(p for _, p in b.top)], rtol=1e-10)


@pytest.mark.parametrize(("shape", "kind"), one_of_pairs("tree", "right"))
def test_stop_strings_across_accepted_tokens(model, shape, kind):
    """Strings of 1 to 5 tokens that begin at each of nine, so that they end, begin and are cut at every place of a
    step's tokens; only what is before them is kept, and what was accepted after them is not."""
    (free,) = alone(model, [Job(PROMPT, FREE, 0, None)])
    text, most = free.text, TREES[shape].depth + 1
    stops = {text[i : i + n]: text.index(text[i : i + n]) for i in range(2, 2 + 2 * most + 1) for n in range(1, 6)}
    jobs = [Job(PROMPT, replace(FREE, stop=(stop, "never"), logprobs=1), i // 3, None) for i, stop in enumerate(stops)]
    if kind == "right":
        drafter = scripted(TREES[shape], [Job(PROMPT, FREE, 0, None)], [free], right=1.0)
    else:
        drafter = fallible(model, TREES[shape])
    seen: dict = {}
    for got, (stop, at) in zip(play(model, jobs, SMALL | drafted(drafter), seen), stops.items(), strict=True):
        assert (got.text, got.token_ids, got.finish_reason) == (text[:at], free.token_ids[:at], "stop"), stop
        assert len(got.logprobs) == at
    assert seen["draft_tokens_mean"] > (0.7 * most if kind == "right" else 1.3)
    assert (min(seen["draft_acceptance"].values()) == 1) == (kind == "right")


@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.exhaustive)])
def test_streamed_text_is_certain(model, shape):
    """No piece has a part of a stop string that a later step's tokens complete; pieces make up what generate says."""
    (free,) = alone(model, [Job(PROMPT, FREE, 0, None)])
    stop = free.text[9:13]
    sampling = [FREE, replace(FREE, stop=(stop,)), replace(FREE, seed=8)]
    options = SMALL | drafted(fallible(model, TREES[shape])) | {"executables": None}
    plain = jllm.generate(model, [list(PROMPT)] * 3, sampling, **{**SMALL, "executables": None})
    texts, ids, done = [""] * 3, [()] * 3, {}
    for piece in jllm.stream(model, [list(PROMPT)] * 3, sampling, **options):
        texts[piece.prompt] += piece.text
        ids[piece.prompt] += piece.token_ids
        assert plain[piece.prompt].text.startswith(texts[piece.prompt])
        if piece.completion:
            done[piece.prompt] = piece.completion
    assert texts == [completion.text for completion in plain] == [done[i].text for i in range(3)]
    assert ids == [completion.token_ids for completion in plain] == [done[i].token_ids for i in range(3)]
    assert texts[1] == free.text[:9]


def test_a_stream_that_is_left_half_way(model):
    stream = jllm.stream(model, list(PROMPT), FREE, **SMALL, **drafted(fallible(model, BUSHY)), executables=None)
    first = next(stream)
    assert first.completion is None
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize(("shape", "kind"), one_of_pairs("tree", "fallible"))
def test_the_end_of_the_context_inside_a_draft(shape, kind):
    """From every distance, and in a pool that has pages for the context and none for what is drafted past it."""
    model = tiny_model("float64", context=CONTEXT, num_layers=1)
    prompts = [tuple(range(3, 3 + CONTEXT - left)) for left in range(1, 9)]
    jobs = [Job(prompt, replace(FREE, max_new_tokens=1000, seed=i), i, None) for i, prompt in enumerate(prompts)]
    wants = list(alone(model, jobs))
    drafter = scripted(TREES[shape], jobs, wants, right=1.0) if kind == "right" else fallible(model, TREES[shape])
    options = SMALL | {"num_pages": 2 * -(-CONTEXT // 8), "max_slots": 2, "buckets": (Bucket(2, 16, 2),)}
    seen: dict = {}
    for left, (got, want) in enumerate(zip(play(model, jobs, options | drafted(drafter), seen), wants, strict=True), 1):
        assert_same(got, want, False)
        assert (len(got.token_ids), got.finish_reason) == (left, "length")
    assert seen["draft_segments"] > 5


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_the_last_token_that_was_asked_for_inside_a_draft(model, most):
    jobs = [Job(PROMPT, replace(FREE, max_new_tokens=most, logprobs=2), 0, None)]
    (want,) = alone(model, jobs)
    for tree in TREES.values():
        (got,) = play(model, jobs, SMALL | drafted(scripted(tree, jobs, [want], right=1.0)))
        assert_same(got, want, False)
        same_logprobs(got, want)


@pytest.mark.usefixtures("compiled_in_turn")
@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.exhaustive)])
def test_logprobs_beside_requests_that_ask_for_none(model, shape):
    """Also of samples that preemption has computed again."""
    params = [replace(FREE, seed=i, temperature=i % 2, logprobs=(None, 0, 5)[i % 3]) for i in range(5)]
    params[3] = replace(params[3], logprobs=20, frequency_penalty=0.7, repetition_penalty=1.2)
    jobs = [Job(prompt, p, 2 * i, None) for i, (prompt, p) in enumerate(zip(REPEATING, params, strict=True))]
    seen: dict = {}
    options = TIGHT | drafted(fallible(model, TREES[shape]))
    got = play(model, jobs, options, seen)
    for completion, want in zip(got, alone(model, jobs), strict=True):
        assert_same(completion, want, False)
        assert (completion.logprobs is None) == (want.logprobs is None)
        if want.logprobs is not None:
            same_logprobs(completion, want)
    assert seen["preemptions"]
    assert 0.2 < seen["draft_acceptance"][1] < 1


@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.exhaustive)])
def test_samples_of_one_request(model, shape):
    """Each draws with a key of its own, and so does its drafter: samples part, and drafts are accepted of them all."""
    sampling = replace(FREE, n=3, logprobs=2, stop=("q",))

    def samples(**options) -> tuple[list[Completion], dict]:
        engine = Engine(model, **SMALL, **options)
        engine.submit(list(range(3, 20)), sampling)
        done = {e.sample: e.completion for e in engine.run() if e.completion}
        return [done[i] for i in range(3)], engine.metrics()

    wants, _ = samples(prefix_cache=False)
    assert len({want.token_ids for want in wants}) == 3
    got, metrics = samples(**drafted(DraftModel(model.params, model.config, TREES[shape])))
    for completion, want in zip(got, wants, strict=True):
        assert_same(completion, want, False)
        same_logprobs(completion, want)
    assert set(metrics["draft_acceptance"].values()) == {1.0}


@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_a_fork_between_drafts(model, shape, steps):
    """It goes on from the tokens that were read, with those that plain decoding forked there would have."""

    def forked(ready, **options) -> tuple[int, dict[int, Completion]]:
        """Forks once `ready`, which is given the engine's steps and the tokens that were read."""
        engine = Engine(model, **SMALL, **options)
        request, step, ids, done = engine.submit(list(PROMPT), FREE), 0, (), {}
        while not ready(step, len(ids)):
            ids += sum((e.token_ids for e in engine.step()), ())
            step += 1
        assert engine.fork(request) == 1
        assert engine.fork(request) == 2
        done = {e.sample: e.completion for e in engine.run() if e.completion}
        return len(ids), done

    drafter = DraftModel(model.params, model.config, TREES[shape])
    known, got = forked(lambda step, tokens: step == steps, **drafted(drafter))
    reached, want = forked(lambda step, tokens: tokens == known)
    assert reached == known > 0
    assert len({completion.token_ids for completion in want.values()}) == 3
    assert {i: c.token_ids for i, c in got.items()} == {i: c.token_ids for i, c in want.items()}
