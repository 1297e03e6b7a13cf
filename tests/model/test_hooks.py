"""Hooks: edits of every value, logits processors, and user state, in the engine as in the formula."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import jllm
from jllm.analysis.activations import tap
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, EvaluationError
from jllm.model.backbone import packed_logits
from jllm.model.hooks import Hooks
from jllm.model.paged import Packed
from jllm.model.taps import LAYER, TOP
from jllm.speculative.ngram import NGram
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.buckets import Bucket
from jllm.step.merge import step
from jllm.step.state import NOT_FINITE, init_state
from tests.engine.test_oracle import COMPANY, Job, alone, assert_same, play
from tests.tiny import greedy, one_size, serve, tiny_model

PROMPT, TOKENS = (5, 6, 7, 5, 6), 6


@pytest.fixture(autouse=True, scope="module")
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model(wide):
    return tiny_model("float64")


def bend(value, rows):
    """Another value in each row, by its index and token."""
    shift = jnp.sin(3 * rows.index + rows.token).reshape(-1, *[1] * (value.ndim - 1))
    return 0.8 * value + 0.3 * shift.astype(value.dtype)


def continued(model, prompt, edit, tokens: int = TOKENS) -> tuple[int, ...]:
    """Greedy tokens, each from the whole sequence anew."""
    sequence, logits_of = list(prompt), jax.jit(lambda b: packed_logits(model.params, model.config, b, edit))
    for _ in range(tokens):
        logits = logits_of(packed(sequence + [0] * (len(prompt) + tokens - len(sequence))))
        sequence.append(int(jnp.argmax(logits[len(sequence) - 1])))
    return tuple(sequence[len(prompt) :])


EDITABLE = [*(f"layers.1.{name}" for name in LAYER if name != "weights"), *TOP]


@pytest.mark.parametrize("first", range(3))
def test_an_edit_of_each_value(model, first):
    """Through prefill in chunks and decode, as over whole sequences: every third value at once. Each edit alone changes
    tokens' logits, so that one which the engine leaves out is missed."""
    edit = dict.fromkeys(EDITABLE[first::3], bend)
    options = one_size(2, tokens=2) | {"hooks": Hooks(edit=edit)}
    params = replace(greedy(TOKENS), logprobs=0, prompt_logprobs=True)
    (got,) = serve(model, [PROMPT], [params], **options)
    ids = [*PROMPT, *got.token_ids]
    assert got.token_ids == continued(model, PROMPT, edit)
    whole = jax.nn.log_softmax(packed_logits(model.params, model.config, packed(ids), edit), axis=1)
    found = [*got.prompt_logprobs, *(token.logprob for token in got.logprobs)]
    np.testing.assert_allclose(found, [whole[i, token] for i, token in enumerate(ids[1:])], rtol=1e-9)
    for left_out in edit:
        rest = {name: each for name, each in edit.items() if name != left_out}
        other = jax.nn.log_softmax(packed_logits(model.params, model.config, packed(ids), rest), axis=1)
        assert not np.allclose(whole, other, rtol=1e-6), left_out


def packed(ids) -> Packed:
    ids = jnp.asarray(ids, jnp.int32)
    return Packed(ids, jnp.arange(len(ids), dtype=jnp.int32), jnp.zeros_like(ids))


def test_edits_in_any_company_and_with_drafts(model):
    """Also log-probabilities of prompts and tokens are of the edited model."""
    hooks = Hooks(edit={"layers.*.middle": bend, "logits": lambda x, rows: x * 1.5})
    jobs = [
        Job(prompt, SamplingParams(temperature=t, seed=i, max_new_tokens=12, prompt_logprobs=True, logprobs=1), i, None)
        for i, (prompt, t) in enumerate([((5, 6, 7) * 6, 0.0), ((9, 8), 0.8), (tuple(range(30, 50)), 0.8)])
    ]
    wants = list(alone(model, jobs, hooks=hooks))
    options = COMPANY["pool that forces preemption"] | {"buckets": (Bucket(4, 16, 3),), "hooks": hooks}
    for more in ({}, {"speculate": NGram(3, shortest=1), "drafts": 3}):
        got = play(model, jobs, options | more)
        for completion, want in zip(got, wants, strict=True):
            assert_same(completion, want, False)
            np.testing.assert_allclose(completion.prompt_logprobs, want.prompt_logprobs, rtol=1e-10)
    ids = [*jobs[1].prompt, *wants[1].token_ids]
    logits = packed_logits(model.params, model.config, packed(ids), hooks.edit)
    logprobs = jax.nn.log_softmax(logits, axis=1)
    np.testing.assert_allclose(wants[1].prompt_logprobs[0], logprobs[0, ids[1]], rtol=1e-9)
    assert wants[1].logprobs[0].logprob == pytest.approx(float(logprobs[1, ids[2]]), rel=1e-9)


def seen_before(user, slot, index, token):
    return user.at[slot, token].set(True, mode="drop")


def penalize_seen(logits, rows):
    seen = rows.user.at[rows.slot].get(mode="clip")
    return jnp.where(seen, jnp.where(logits > 0, logits / 1.6, logits * 1.6), logits)


@pytest.mark.parametrize(
    "company", ["pool that forces preemption", pytest.param("two slots, pages of 16", marks=pytest.mark.exhaustive)]
)
def test_user_state_makes_a_repetition_penalty(model, company):
    """The same tokens as jllm's own, with preemption, chunks of prompts and a prefix cache."""
    prompts = [(5, 6, 7) * 8, (5, 6, 7) * 8 + (9,), (9, 8), tuple(range(30, 50)), (5, 6, 7) * 8]
    params = [SamplingParams(temperature=t, seed=3, max_new_tokens=16) for t in (0.0, 0.9, 0.7, 0.0, 0.9)]
    jobs = [Job(p, s, 3 * i, None) for i, (p, s) in enumerate(zip(prompts, params, strict=True))]
    wants = list(alone(model, [replace(j, params=replace(j.params, repetition_penalty=1.6)) for j in jobs]))
    V = model.config.vocab_size
    hooks = Hooks(logits_processor=penalize_seen, observe=seen_before, user=np.zeros(V, bool))
    for completion, want in zip(play(model, jobs, COMPANY[company] | {"hooks": hooks}), wants, strict=True):
        assert_same(completion, want, False)


def test_tokens_of_logits_that_are_not_finite_are_not_observed(model):
    """They are none: the sequence ends with an error."""

    def counted(user, slot, index, token):
        return user.at[slot, token].add(1, mode="drop")

    def spoilt(logits, rows):
        return jnp.where((rows.slot == 1)[:, None], jnp.nan, logits)

    hooks = Hooks(edit={"logits": spoilt}, observe=counted, user=np.zeros(model.config.vocab_size, np.int32))
    state = init_state(model.config, slots=2, num_pages=4, page_size=8, dtype="float64")
    state = replace(state, user=hooks.start(2))
    chunks = [PromptChunk(slot, [5, 6, 7], pages=[slot], sampling={"max_length": 9}) for slot in range(2)]
    state, outputs = step(model.params, state, ragged_batch(chunks), hooks=hooks, config=model.config)
    assert outputs.tokens[1] == NOT_FINITE != outputs.tokens[0]
    assert state.user.sum(axis=1).tolist() == [4, 3]


def forked(model, params: SamplingParams, **options) -> list[tuple[int, ...]]:
    """Tokens of a sample, and of one that branched off."""
    engine = Engine(model, **one_size(), **options)
    request = engine.submit([5, 6, 7] * 4, params)
    for _ in range(8):
        engine.step()
    engine.fork(request)
    done = {e.sample: e.completion.token_ids for e in engine.run() if e.completion}
    return [done[0], done[1]]


def test_forks_tell_user_state_what_they_begin_with(model):
    hooks = Hooks(logits_processor=penalize_seen, observe=seen_before, user=np.zeros(model.config.vocab_size, bool))
    params = SamplingParams(temperature=0.9, seed=3, max_new_tokens=20)
    got, want = forked(model, params, hooks=hooks), forked(model, replace(params, repetition_penalty=1.6))
    assert got == want
    assert got[0] != got[1]


def test_what_is_tapped_is_what_was_edited(model):
    steered = packed_logits(model.params, model.config, packed(PROMPT), {"layers.0.output": bend})
    assert steered.shape == (len(PROMPT), model.config.vocab_size)
    from jllm.model.backbone import tapped_backbone
    from jllm.model.hooks import HookRows, make_edits

    batch = packed(PROMPT)
    rows = HookRows(batch.segments, batch.positions, batch.tokens)
    edits = make_edits({"layers.0.output": bend}, 2, rows)
    taps = ("layers.0.output", "layers.1.input")
    _, _, found = tapped_backbone(model.params, model.config, batch, None, taps, edits=edits)
    np.testing.assert_array_equal(*found.values())
    _, _, plain = tapped_backbone(model.params, model.config, batch, None, taps)
    np.testing.assert_allclose(found["layers.0.output"], bend(plain["layers.0.output"], rows), rtol=1e-12)


@pytest.mark.parametrize("windows", [(), (4, None)])
@pytest.mark.parametrize("prompt", [None, 3])
def test_attention_weights_make_attention_s_output(windows, prompt):
    m = tiny_model("float64", windows=windows)
    ids = [5, 6, 7, 5, 6, 9, 30, 2, 11, 12]
    names = ["layers.*.weights", "layers.*.v", "layers.*.attention"]
    found = tap(m, ids, names, prompt=prompt, page_size=8, segment=1 if prompt is None else 2)
    H, K = m.config.num_heads, m.config.num_kv_heads
    for layer in range(2):
        weights = np.asarray(found[f"layers.{layer}.weights"])
        assert weights.shape == (len(ids), H, 16)
        values = np.repeat(np.asarray(found[f"layers.{layer}.v"]), H // K, axis=1)
        out = np.einsum("thj,jhd->thd", weights[:, :, : len(ids)], values).reshape(len(ids), -1)
        np.testing.assert_allclose(out, found[f"layers.{layer}.attention"], atol=1e-12)
        np.testing.assert_allclose(weights.sum(axis=2), 1, rtol=1e-12)
        if windows and layer == 0:
            assert not weights[9, :, :6].any()


def test_large_taps_must_be_named(model):
    assert not any(name.endswith("weights") for name in tap(model, [5, 6], ["*"]))


def steer(vector, value, rows):
    return value + vector[None, :]


def test_arrays_of_a_hook_need_no_other_compilation_and_have_gradients(model):
    def loss(vector):
        edit = {"layers.0.middle": Partial(steer, vector)}
        logits = packed_logits(model.params, model.config, packed(PROMPT), edit)
        return jax.nn.log_softmax(logits[-1])[42]

    vector = jnp.zeros(model.config.hidden_size)
    gradient = jax.grad(loss)(vector)
    moved = loss(vector + 0.01 * gradient) - loss(vector)
    np.testing.assert_allclose(moved, 0.01 * (gradient**2).sum(), rtol=0.05)
    before = jllm.step.merge.step._cache_size()
    for scale in (0.0, 1.0, 2.0):
        one_step(model, Hooks(edit={"layers.0.middle": Partial(steer, scale + vector)}))
    assert jllm.step.merge.step._cache_size() == before + 1


def one_step(model, hooks=None, params=None):
    state = jllm.init_state(model.config, slots=2, num_pages=8, page_size=8)
    batch = jllm.ragged_batch([jllm.PromptChunk(0, PROMPT, pages=[3])])
    return jllm.step(model.params if params is None else params, state, batch, None, hooks, config=model.config)


def test_a_step_says_that_it_has_no_gradients(model):
    def loss(params):
        state, _ = one_step(model, params=params)
        return sum(x.sum() for x in jax.tree.leaves(state.cache) if x.dtype == jnp.float64)

    with pytest.raises(EvaluationError, match=r"a step has no gradients: take jllm\.model\.backbone\.packed_logits"):
        jax.grad(loss)(model.params)


def same(value, rows):
    return value


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"layers.0.midle": same}, r"unknown tap 'layers\.0\.midle'; near ones: layers\.0\.middle"),
        ({"layers.7.middle": same}, r"the model has layers 0 \.\. 1"),
        ({"layers.0.*": same, "layers.0.q": same}, r"edit of layers\.0\.q: two patterns match it"),
        ({"layers.0.weights": same}, "attention weights can be tapped, not changed"),
        ({"layers.0.middle": lambda x, rows: x[:, :3]}, r"edit of middle: it must keep shape and dtype"),
        ({"logits": lambda x, rows: x.astype(jnp.float32)}, r"edit of logits: it must keep shape and dtype"),
    ],
)
def test_bad_edits(model, edit, words):
    with pytest.raises(EvaluationError, match=words):
        one_step(model, Hooks(edit=edit))


def test_bad_hooks(model):
    with pytest.raises(ConfigError, match=r"hooks must be jllm\.Hooks, not int"):
        Engine(model, hooks=3)
    with pytest.raises(ConfigError, match="leave speculate out"):
        Engine(model, hooks=Hooks(observe=seen_before, user=np.zeros(9, bool)), speculate=NGram())
