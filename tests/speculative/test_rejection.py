"""Rejection sampling: tokens depend on the drafter, and their distribution does not.

Chi-square tests have fixed seeds: one that holds holds always, and faults are far beyond the bound.
"""

import itertools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError
from jllm.sampling import Purpose, neutral_sampling, sample
from jllm.speculative import rejection
from jllm.speculative.draft_model import DraftModel
from jllm.speculative.drafter import Proposal
from jllm.speculative.ngram import NGram
from jllm.speculative.rejection import accept_or_draw, certain
from jllm.speculative.tree import Tree, chain
from jllm.state import init_state
from tests.speculative.simulation import make
from tests.tiny import full_logits, one_size, serve, tiny_model

ROWS, VOCABULARY, LIKELY = 40_000, 6, 1e-6  # a p-value that chance does not reach
FILTERS = {
    "plain": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "cold": {"temperature": 0.5},
    "all": {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's chi-square; outcomes expected fewer than five times count as one. 0 if the impossible happened."""
    expected = probabilities * counts.sum()
    if counts[probabilities == 0].any():
        return 0.0
    rare = expected < 5
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    some = expected > 0
    return stats.chisquare(seen[some], expected[some]).pvalue


def probabilities(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """[V] of what may be drawn, from the filters' definitions."""
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.zeros(len(p), bool)
    kept[order[: top_k or len(p)]] = True
    mass = np.where(kept, p, 0)[order] / p[kept].sum()
    kept[order[np.cumsum(mass) - mass >= top_p]] = False
    kept &= p >= min_p * p.max()
    return np.where(kept, p, 0) / p[kept].sum()


def sampling_of(seeds: np.ndarray, temperature=1.0, **filters):
    """Rows of one request each."""
    found = neutral_sampling(len(seeds))
    found.temperature[:], found.seed[:] = temperature, seeds
    for name, value in filters.items():
        getattr(found, name)[:] = value
    return jax.tree.map(jnp.asarray, found)


@pytest.fixture(params=range(3))
def distributions(request):
    rng = np.random.default_rng(request.param)
    return rng.normal(scale=1.5, size=(2, VOCABULARY))


def tokens_of(target, proposed, options, *, drafted=None, purpose=Purpose.DRAFTING):
    """ROWS tokens and drafts of logits [V]: drafts are drawn from `proposed` unless they are given."""
    sampling = sampling_of(np.arange(ROWS), **options)
    index = jnp.full(ROWS, 7, jnp.int32)
    p, q = (jnp.broadcast_to(jnp.asarray(x), (ROWS, VOCABULARY)) for x in (target, proposed))
    if drafted is None:
        drafted = sample(q, replace(sampling, purpose=purpose), index)[0]
    return np.asarray(jax.jit(accept_or_draw)(p, sampling, index, drafted, q)[0]), np.asarray(drafted)


@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_have_the_target_s_distribution(distributions, filters):
    """And drafts are accepted as often as 1 - TV says."""
    with jax.enable_x64(True):
        tokens, drafted = tokens_of(*distributions, FILTERS[filters])
    p, q = (probabilities(x, **FILTERS[filters]) for x in distributions)
    assert p_value(np.bincount(tokens, minlength=VOCABULARY), p) > LIKELY
    agree = 1 - np.abs(p - q).sum() / 2
    assert abs((tokens == drafted).mean() - agree) < 5 * np.sqrt(agree * (1 - agree) / ROWS) + 1e-9


def test_drafts_that_were_not_drawn(distributions):
    """A draft that had to be what it is gets accepted with the target's probability of it."""
    target, p = distributions[0], probabilities(distributions[0])
    drafted = jnp.full(ROWS, 2, jnp.int32)
    proposed = np.asarray(certain(drafted[:1], VOCABULARY, jnp.dtype("float32")))[0]
    tokens, _ = tokens_of(target.astype("f4"), proposed, {}, drafted=drafted)
    assert p_value(np.bincount(tokens, minlength=VOCABULARY), p) > LIKELY


def test_without_a_draft_the_token_is_that_of_plain_decoding(distributions):
    target, proposed = (x.astype("f4") for x in distributions)
    none = jnp.full(ROWS, -1, jnp.int32)
    for options in FILTERS.values():
        tokens, _ = tokens_of(target, proposed, options, drafted=none)
        logits = jnp.broadcast_to(jnp.asarray(target), (ROWS, VOCABULARY))
        plain = sample(logits, sampling_of(np.arange(ROWS), **options), jnp.full(ROWS, 7, jnp.int32))[0]
        np.testing.assert_array_equal(tokens, plain)


def test_the_same_logits_are_always_accepted(distributions):
    tokens, drafted = tokens_of(distributions[0].astype("f4"), distributions[0].astype("f4"), {"top_p": 0.9})
    np.testing.assert_array_equal(tokens, drafted)


def of_the_target_s_noise(monkeypatch):
    return {"purpose": Purpose.SAMPLING}


def of_no_residual(monkeypatch):
    monkeypatch.setattr(rejection.jnp, "expm1", lambda x: -jnp.ones_like(x))
    return {}


def of_noise_that_is_shared(monkeypatch):
    monkeypatch.setattr(rejection, "replace", lambda sampling, purpose: replace(sampling, purpose=Purpose.DRAFTING))
    return {}


@pytest.mark.parametrize("fault", [of_the_target_s_noise, of_no_residual, of_noise_that_is_shared])
def test_faults_are_noticed(fault, monkeypatch):
    target, proposed = np.random.default_rng(0).normal(scale=1.5, size=(2, VOCABULARY))
    jax.clear_caches()
    with jax.enable_x64(True):
        tokens, _ = tokens_of(target, proposed, {}, **fault(monkeypatch))
    monkeypatch.undo()
    jax.clear_caches()
    assert p_value(np.bincount(tokens, minlength=VOCABULARY), probabilities(target)) < LIKELY


# In an engine

PROMPT, LENGTH, REQUESTS = (1, 3, 2), 3, 2000


@pytest.fixture(scope="module")
def small():
    """A model of five tokens, and the probability of each sequence that it may answer PROMPT with."""
    with jax.enable_x64(True):
        model = tiny_model("float64", vocab_size=5, eos_ids=())
        found = {}
        for sequence in itertools.product(range(5), repeat=LENGTH):
            logits = full_logits(model, [*PROMPT, *sequence[:-1]], pad=8)[len(PROMPT) - 1 :]
            found[sequence] = np.prod([probabilities(x, temperature=2.0)[t] for x, t in zip(logits, sequence)])
        yield model, found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stubborn:
    """Drafts the same tokens always."""

    tree: Tree = field(default=chain(2), metadata={"static": True})

    def init(self, config, dtype, *, slots, num_pages, page_size, max_tokens):
        return (), ()

    def remember(self, memory, slot, tokens, start, count):
        return memory

    def propose(self, drafts, advance, params, *, config, backend, wanted=True):
        tokens = jnp.broadcast_to(jnp.asarray([[4, 1]], jnp.int32), (advance.slot.shape[0], 2))
        return Proposal(tokens, jnp.full(advance.slot.shape[0], 2, jnp.int32), (), ())


def drafter_of(kind: str, model):
    if kind == "ngram":
        return NGram(2, shortest=1)
    if kind == "stubborn":
        return Stubborn()
    if kind == "draft":
        small = tiny_model("float64", seed=5, num_layers=1, vocab_size=model.config.vocab_size)
        return DraftModel(small.params, small.config, chain(2))
    return make(kind, model, chain(2))


@pytest.mark.parametrize("kind", ["ngram", "stubborn", "draft", "medusa", "eagle"])
def test_sequences_have_the_model_s_distribution(small, kind):
    model, expected = small
    with jax.enable_x64(True):
        options = one_size(32, tokens=96) | {"speculate": drafter_of(kind, model), "drafts": 2}
        engine = Engine(model, **options, acceptance="rejection")
        params = SamplingParams(temperature=2.0, max_new_tokens=LENGTH, ignore_eos=True)
        for seed in range(REQUESTS):
            engine.submit(list(PROMPT), replace(params, seed=seed))
        tokens = [event.completion.token_ids for event in engine.run() if event.completion]
        accepted = engine.metrics()["draft_acceptance"]
    assert len(tokens) == REQUESTS
    assert 0 < accepted[1] < 1
    index = {sequence: i for i, sequence in enumerate(expected)}
    counts = np.bincount([index[t] for t in tokens], minlength=len(index))
    assert p_value(counts, np.array(list(expected.values()))) > LIKELY


@pytest.mark.parametrize("kind", ["ngram", "stubborn", "draft"])
def test_greedy_tokens_are_those_of_plain_decoding(kind):
    with jax.enable_x64(True):
        model = tiny_model("float64")
        params = [SamplingParams(temperature=0.0, max_new_tokens=20, repetition_penalty=x) for x in (1.0, 1.2)]
        prompts = [[5, 6, 7] * 4, [9, 9, 9]]
        plain = serve(model, prompts, params)
        options = {"speculate": drafter_of(kind, model), "drafts": 2, "acceptance": "rejection"}
        drafted = serve(model, prompts, params, **options)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


def test_a_drafter_has_noise_of_its_own():
    """A target that drafts for itself is always accepted; with the target's noise tokens would be those of plain
    decoding, and what is drawn in the place of a refused draft would depend on it."""
    with jax.enable_x64(True):
        model = tiny_model("float64")
        params = [SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=3)]
        drafter = DraftModel(model.params, model.config, chain(2))
        (plain,) = serve(model, [[5, 6, 7]], params)
        (drafted,) = serve(model, [[5, 6, 7]], params, speculate=drafter, drafts=2, acceptance="rejection")
    assert drafted.token_ids[0] == plain.token_ids[0], "before any draft"
    assert drafted.token_ids != plain.token_ids


def test_bad_input():
    model = tiny_model()
    with pytest.raises(ConfigError, match="acceptance must be one of equal, rejection, not 'maybe'"):
        Engine(model, speculate=NGram(), acceptance="maybe")
    with pytest.raises(ConfigError, match="has no meaning without speculate"):
        Engine(model, acceptance="rejection")
    with jax.enable_x64(True):
        tree = make("medusa", model, Tree((0, 0, 1)))
    with pytest.raises(ConfigError, match="takes chains of drafts, and this drafter makes a tree of 4 nodes"):
        Engine(model, speculate=tree, acceptance="rejection")
    with pytest.raises(ConfigError, match="takes chains"):
        init_state(model.config, slots=2, num_pages=8, drafter=tree, acceptance="rejection")
