"""Values out: each sample gets those of the rows that read its tokens, once, whatever else runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.api import generate
from jllm.engine import tapped
from jllm.engine.engine import Engine
from jllm.errors import ConfigError, RequestError
from jllm.model.backbone import head, tapped_backbone
from jllm.model.paged import Packed
from jllm.speculative.ngram import NGram
from jllm.step.buckets import Bucket
from tests.tiny import greedy, tiny_model

NAMES = ("layers.0.qkv", "layers.0.output", "layers.1.output")
SIZES = {"max_slots": 3, "page_size": 8, "num_pages": 9, "max_step_tokens": 8, "buckets": (Bucket(3, 5, 3),)}
OPTIONS = SIZES | {"taps": ("layers.*.output", "layers.0.qkv", "logits"), "tap_rows": 4}
LONG = (5, 6, 7) * 6 + (8, 9)
ASKED = [  # prompt, taps, tokens
    (LONG, ("layers.*",), "all"),
    (LONG, ("layers.1.output", "logits"), "last"),
    (LONG, ("layers.0.qkv",), slice(4, 22, 3)),
    (LONG[:9], (), "last"),
    (LONG[:5], ("layers.0.output",), slice(2, None)),
    (LONG, ("layers.0.output",), slice(0, 3)),
]


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        yield tiny_model("float64")


@pytest.fixture(autouse=True)
def wide(model):
    with jax.enable_x64(True):
        yield


@partial(jax.jit, static_argnames="config")
def whole(params, config, ids):
    batch = Packed(ids, jnp.arange(len(ids), dtype=jnp.int32), jnp.zeros_like(ids))
    hidden, _, found = tapped_backbone(params, config, batch, None, NAMES)
    return found | {"logits": head(params, config, hidden)}


def check(model, completion, prompt, taps, tokens):
    """The values are those of a forward pass over the whole sequence: of each index that was asked for, once."""
    if not taps:
        assert completion.taps is None
        return
    ids = (*prompt, *completion.token_ids)[:-1]
    want = whole(model.params, model.config, jnp.asarray((*ids, *[0] * (64 - len(ids))), jnp.int32))
    chosen = {"all": slice(0, None), "last": slice(len(prompt) - 1, None)}.get(str(tokens), tokens)
    for name, value in completion.taps.items():
        np.testing.assert_allclose(value, want[name][: len(ids)][chosen], rtol=0, atol=1e-10, err_msg=name)
    assert completion.taps.keys() == {name for name in (*NAMES, "logits") if any(map(partial(means, name), taps))}


def means(name, pattern):
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))


def play(model, options):
    engine, ids, done = Engine(model, **options), {}, {}
    for i, (prompt, taps, tokens) in enumerate(ASKED):
        ids[engine.submit(prompt, greedy(24), taps=taps, tokens=tokens)] = i
        done.update({ids[e.id]: e.completion for e in engine.step() if e.completion})
    done.update({ids[e.id]: e.completion for e in engine.run() if e.completion})
    for i, asked in enumerate(ASKED):
        check(model, done[i], *asked)
    return engine.metrics()


def test_values_of_each_request_in_any_company(model):
    """Runs in chunks that the budget of rows cuts, with preemption, and with prefixes of others."""
    found = play(model, OPTIONS)
    assert found["preemptions"] > 0
    assert found["prefix_hits"] > 0


def test_rows_of_rejected_drafts_are_dropped(model):
    found = play(model, OPTIONS | {"speculate": NGram(3, shortest=1), "drafts": 3, "max_step_tokens": 12})
    assert 0 < found["draft_acceptance"][1] < 1


def test_rows_that_are_computed_again_are_seen_where_they_come_twice(model, monkeypatch):
    def takes_all(self, begin, end):
        return range(begin, end if self.stop is None else min(end, self.stop), self.step)

    monkeypatch.setattr(tapped.Tapped, "wanted", takes_all)
    with pytest.raises(AssertionError):
        play(model, OPTIONS)


def test_forks_and_samples_have_all_values(model):
    engine = Engine(model, **OPTIONS)
    asked = (LONG, ("layers.1.output",), "all")
    request = engine.submit(LONG, greedy(9), taps=asked[1], tokens="all")
    for _ in range(7):
        engine.step()
    engine.fork(request)
    other = engine.submit(LONG, greedy(5, n=2, temperature=1.0, seed=3), taps=asked[1], tokens="all")
    engine.step()
    engine.fork(other)  # while its prompt is computed
    ends = [e.completion for e in engine.run() if e.completion]
    assert len(ends) == 5
    for completion in ends:
        check(model, completion, *asked)


def test_generate_returns_them(model):
    options = OPTIONS | {"executables": None}
    found = generate(model, [LONG, LONG[:7]], greedy(4), tokens="all", **(options | {"taps": NAMES}))
    for completion, prompt in zip(found, (LONG, LONG[:7])):
        check(model, completion, prompt, NAMES, "all")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"taps": ("layers.0.q",)}, r"taps: the engine keeps none of layers\.0\.q, but layers\.0\.qkv, layers\.0\.out"),
        ({"taps": ("layers.0.none",)}, r"taps: unknown tap 'layers\.0\.none'"),
        ({"taps": (3,)}, r"taps must be a list of names, not \(3,\)"),
        ({"taps": 3}, "taps must be a list of names, not 3"),
        ({"taps": "logits"}, "taps must be a list of names, not 'logits'"),
        (
            {"taps": ("logits",), "tokens": "all"},
            'logits is computed where a token is drawn: take it with tokens="last"',
        ),
        ({"taps": ("layers.0.qkv",), "tokens": "first"}, 'tokens must be "last", "all" or a slice .*, not \'first\''),
        ({"taps": ("layers.0.qkv",), "tokens": slice(-3, None)}, "a slice of indices from 0 up"),
        ({"tokens": "all"}, "tokens='all' has no meaning without taps"),
        ({"taps": ("layers.0.qkv",), "n": 5}, r"5 samples have more rows in a step than .* budget, tap_rows=4"),
    ],
)
def test_bad_requests_for_values(model, given, why):
    engine = Engine(model, **OPTIONS)
    with pytest.raises(RequestError, match=why):
        engine.submit(LONG, greedy(3, n=given.pop("n", 1)), **given)
    assert not engine.has_work


def test_bad_declarations(model):
    with pytest.raises(RequestError, match="declare their names at the engine"):
        Engine(model, **SIZES).submit(LONG, greedy(3), taps=("logits",))
    for options, why in (
        ({"taps": "logits"}, "taps must be a list of names"),
        ({"taps": ("logit",)}, "taps: unknown tap 'logit'; near ones: logits"),
        ({"taps": ("layers.0.weights",)}, "attention weights are too large to keep"),
        ({"tap_rows": 3}, "tap_rows has no meaning without taps"),
        ({"taps": ("layers.0.q",), "deterministic": True}, r"taps: a step that keeps layers\.0\.q may round otherwise"),
    ):
        with pytest.raises(ConfigError, match=why):
            Engine(model, **SIZES, **options)
