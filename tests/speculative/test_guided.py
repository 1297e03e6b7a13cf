"""Guides with drafts: the tokens are those of plain decoding, and what a guide forces is drafted."""

import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.guides.guide import Guide
from jllm.speculative.drafter import Advance, Proposal
from jllm.speculative.forced import coming_tokens, with_forced
from jllm.speculative.tree import Tree, chain
from jllm.step import draft as step_draft
from jllm.step import rows
from jllm.step.buckets import choose_bucket
from tests.ascii import EOS, TOKENIZER
from tests.engine.test_oracle import COMPANY, Job, alone, assert_same, play
from tests.speculative.scripted import scripted
from tests.speculative.test_oracle import BUSHY, POOL
from tests.tiny import CONFIG, tiny_model

pytest.importorskip("llguidance")
pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from jllm.guides.matcher import Guided, Guides  # noqa: E402
from jllm.model.sampling import words  # noqa: E402
from tests.guides.test_guided import GUIDES  # noqa: E402

SHAPES = {"chain": chain(3), "tree": BUSHY}
LIKELY = tuple(TOKENIZER.vocabulary.encode('ae"x'))
KEYS = Guide.json(
    {
        "type": "object",
        "properties": {"animal": {"enum": ["cat", "dog"]}, "colour": {"enum": ["grey", "green"]}},
        "required": ["animal", "colour"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def model64():
    with jax.enable_x64(True):
        yield tiny_model("float64", tokenizer=TOKENIZER)


@pytest.fixture(scope="module")
def guides():
    return Guides(TOKENIZER, CONFIG.vocab_size, CONFIG.eos_ids)


trees = st.integers(0, 6).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n)))).map(Tree)
letters = st.sampled_from([*TOKENIZER.vocabulary.encode('abcdefyesno, "x()[]7'), EOS, -1, CONFIG.vocab_size])


@settings(max_examples=75)
@given(data=st.data(), guide=st.sampled_from([*GUIDES, KEYS]), tree=trees)
def test_a_mask_of_each_node_is_that_of_its_path(guides, data, guide, tree):
    def fits(tokens):
        real = all(0 <= token < CONFIG.vocab_size for token in tokens)
        return real and guides.matcher(guide).state.validate_tokens(tokens) == len(tokens)

    def after(tokens):
        if not fits(tokens):
            return np.zeros(words(CONFIG.vocab_size), np.uint32)
        return guides.masks([Guided(guides.matcher(guide), tokens)], chain(0))[0, 0]

    def next_token(tokens):
        allowed = np.flatnonzero(np.unpackbits(after(tokens).view(np.uint8), bitorder="little")).tolist()
        return data.draw(st.sampled_from(allowed) | letters if allowed else letters)

    matcher, tokens = guides.matcher(guide), []
    for _ in range(data.draw(st.integers(0, 6))):
        token = next_token(tokens)
        if token == EOS or not fits([*tokens, token]):
            break
        tokens.append(token)
    drafts = []
    for node in range(1, tree.size):
        drafts.append(
            data.draw(letters) if node % 3 == 0 else next_token([*tokens, *_on(tree.paths[node][1:-1], drafts)])
        )
    known = drafts[: data.draw(st.integers(0, len(drafts)))]
    (found,) = guides.masks([Guided(matcher, tokens, known)], tree)
    for node, path in enumerate(tree.paths):
        if max(path) <= len(known) and EOS in _on(path[1:], known):
            continue  # the sample has ended there
        want = after([*tokens, *_on(path[1:], known)]) if max(path) <= len(known) else np.zeros_like(found[node])
        np.testing.assert_array_equal(found[node], want, err_msg=f"node {node}")
    (coming,) = guides.coming([Guided(matcher, tokens, known)], tree, True)
    assert len(coming) == coming_tokens(tree)
    some = [token for token in coming.tolist() if token >= 0]
    assert coming.tolist() == some + [-1] * (len(coming) - len(some))
    assert fits([*tokens, *some])
    assert (guides.coming([Guided(matcher, tokens, known)], tree, False) == -1).all()
    np.testing.assert_array_equal(
        guides.masks([Guided(matcher, tokens)], chain(0))[0, 0], after(tokens), "it is where it was"
    )


def _on(path, drafts):
    return [drafts[node - 1] for node in path]


@settings(max_examples=40)
@given(data=st.data(), tree=trees.filter(lambda tree: tree.size > 1))
def test_forced_tokens_take_the_first_path(data, tree):
    few, W = st.integers(0, 2), tree.depth + 1
    tokens = data.draw(st.lists(few, min_size=W, max_size=W))
    count = data.draw(st.integers(0, W))
    length = data.draw(st.integers(0, coming_tokens(tree)))
    coming = (tokens[:count] + data.draw(st.lists(few, min_size=20, max_size=20)))[:length]
    if data.draw(st.booleans()):
        coming = data.draw(st.lists(few, min_size=length, max_size=length))
    drafts = data.draw(st.lists(few, min_size=tree.size - 1, max_size=tree.size - 1))
    known = data.draw(st.integers(0, tree.size - 1))
    advance = Advance(**dict.fromkeys(Advance.__dataclass_fields__))
    advance = replace(advance, tokens=np.array([tokens], np.int32), count=np.array([count], np.int32))
    padded = np.array([coming + [-1] * (coming_tokens(tree) - length)], np.int32)
    found = Proposal(np.array([drafts], np.int32), np.array([known], np.int32), (), None)
    found = with_forced(jax.tree.map(jax.numpy.asarray, found), jax.tree.map(jax.numpy.asarray, advance), padded, tree)
    follows = coming[count:] if coming[:count] == tokens[:count] else []
    path = tree.first_path[1:][: len(follows)]
    want = list(drafts)
    for node, token in zip(path, follows):
        want[node - 1] = token
    assert found.tokens.tolist() == [want]
    assert found.count.tolist() == [max([known, *path])]


def some_jobs() -> list[Job]:
    """Guided ones, and one that is not, which all decode together."""
    guides = [Guide.regex("([a-e]{2}-){4,9}x"), KEYS, None, Guide.regex("(no|yes|n[a-d]*|,){20}")]
    params = {"max_new_tokens": 40, "ignore_eos": False}
    return [
        Job(
            tuple(range(5 + i, 12 + i)),
            SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=i, guide=guide, **params),
            0,
            None,
        )
        for i, guide in enumerate(guides)
    ]


def with_drafts(shape: str, jobs, wants, **options) -> dict:
    drafter = scripted(SHAPES[shape], jobs, wants, likely=LIKELY, **options)
    return {"speculate": drafter, "drafts": drafter.tree.size - 1}


def check_any_drafts(model64, shape, company, right) -> dict:
    jobs, seen = some_jobs(), {}
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        got = play(model64, jobs, COMPANY[company] | with_drafts(shape, jobs, wants, right=right, ragged=True), seen)
    for completion, want in zip(got, wants, strict=True):
        assert_same(completion, want, False)
    return seen


@pytest.mark.parametrize(
    ("shape", "company", "right"),
    [("tree", POOL, 0.6), pytest.param("chain", "two slots, pages of 16", 0.9, marks=pytest.mark.exhaustive)],
)
def test_any_drafts_same_tokens(model64, shape, company, right):
    seen = check_any_drafts(model64, shape, company, right)
    assert seen["draft_tokens_mean"] > 1.2
    if company == POOL:
        assert seen["preemptions"]


def test_a_step_of_fewer_rows_than_planned(model64):
    """The size with rows for drafts is not compiled yet: the step takes another, and no draft is verified."""
    jobs = some_jobs()[:2]
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        options = COMPANY["two slots, pages of 16"] | with_drafts("chain", jobs, wants, right=0.9)
        engine = Engine(model64, **options)
        plain = [bucket for bucket in engine.sizes.buckets if bucket.rows == 1]

        def choose(need, decodes, tokens, chunks, rows):
            return choose_bucket(plain, decodes, tokens, chunks), need

        engine._device.programs.choose = choose
        ids = [engine.submit(job.prompt, job.params) for job in jobs]
        done = {event.id: event.completion for event in engine.run() if event.completion}
    for id, want in zip(ids, wants, strict=True):
        assert_same(done[id], want, False)
    assert not engine.metrics()["draft_segments"]


def check_forced(model64, shape) -> None:
    """A drafter that is never right: what is accepted is what the guide forces."""
    jobs = [
        Job((9,) * 7, SamplingParams(temperature=1.0, seed=i, max_new_tokens=80, guide=KEYS), i, None) for i in (0, 1)
    ]
    plain, seen = {}, {}
    company = COMPANY["pages of 32, whole prompts"]
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        play(model64, jobs, company, plain)
        got = play(model64, jobs, company | with_drafts(shape, jobs, wants, right=0.0), seen)
    for completion, want in zip(got, wants, strict=True):
        assert_same(completion, want, False)
        assert completion.finish_reason == "stop"
    assert seen["steps"] < 0.75 * plain["steps"]


ONE = ["chain", pytest.param("tree", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("shape", ONE)
def test_forced_tokens_are_drafted(model64, shape):
    check_forced(model64, shape)


def check_what_is_possible(model, shape) -> None:
    """The draft that a guide does not get beyond is right, and yet its sample ends as in plain decoding."""
    params = SamplingParams(temperature=0.0, max_new_tokens=9, seed=1, guide=Guide.regex("bbaé+"))
    jobs, why = [Job((5, 6, 7), params, 0, None)], "its guide allows none of the model's tokens"
    company = COMPANY["pages of 32, whole prompts"]
    with jax.enable_x64(True):
        with pytest.warns(UserWarning, match=why):
            wants = list(alone(model, jobs))
        with pytest.warns(UserWarning, match=why):
            (got,) = play(model, jobs, company | with_drafts(shape, jobs, wants, right=1.0))
    assert (got.text, got.finish_reason, got.token_ids) == ("bba", "error", wants[0].token_ids)


@pytest.mark.parametrize("shape", ONE)
def test_a_draft_after_which_nothing_is_possible(model64, shape):
    check_what_is_possible(model64, shape)


def of_the_root(self, values):
    return self.spread(values[:, 0])


def of_one_path(self, matcher, drafts, tree):
    return [tree.paths[len(drafts)]]


FAULTS = {
    "each node of a tree has the root's mask": (rows.HeadRows, "of_nodes", of_the_root, "tree"),
    "one path has masks": (Guides, "_allowed_paths", of_one_path, "tree"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(monkeypatch, fault):
    where, name, wrong, shape = FAULTS[fault]
    with jax.enable_x64(True):
        model = tiny_model("float64", tokenizer=TOKENIZER, context=125)  # nothing that was compiled before serves it
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError), warnings.catch_warnings(action="ignore"):
        assert check_any_drafts(model, shape, "two slots, pages of 16", 0.9)["draft_tokens_mean"] > 1.2


def test_a_fault_in_what_is_possible_is_found(monkeypatch):
    accept = rows.HeadRows.accept
    monkeypatch.setattr(rows.HeadRows, "accept", lambda self, drawn, possible=None: accept(self, drawn))
    with jax.enable_x64(True):
        model = tiny_model("float64", tokenizer=TOKENIZER, context=124)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_what_is_possible(model, "chain")


def test_a_fault_in_what_is_forced_is_found(monkeypatch):
    def early(found, advance, coming, tree):
        return with_forced(found, replace(advance, count=advance.count - 1), coming, tree)

    monkeypatch.setattr(step_draft, "with_forced", early)
    with jax.enable_x64(True):
        model = tiny_model("float64", tokenizer=TOKENIZER, context=123)
    with pytest.raises(AssertionError):
        check_forced(model, "chain")
