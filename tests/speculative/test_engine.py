"""Drafters in an engine: their K and V go wherever the target's go, and metrics tell what became of their drafts."""

from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.engine.draft_policy import Drafting
from jllm.engine.drafters import copy_of, find_drafter
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.model.backbone import head
from jllm.programs.programs import Programs
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.eagle import init_eagle
from jllm.speculative.medusa import init_medusa
from jllm.speculative.ngram import NGram
from jllm.speculative.quantized_copy import QuantizedCopy
from jllm.speculative.tree import Tree, chain
from jllm.step.buckets import Bucket
from tests.engine.test_oracle import COMPANY, Job, alone, assert_same, play
from tests.speculative.scripted import Scripted, scripted
from tests.speculative.test_oracle import BUSHY, POOL, TIGHT, some_jobs
from tests.tiny import CONFIG, tiny_model

KEY = jax.random.key(5)
ONE = replace(CONFIG, num_layers=1)
SMALL = {"max_slots": 2, "page_size": 8, "max_step_tokens": 24, "buckets": (Bucket(2, 16, 2),)}


@pytest.fixture(scope="module")
def model64():
    with jax.enable_x64(True):
        yield tiny_model("float64", num_layers=1)


def small(tree: Tree) -> DraftModel:
    draft = tiny_model("float64", seed=3, num_layers=1, hidden_size=16)
    return DraftModel(draft.params, draft.config, tree)


EVERY = {
    "draft": lambda: small(chain(3)),
    "eagle": lambda: init_eagle(ONE, KEY, chain(3), "float64"),
    "eagle tree": lambda: init_eagle(ONE, KEY, BUSHY, "float64"),
    "medusa": lambda: init_medusa(ONE, KEY, chain(3), "float64"),
    "medusa tree": lambda: init_medusa(ONE, KEY, Tree((0, 0, 1, 1, 2)), "float64"),
    "ngram": lambda: NGram(3, shortest=1),
    "copy": lambda: copy_of(tiny_model("float64", num_layers=1), "w8a16", chain(3)),
    "copy tree": lambda: copy_of(tiny_model("float64", num_layers=1), "w8a8", BUSHY),
}


AUTOMATIC = ["draft", "eagle tree", "medusa"]  # with the automatic choice, which takes longer
OTHERWISE = [*AUTOMATIC, "eagle", "medusa tree", "ngram", "copy"]  # tested in other ways
FIXED = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in OTHERWISE)) for name in EVERY]


@pytest.mark.parametrize("name", FIXED)
def test_same_tokens_with_every_drafter(model64, name):
    jobs = some_jobs()
    with jax.enable_x64(True):
        drafter = EVERY[name]()
        options = TIGHT | {"speculate": drafter, "drafts": drafter.tree.size - 1}
        for completion, want in zip(play(model64, jobs, options), alone(model64, jobs), strict=True):
            assert_same(completion, want, False)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watching(Scripted):
    """Counts the tokens that it is told of, and of these the ones that their hidden states do not give."""

    def init(self, config, dtype, **sizes):
        return (), jnp.zeros(2, jnp.int32)

    def propose(self, drafts, advance, params, *, config, backend, wanted=True):
        found = super().propose(drafts, advance, params, config=config, backend=backend, wanted=wanted)
        (G, W), E = advance.tokens.shape, config.hidden_size
        given = jnp.argmax(head(params, config, advance.hidden.reshape(G * W, E), backend=backend), axis=1)
        told = jnp.arange(W, dtype=jnp.int32)[None, :] < advance.count[:, None]
        wrong = told & (given.reshape(G, W).astype(jnp.int32) != advance.tokens)
        return replace(found, memory=drafts.memory + jnp.stack([told.sum(), wrong.sum()]).astype(jnp.int32))


def test_a_trees_drafter_gets_the_states_of_the_nodes_that_were_accepted(model64):
    """Those that the tokens were drawn from, in an engine whose requests take any path of the tree."""
    jobs = [replace(job, params=replace(job.params, temperature=0.0)) for job in some_jobs()]
    with jax.enable_x64(True):
        wants = list(alone(model64, jobs))
        known = scripted(BUSHY, jobs, wants)
        drafter = Watching(**{each.name: getattr(known, each.name) for each in fields(known)})
        engine = Engine(model64, **TIGHT, speculate=drafter, drafts=BUSHY.size - 1)
        for job in jobs:
            engine.submit(list(job.prompt), job.params)
        tokens = sum(len(event.completion.token_ids) for event in engine.run() if event.completion)
        told, wrong = np.asarray(engine._device._state.drafts.memory).tolist()
    assert tokens > told > tokens // 2
    assert not wrong


SLOTS, CHAIN = "two slots, pages of 16", chain(3)
PAIRS = [(POOL, BUSHY, False), (SLOTS, CHAIN, True)]  # each once
OTHERS = [(POOL, CHAIN, True), (SLOTS, BUSHY, True)]
OTHERS = [pytest.param(*each, marks=pytest.mark.exhaustive) for each in OTHERS]


@pytest.mark.parametrize(("company", "tree", "shared"), PAIRS + OTHERS)
def test_a_target_that_drafts_for_itself_is_always_accepted(model64, tree, company, shared):
    """So its K and V are right after preemption, in pages that the prefix cache has, where chunks are cut and where a
    page ends: what it draws with them is what the target draws."""
    seen: dict = {}
    jobs = some_jobs() + [Job(job.prompt, job.params, 80, None) for job in some_jobs(max_new_tokens=20)]
    with jax.enable_x64(True):
        own, copy = DraftModel(model64.params, model64.config, tree), QuantizedCopy(model64.params, tree)
        drafter = copy if shared else own
        options = COMPANY[company] | {"num_pages": 14, "speculate": drafter, "drafts": tree.size - 1}
        got = play(model64, jobs, options, seen)
        for completion, want in zip(got, alone(model64, jobs), strict=True):
            assert_same(completion, want, False)
    assert seen["prefix_hit_tokens"]
    assert seen["draft_segments"] > 5
    assert set(seen["draft_acceptance"].values()) == {1.0}


def test_rows_of_drafts_that_are_refused_take_no_room_for_longer_than_their_step():
    """A sequence has pages for its tokens and for the rows of the two steps that may be under way, no more."""
    prompt, new, drafts = [1, 2, 3, 4, 5], 60, 3
    draft = tiny_model(seed=3, num_layers=1, hidden_size=16)
    drafter = DraftModel(draft.params, draft.config, chain(drafts))
    engine = Engine(tiny_model(num_layers=1), speculate=drafter, drafts=drafts, **SMALL, num_pages=20)
    engine.submit(prompt, SamplingParams(temperature=0.0, max_new_tokens=new, ignore_eos=True))
    while engine.has_work:
        engine.step()
        m = engine.metrics()
        most = len(prompt) + m["output_tokens"] + 2 * (drafts + 1)
        assert m["pages_used"] <= -(-most // SMALL["page_size"])
    assert m["draft_segments"] > new / 2  # so that most had at most one draft accepted
    engine.close()


def test_lookup_knows_what_the_prefix_cache_had(model64):
    """A prompt whose tokens are found in the cache goes into the history all the same: drafts are as many, and as
    often right, as where it was computed."""
    prompt = [(31 * i) % 97 for i in range(60)]
    params = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    with jax.enable_x64(True):
        engine = Engine(model64, speculate=NGram(3, shortest=1), drafts=3, **SMALL)
        found = []
        for asked in (prompt, [9] * 60, prompt):  # the one between takes the slot, and its place in the history
            engine.reset_metrics()
            engine.submit(asked, params)
            tokens = [event.token_ids for event in engine.run()]
            metrics = engine.metrics()
            found.append(
                (tokens, [metrics[name] for name in ("draft_segments", "draft_tokens_mean", "draft_acceptance")])
            )
        assert metrics["prefix_hit_tokens"] == len(prompt) - 1
    assert found[0] == found[2]
    assert found[0][1][0] > 3


def test_forks_and_snapshots(model64):
    """Pages of a drafter are copied with the target's; a snapshot has none of them, which costs acceptance alone."""
    prompt, params = list(range(3, 14)), SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True, seed=1)
    with jax.enable_x64(True):
        want = next(alone(model64, [Job(tuple(prompt), params, 0, None)])).token_ids
        drafter = DraftModel(model64.params, model64.config, chain(3))
        engine = Engine(model64, speculate=drafter, drafts=3, **SMALL, num_pages=20)
        request = engine.submit(prompt, params)
        for _ in range(5):
            engine.step()
        sample = engine.fork(request)
        taken = engine.snapshot(request)
        done = {(e.id, e.sample): e.completion for e in engine.run() if e.completion}
        assert done[request, 0].token_ids == want
        assert done[request, sample].token_ids == want  # greedy: its own key changes nothing
        assert set(engine.metrics()["draft_acceptance"].values()) == {1.0}
        known = len(taken.tokens)
        again = engine.resume(taken, SamplingParams(**{**vars(params), "max_new_tokens": 30 - (known - len(prompt))}))
        done = {e.id: e.completion for e in engine.run() if e.completion}
        assert (*taken.tokens[len(prompt) :], *done[again].token_ids) == want


@pytest.mark.exhaustive  # test_requests.py has it for a tree
def test_steps_with_drafts_end_where_the_context_does(model64):
    """A draft past the last token that may be is not verified, whatever room there is."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1000, ignore_eos=True)
    with jax.enable_x64(True):
        model = tiny_model("float64", num_layers=1, context=40)
        jobs = [Job((5, 6, 7), params, 0, None), Job(tuple(range(3, 40)), params, 0, None)]
        drafter = DraftModel(model.params, model.config, chain(3))
        for got, want in zip(play(model, jobs, SMALL | {"speculate": drafter}), alone(model, jobs), strict=True):
            assert_same(got, want, False)
            assert got.finish_reason == "length"


def test_drafts_are_chosen_where_they_pay():
    """With times that are made up: verifying costs 1.5 times a plain step, or as many times as is said."""
    drafting = Drafting(chain(4), most_decodes=8, always=False)
    plain, drafted = Bucket(4, 0, 0), Bucket(4, 0, 0, 5)

    def run(gain: int, steps: int, cost: float = 1.5) -> float:
        """The share of steps that verify drafts of which `gain` are accepted."""
        found = 0
        for _ in range(steps):
            with_drafts = drafting.rows(4, False) > 1
            found += with_drafts
            bucket = drafted if with_drafts else plain
            drafting.observe(bucket, [(4 * with_drafts, 1 + gain * with_drafts)] * 4, cost if with_drafts else 1.0)
        return found / steps

    assert drafting.rows(4, True) == 1, "prompts come first"
    assert drafting.rows(9, False) == 1
    assert run(gain=2, steps=600) > 0.9
    run(gain=0, steps=600)  # the text has changed
    run(gain=0, steps=600, cost=2.5)  # and verifying takes longer
    assert run(gain=0, steps=4000, cost=2.5) * (2.5 - 1) < 0.0155, "trials cost what they may"
    run(gain=3, steps=2000)  # as cheap as before: two trials tell
    assert run(gain=3, steps=600) > 0.9
    assert Drafting(chain(4), 8, always=True).rows(4, False) == 5


def test_rows_for_drafts_are_not_counted_while_their_program_is_not_there(monkeypatch):
    monkeypatch.setattr(Programs, "_is_there", lambda self, bucket, variant: bucket.rows == 1)
    engine = Engine(tiny_model(num_layers=1), speculate="ngram", drafts=7, **SMALL)
    engine.submit([5, 6, 7], SamplingParams(max_new_tokens=12, ignore_eos=True))
    list(engine.run())
    seen = engine.metrics()
    assert (seen["tokens"], seen["draft_segments"]) == (3 + 11, 0)


def test_the_choice_is_made_once_a_step(monkeypatch):
    """It counts the steps between trials, and those of one."""
    asked = []
    monkeypatch.setattr(Drafting, "_pays", lambda self, decodes: bool(asked.append(decodes)))
    engine = Engine(tiny_model(num_layers=1), speculate="ngram", **SMALL)
    engine.submit([5, 6, 7], SamplingParams(max_new_tokens=12, ignore_eos=True))
    list(engine.run())
    assert len(asked) == engine.metrics()["steps"] - 1, "of a prompt's step it is not asked"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"speculate": "lookup"}, "speculate='lookup' is not known: give one of ngram, "),
        ({"drafts": 3}, "drafts has no meaning without speculate"),
        ({"speculate": "ngram", "drafts": 0}, "drafts must be an integer from 1 to 32, not 0"),
        ({"speculate": "draft", "drafts": 100}, "drafts must be an integer from 1 to 32, not 100"),
        ({"speculate": "ngram", "drafts": 2.5}, "drafts must be an integer from 1 to 32, not 2.5"),
        ({"speculate": "eagle:"}, "speculate='eagle:' is not known"),
        ({"speculate": "ngram", "drafts": 30}, "30 drafts and a token are more rows than the 24 of a step"),
        ({"speculate": 7}, "speculate must be the name of a drafter, or a drafter, not int"),
        ({"speculate": NGram(4), "drafts": 3}, "drafts=3, but the drafter makes 4"),
        ({"speculate": init_medusa(CONFIG, KEY, chain(0), "float32")}, "Medusa makes no drafts"),
        ({"speculate": "ngram", "buckets": (Bucket(2, 16, 2), Bucket(2, 0, 0, 3))}, "a bucket's rows must be 1, or 5"),
        ({"speculate": "copy:"}, "speculate='copy:' is not known"),
        ({"speculate": "copy"}, "speculate='copy' is not known.*copy:SCHEME"),
        ({"speculate": "copy:w3"}, "copy:w3: "),
        ({"speculate": "copy:w4a16-g32"}, "copy:w4a16-g32: model.layers.0.mlp.down_proj"),
        ({"speculate": QuantizedCopy(tiny_model(num_layers=1).params)}, "the copy is of a model of 1 layers"),
        ({"speculate": DraftModel(tiny_model(vocab_size=64).params, tiny_model(vocab_size=64).config)}, "vocabulary"),
    ],
)
def test_what_is_refused(options, why):
    with pytest.raises(ConfigError, match=why):
        Engine(tiny_model(), **{**SMALL, **options})


def test_names_of_drafters(tmp_path):
    model = tiny_model()
    assert find_drafter("ngram", model, 6) == NGram(6)
    copy = find_drafter("copy:w8a16", model, 2)
    assert (type(copy), copy.tree) == (QuantizedCopy, chain(2))
    assert copy.params.embed is model.params.embed, "what a scheme leaves alone is not there twice"
    for name in ("medusa", "eagle"):  # those of the bundled model fit no other
        with pytest.raises(ConfigError):
            find_drafter(name, model)
        with pytest.raises(ConfigError, match="nothing"):
            find_drafter(f"{name}:{tmp_path / 'nothing'}", model)


@pytest.mark.parametrize("name", AUTOMATIC)
def test_plain_steps_of_the_automatic_choice_compute_no_drafter_s_keys(model64, name, monkeypatch):
    """Drafts come and go; those with K and V then lack some, which changes no token."""
    choices = iter([0, 0, 1, 1, 1, 0] * 100)
    monkeypatch.setattr(Drafting, "_pays", lambda self, decodes: bool(next(choices)))
    jobs, seen = some_jobs(), {}
    with jax.enable_x64(True):
        drafter = EVERY[name]()
        engine = Engine(model64, max_slots=2, page_size=8, speculate=drafter)
        plain, prompts = (engine._device.shapes.drafter_in(Bucket(2, tokens, 1)) for tokens in (0, 8))
        fixed = Engine(model64, max_slots=2, page_size=8, speculate=drafter, drafts=drafter.tree.size - 1)
        options = COMPANY["pages of 32, whole prompts"] | {"speculate": drafter}
        for completion, want in zip(play(model64, jobs, options, seen), alone(model64, jobs), strict=True):
            assert_same(completion, want, False)
    assert (plain is None, prompts is None) == (name in ("draft", "eagle tree"), False)
    assert fixed._device.shapes.drafter_in(Bucket(2, 0, 0)) is not None
    assert seen["draft_segments"] > 3
