"""Checks token_logprobs: its values are the engines' to the bit, and its gradients those of plain autodiff."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.engine.engine import Engine
from jllm.engine.request import SamplingParams
from jllm.errors import ConfigError, EvaluationError, QuantizationError
from jllm.model.adapters import init_adapter, merge_params
from jllm.model.backbone import packed_logits
from jllm.model.cache import parse_kv_cache
from jllm.model.hooks import Hooks
from jllm.model.linear import decoded
from jllm.model.paged import Packed
from jllm.model.params import map_linears
from jllm.quant import calibration as ptq
from jllm.quant.quantize import quantize
from pallas_kernels.norm_quant import api as norm_quant_api
from tests.tiny import experts_model, one_size, tiny_model

optax = pytest.importorskip("optax")

WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 259}
LENGTH = 40
CASES = [
    ("float32", None, None, {"num_kv_heads": 4}),
    ("float32", "w8a8", "fp8", {"num_layers": 1, "tie_embeddings": True}),
    ("bfloat16", "w4a16-g32", "int8-g8", {"num_layers": 1}),
    pytest.param("bfloat16", "fp8", None, {"num_layers": 1, "windows": (9,)}, marks=pytest.mark.exhaustive),
]
options_of = partial(dict, page_size=8)


def drawn(engine, mode, requests=7, seed=0):
    """Serves prompts that share beginnings, in a pool that is too small for all. Returns tokens [B, L], lengths, and
    the drawn tokens' log-probabilities of that mode, NaN at other places."""
    rng = np.random.default_rng(seed)
    base = rng.integers(3, 250, 18).tolist()
    prompts = [base[: rng.integers(1, 18)] + rng.integers(3, 250, rng.integers(1, 4)).tolist() for _ in range(requests)]
    asked = [
        SamplingParams(seed=i, max_new_tokens=19 - i, ignore_eos=True, logprobs=0, temperature=1.3, logprobs_mode=mode)
        for i in range(requests)
    ]
    ids = [engine.submit(*each) for each in zip(prompts, asked)]
    done = {event.id: event.completion for event in engine.run() if event.completion}
    tokens, lengths = np.zeros((requests, LENGTH), np.int32), np.zeros(requests, np.int32)
    found = np.full((requests, LENGTH), np.nan)
    for row, (i, prompt) in enumerate(zip(ids, prompts)):
        whole = [*prompt, *done[i].token_ids]
        tokens[row, : len(whole)], lengths[row] = whole, len(whole)
        found[row, len(prompt) - 1 : len(whole) - 1] = [each.logprob for each in done[i].logprobs]
    return tokens, lengths, found


@pytest.mark.parametrize(("dtype", "scheme", "kv_cache", "changes"), CASES, ids=str)
def test_values_in_a_foreign_training_step_are_the_engines_to_the_bit(dtype, scheme, kv_cache, changes):
    """Masters are float32. The step casts, quantizes, donates and updates them."""
    masters = tiny_model("float32", **WIDE | changes)
    served = tiny_model(dtype, **WIDE | changes)
    if scheme is not None:
        served = replace(served, params=quantize(served.params, scheme))
    sizes = one_size(4, 8, 12) | {"num_pages": 12, "kv_cache": kv_cache, "deterministic": True}
    engine = Engine(served, **sizes)
    mode, heat = ("tempered", {"temperature": 1.3}) if dtype == "bfloat16" else ("raw", {})
    tokens, lengths, want = drawn(engine, mode)
    counts, options = engine.metrics(), engine.token_logprobs_options() | heat
    engine.close()
    assert counts["preemptions"]
    assert counts["prefix_hits"]
    optimizer = optax.sgd(1e-3)

    @partial(jax.jit, donate_argnums=0)
    def train(params, state):
        def loss(params):
            found = jllm.token_logprobs(params, masters.config, tokens, lengths, **options)
            return found.sum(), found

        (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), gradient, found

    params = jax.tree.map(jnp.copy, masters.params)
    _, gradient, found = train(params, optimizer.init(params))
    assert found.dtype == np.float32
    known = ~np.isnan(want)
    np.testing.assert_array_equal(np.asarray(found, np.float64)[known], want[known])
    outside = np.arange(LENGTH)[None] >= lengths[:, None] - 1
    assert not np.asarray(found)[outside].any()
    assert all(
        leaf.dtype == np.float32 and np.isfinite(leaf).all() and leaf.any() for leaf in jax.tree.leaves(gradient)
    )


def test_xlas_usual_flags_part_no_bits():
    """Other tests let XLA optimize less, which once hid rows that parted behind 128 keys."""
    call = "from tests.training.test_logprobs import compare_behind_two_blocks as run; run()"
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", call], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def compare_behind_two_blocks():
    """Compares drawn and scored values of a model whose query heads share a KV head, at up to 300 positions."""
    model = tiny_model(**WIDE, num_heads=8, num_kv_heads=1, num_layers=1, context=512)
    engine = Engine(model, **one_size(4, 16, 64), num_pages=48, deterministic=True)
    rng = np.random.default_rng(0)
    texts = [rng.integers(3, 250, n).tolist() for n in (250, 120, 100, 90, 7)]
    ids = [
        engine.submit(text, SamplingParams(seed=1, max_new_tokens=50, ignore_eos=True, logprobs=0)) for text in texts
    ]
    done = {event.id: event.completion for event in engine.run() if event.completion}
    tokens = np.zeros((len(texts), 304), np.int32)
    for row, i, text in zip(tokens, ids, texts):
        row[: len(text) + 50] = [*text, *done[i].token_ids]
    lengths = np.asarray([len(text) + 50 for text in texts], np.int32)
    options = engine.token_logprobs_options()
    found = np.asarray(jllm.token_logprobs(model.params, model.config, tokens, lengths, **options), np.float64)
    for row, i, text in zip(found, ids, texts):
        want = [each.logprob for each in done[i].logprobs]
        np.testing.assert_array_equal(row[len(text) - 1 : len(text) + 49], want)


def test_scored_prompts_are_the_engines_and_an_unfenced_sum_is_not(monkeypatch):
    model = tiny_model("float32", **WIDE, num_layers=1, context=126)  # of no other test: nothing of it is traced yet
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 250, (3, LENGTH)).astype(np.int32)
    lengths = np.asarray([LENGTH, 23, 2], np.int32)
    engine = Engine(model, **one_size(4, 8, 12), deterministic=True)
    asked = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=True)
    ids = [engine.submit(row[:n].tolist(), asked) for row, n in zip(tokens, lengths)]
    done = {event.id: event.completion for event in engine.run() if event.completion}
    engine.close()
    found, entropies = jllm.token_logprobs(model.params, model.config, tokens, lengths, entropy=True, **options_of())
    for row, (i, n) in enumerate(zip(ids, lengths)):
        np.testing.assert_array_equal(np.asarray(found, np.float64)[row, : n - 1], done[i].prompt_logprobs)
    logits = np.asarray(jax.jit(_logits, static_argnums=1)(model.params, model.config, tokens), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(entropies[0, :-1], -(np.exp(logp) * logp).sum(-1)[0, :-1], rtol=1e-4)
    monkeypatch.delitem(norm_quant_api.BACKENDS, "deterministic")
    other = replace(model.config, context=127)
    unfenced = jllm.token_logprobs(model.params, other, tokens, lengths, **options_of())
    assert (np.asarray(unfenced) != np.asarray(found)).any()


def _logits(params, config, tokens, stored=None):
    def one(row):
        position = jnp.arange(row.shape[0], dtype=jnp.int32)
        return packed_logits(params, config, Packed(row, position, jnp.zeros_like(position), stored))

    return jax.vmap(one)(jnp.asarray(tokens))


@partial(jax.jit, static_argnames=("config", "temperature", "stored"))
@partial(jax.value_and_grad, allow_int=True)
def plain(params, tokens, lengths, weights, *, config, temperature=1.0, stored=None):
    """A weighted sum of log-probabilities and half of the entropies, by JAX's own differentiation."""
    logp = jax.nn.log_softmax(_logits(params, config, tokens, stored) / temperature)
    chosen = jnp.take_along_axis(logp, jnp.roll(tokens, -1, axis=1)[:, :, None], axis=2)[:, :, 0]
    used = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None] - 1
    entropies = -(jnp.exp(logp) * logp).sum(-1)
    return (jnp.where(used, chosen + entropies / 2, 0) * weights).sum()


@partial(jax.jit, static_argnames=("config", "quantize", "kv_cache"))
@jax.value_and_grad
def served(params, tokens, lengths, weights, temperature=None, **options):
    options |= {"tokens": tokens, "lengths": lengths, "temperature": temperature, "entropy": True}
    found, entropies = jax.checkpoint(partial(jllm.token_logprobs, **options))(params)
    return ((found + entropies / 2) * weights).sum()


def check_equal(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(a - b).max() < tolerance * max(1, np.abs(b).max())


@pytest.fixture
def batch():
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        tokens = jnp.asarray(rng.integers(3, 90, (3, 13)), jnp.int32)
        yield tokens, jnp.asarray([13, 7, 2], jnp.int32), jnp.asarray(rng.standard_normal((3, 13)))


def test_gradients_are_those_of_packed_logits_in_float64(batch):
    caps = {"logit_softcap": 6.0, "logit_divisor": 1.5, "attention_softcap": 2.0}
    model = tiny_model("float64", windows=(None, 4), tie_embeddings=True, **caps)
    value, gradient = served(model.params, *batch, 0.75, config=model.config)
    wanted, reference = plain(model.params, *batch, config=model.config, temperature=0.75)
    assert abs(value - wanted) < 1e-11
    check_equal(gradient, reference, 1e-12)


def test_a_quantized_weight_passes_its_gradient_to_the_original(batch):
    """Weight-only codes, experts' too, have the gradient of plain weights with the codes' values. Where activations are
    rounded too, norms have the gradient of the quantized model."""
    model = experts_model("float64")
    values = map_linears(lambda _, w: decoded(w, jnp.float64), quantize(model.params, "w4a16-g32"))
    _, got = served(model.params, *batch, config=model.config, quantize="w4a16-g32")
    check_equal(got, plain(values, *batch, config=model.config)[1], 1e-9)
    assert np.abs(got.layers[1].mlp.down).max() > 0
    model = tiny_model("float64", num_layers=1, intermediate_size=64)
    value, got = served(model.params, *batch, config=model.config, quantize="w8a8-all", kv_cache="int8-g8")
    formats = parse_kv_cache("int8-g8", model.config, "float64")
    coded = quantize(model.params, "w8a8-all")
    wanted, reference = plain(coded, *batch, config=model.config, stored=formats)
    assert abs(value - wanted) < 1e-9
    for pick in (lambda p: (p.embed, p.norm), lambda p: p.layers[0].attention.norm, lambda p: p.layers[0].mlp.norm):
        check_equal(pick(got), pick(reference), 1e-9)
    assert np.abs(got.layers[0].attention.qkv).max() > 0


def test_an_adapters_values_are_the_engines_and_its_gradients_those_of_merged_weights(batch):
    """Values are of quantized weights: those of plain ones lack a step of these."""
    model = tiny_model("float32", num_layers=1, **WIDE)
    adapter = init_adapter(model.config, jax.random.key(0), 2, alpha=3, targets=["q_proj", "down_proj"])
    adapter = {name: replace(each, b=each.a.mean() + jnp.ones_like(each.b) / 20) for name, each in adapter.items()}
    coded = replace(model, params=quantize(model.params, "w8a8"))
    engine = Engine(coded, **one_size(2, 8, 12), deterministic=True, adapters={"one": adapter}, adapter_rank=3)
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=0, seed=1)
    ids = [engine.submit([5, 6, 7, 8], replace(sampling, adapter=name)) for name in ("one", None)]
    done = {event.id: event.completion for event in engine.run() if event.completion}
    options = engine.token_logprobs_options() | {"quantize": "w8a8"}
    for id, own in zip(ids, ({"adapters": adapter}, {})):
        tokens = jnp.asarray([[5, 6, 7, 8, *done[id].token_ids]], jnp.int32)
        got = jllm.token_logprobs(model.params, model.config, tokens, jnp.asarray([13]), **options, **own)
        assert np.asarray(got)[0, 3:12].tolist() == [each.logprob for each in done[id].logprobs]

    model = tiny_model("float64", num_layers=1, **WIDE)

    def loss(adapter, merged):
        if merged:
            return plain(merge_params(model.params, model.config, adapter), *batch, config=model.config)[0]
        options = {"tokens": batch[0], "lengths": batch[1], "entropy": True, "adapters": adapter}
        found, entropies = jllm.token_logprobs(model.params, model.config, **options)
        return ((found + entropies / 2) * batch[2]).sum()

    adapter = init_adapter(model.config, jax.random.key(0), 2, alpha=3, targets=["q_proj", "down_proj"])
    adapter = {name: replace(each, b=each.a.mean() + jnp.ones_like(each.b) / 20) for name, each in adapter.items()}
    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(adapter, merged) for merged in (False, True))
    check_equal(got, want, 1e-11)
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(got)) > 0


def test_routes_of_an_engine_are_replayed_and_choose_who_gets_a_gradient(batch):
    """To the bit with the weights that drew. Other weights take the given routes, forward and backward."""
    model, name = experts_model("float64"), "layers.1.routes"
    engine = Engine(model, **one_size(3, tokens=12), taps=[name], deterministic=True)
    asked = SamplingParams(seed=1, max_new_tokens=9, ignore_eos=True, logprobs=0)
    engine.submit([5, 6, 7, 8], asked, taps=[name], tokens="all")
    (done,) = [event.completion for event in engine.run() if event.completion]
    tokens, lengths = np.asarray([[5, 6, 7, 8, *done.token_ids]]), np.asarray([13])
    routes = np.full((1, 13, 2), -1, np.int32)
    routes[0, :12] = done.taps[name]
    score = jax.jit(partial(jllm.token_logprobs, config=model.config, **engine.token_logprobs_options()))
    drawn = [each.logprob for each in done.logprobs]
    for given in ({name: routes}, {}):
        found = score(model.params, tokens=tokens, lengths=lengths, routes=given)
        assert found[0, 3:12].tolist() == drawn
    tokens, lengths, weights = batch
    others = jnp.asarray(
        np.random.default_rng(3).integers(0, 2, (3, 13, 2)) * [3, 1] + [0, 1], jnp.int32
    )  # not expert 4
    others = others.at[:, 5].set(-1).at[:, 11:, 0].set(-1)

    def value(params, **options):
        return (jllm.token_logprobs(params, model.config, tokens, lengths, **options) * weights).sum()

    def plainly(params):
        def one(row, chosen):
            position, edit = jnp.arange(13, dtype=jnp.int32), {name: lambda value, rows: chosen}
            return packed_logits(params, model.config, Packed(row, position, jnp.zeros_like(position)), edit)

        logp = jax.nn.log_softmax(jax.vmap(one)(tokens, others))
        chosen = jnp.take_along_axis(logp, jnp.roll(tokens, -1, axis=1)[:, :, None], axis=2)[:, :, 0]
        return (jnp.where(jnp.arange(13, dtype=jnp.int32)[None] < lengths[:, None] - 1, chosen, 0) * weights).sum()

    got, gradient = jax.jit(jax.value_and_grad(partial(value, routes={name: others})))(model.params)
    wanted, reference = jax.jit(jax.value_and_grad(plainly))(model.params)
    assert abs(got - wanted) < 1e-11 < abs(got - value(model.params))
    check_equal(gradient, reference, 1e-12)
    down = gradient.layers[1].mlp.down.reshape(5, -1)
    assert not down[4].any()
    assert all(down[i].any() for i in (0, 1, 2, 3))


def test_temperature_is_the_engines_and_lengths_end_with_the_tokens(batch):
    """The engine keeps temperatures in float32."""
    tokens, lengths, _ = batch
    model = tiny_model("float64", num_layers=1)
    of = partial(jllm.token_logprobs, model.params, model.config, page_size=8)
    want = of(tokens, lengths, temperature=0.7)
    np.testing.assert_array_equal(of(tokens, lengths, temperature=float(np.float32(0.7))), want)
    np.testing.assert_array_equal(of(tokens.tolist(), lengths.at[0].add(5).tolist(), temperature=0.7), want)
    for shape in ((0, 5), (2, 0)):
        empty = of(jnp.zeros(shape, jnp.int32), jnp.zeros(shape[0], jnp.int32), entropy=True)
        assert [x.shape for x in empty] == [shape, shape]


def test_options_of_weights_or_values_that_it_could_not_make_are_refused():
    model, tokens = tiny_model(**WIDE, num_layers=1), np.ones((1, 4), np.int32)
    rounded = quantize(model.params, "w4a16-g32")
    serve = partial(Engine, **one_size(2, 8, 12), num_pages=4)
    assert serve(replace(model, params=rounded)).token_logprobs_options()["quantize"] is not None
    for params in (ptq.awq(model, "w4a16-g32", tokens, clip=False), ptq.gptq(model, "w4a16-g32", tokens)):
        with pytest.raises(ConfigError, match="codes come from a file or a calibration"):
            serve(replace(model, params=params)).token_logprobs_options()
    edits = Hooks(edit={"layers.0.mlp": lambda value, rows: value * 2})
    with pytest.raises(ConfigError, match="hooks edit values"):
        serve(model, hooks=edits).token_logprobs_options()


def test_routes_that_do_not_fit_are_refused():
    model, given = experts_model(), (jnp.ones((1, 4), jnp.int32), jnp.asarray([4]))
    with pytest.raises(ConfigError, match="routes of 'layers.0.routes': the model has layers.1.routes"):
        jllm.token_logprobs(model.params, model.config, *given, routes={"layers.0.routes": np.zeros((1, 4, 2))})
    with pytest.raises(ValueError, match="routes of layers.1.routes are float32, expected int32"):
        jllm.token_logprobs(model.params, model.config, *given, routes={"layers.1.routes": np.zeros((1, 4, 2), "f")})
    with pytest.raises(ValueError, match=r"shape \(1, 4, 3\), expected \(1, 4, 2\)"):
        jllm.token_logprobs(model.params, model.config, *given, routes={"layers.1.routes": np.zeros((1, 4, 3))})


def test_what_it_does_not_do_is_refused_in_one_line():
    model = tiny_model(num_layers=1)
    tokens, lengths = jnp.ones((2, 5), jnp.int32), jnp.asarray([5, 3], jnp.int32)
    of = partial(jllm.token_logprobs, config=model.config, lengths=lengths)
    with pytest.raises(EvaluationError, match="no vmap: give all sequences as rows"):
        jax.vmap(lambda tokens: of(model.params, tokens=tokens))(tokens[None])
    with pytest.raises(EvaluationError, match="differentiable once"):
        jax.hessian(lambda norm: of(replace(model.params, norm=norm), tokens=tokens).sum())(model.params.norm)
    with pytest.raises(EvaluationError, match="differentiable once, backward: .* jvp are not there"):
        jax.jvp(
            lambda norm: of(replace(model.params, norm=norm), tokens=tokens), [model.params.norm], [model.params.norm]
        )
    with pytest.raises(EvaluationError, match="no vmap"):
        jax.vmap(lambda heat: of(model.params, tokens=tokens, temperature=heat))(jnp.asarray([0.7, 0.8]))
    with pytest.raises(EvaluationError, match="no vmap"):
        jax.vmap(lambda n: of(model.params, tokens=tokens, lengths=n))(lengths[None])
    with pytest.raises(EvaluationError, match="differentiable by params alone"):
        jax.grad(lambda heat: of(model.params, tokens=tokens, temperature=heat).sum())(0.7)
    for error, message, options in (
        (ConfigError, "no KV format kivi2-g16-r32", {"kv_cache": "kivi2-g16-r32"}),
        (ConfigError, "page size 7 is not supported", {"page_size": 7}),
        (ConfigError, "temperature must be above 0, not 0", {"temperature": 0}),
        (ConfigError, "temperature must be one number", {"temperature": jnp.ones(2)}),
        (ConfigError, "one scale for all tokens", {"quantize": "w8a8-tensor"}),
        (QuantizationError, "unknown quantization scheme", {"quantize": "w9"}),
    ):
        with pytest.raises(error, match=message):
            of(model.params, tokens=tokens, **options)
    with pytest.raises(QuantizationError, match="quantized already .*: leave quantize out"):
        of(quantize(model.params, "w8a8"), tokens=tokens, quantize="w8a8")
    with pytest.raises(ValueError, match=r"expected \[B, L\] and \[B\]"):
        of(model.params, tokens=tokens[0])
    with pytest.raises(ValueError, match="tokens are float32, expected int32"):
        of(model.params, tokens=tokens.astype("f"))
