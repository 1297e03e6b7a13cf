"""GPTQ, AWQ and SmoothQuant: each against its formula in float64, and against plain rounding."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.analysis.activations import tap
from jllm.analysis.own_tokens import own_tokens
from jllm.errors import EvaluationError, QuantizationError
from jllm.files.load_params import load_params
from jllm.files.save import save
from jllm.model.params import matrices
from jllm.quant import calibration as ptq
from jllm.quant.calibration.scale_search import output_error, round_clipped, search_scales
from jllm.quant.calibration.solver import solve
from jllm.quant.quantize import quantize
from jllm.step.buckets import Bucket
from pallas_kernels.formats import quantized_weights, weight_codes
from pallas_kernels.formats.weight_formats import parse_weight_format
from tests.tiny import full_logits, tiny_model, with_fields

TOKENS = np.random.default_rng(5).integers(0, 97, size=(4, 12)).astype(np.int32)
encode = jax.jit(quantized_weights.encode, static_argnums=1)
decode = jax.jit(quantized_weights.decode, static_argnums=1)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    """One layer with biases where they matter, and inputs of quite different sizes, as real ones are."""
    with jax.enable_x64(True):
        m = tiny_model("float64", num_layers=2, intermediate_size=64, embedding_multiplier=3.0)
        rng = np.random.default_rng(1)

        def uneven(layer):
            norms = [jnp.asarray(np.exp(rng.normal(size=32))) for _ in range(2)]
            biases = [jnp.asarray(rng.normal(size=128)), jnp.asarray(rng.normal(size=128) / 4)]
            attention = {"norm": norms[0], "qkv_bias": biases[0]}
            return with_fields(layer, attention, {"norm": norms[1], "gate_up_bias": biases[1]})

        return replace(m, params=replace(m.params, layers=tuple(uneven(layer) for layer in m.params.layers)))


@pytest.fixture(scope="module")
def statistics(model):
    with jax.enable_x64(True):
        return list(ptq.layer_statistics(model, TOKENS))


def test_statistics_are_those_of_what_layers_read(model, statistics):
    names = {"qkv": "attn_norm", "o": "attention", "gate_up": "mlp_norm", "down": "silu_mul"}
    taps = [tap(model, row, ["layers.1.*"]) for row in TOKENS.tolist()]
    for field, name in names.items():
        x = np.concatenate([np.asarray(t[f"layers.1.{name}"]) for t in taps])
        found = statistics[1][field]
        assert found.tokens == len(x) == 48
        np.testing.assert_allclose(found.absmax, np.abs(x).max(axis=0), rtol=1e-10)
        np.testing.assert_allclose(found.mean_abs, np.abs(x).mean(axis=0), rtol=1e-10)
        np.testing.assert_allclose(found.gram, x.T @ x, rtol=1e-9, atol=1e-9)


# SmoothQuant


def test_smoothing_keeps_the_function_and_balances(model, statistics):
    """By the formula; and with alpha 1/2, a channel's largest input and its largest weight become equal."""
    params = ptq.smooth(model, TOKENS)
    smoothed = replace(model, params=params)
    np.testing.assert_allclose(full_logits(smoothed, TOKENS[0]), full_logits(model, TOKENS[0]), rtol=1e-9, atol=1e-9)
    for layer, before, stats in zip(params.layers, model.params.layers, statistics, strict=True):
        s = np.asarray(before.attention.norm / layer.attention.norm)
        w = np.abs(np.asarray(before.attention.qkv)).max(axis=0)
        np.testing.assert_allclose(s, np.sqrt(np.asarray(stats["qkv"].absmax) / w), rtol=1e-10)
        np.testing.assert_allclose(stats["qkv"].absmax / s, w * s, rtol=1e-10)
    partly = ptq.smooth(model, TOKENS, fields=["qkv"])
    np.testing.assert_array_equal(partly.layers[0].mlp.down, model.params.layers[0].mlp.down)


# GPTQ


def reference_gptq(w, gram, order, group, damping=0.01):
    """Column by column with the explicit inverse, each column being eliminated from it as it is done (Frantar and
    Alistarh, arXiv 2208.11580): signed codes of 4 bits in that order, and scales [N, groups]."""
    w = np.array(w)[:, order]
    inverse = np.linalg.inv((gram + damping * np.diag(gram).mean() * np.eye(len(gram)))[np.ix_(order, order)])
    codes, scales = np.zeros(w.shape, np.int8), []
    for j in range(w.shape[1]):
        if j % group == 0:
            exact = np.abs(w[:, j : j + group]).max(axis=1) / 7.5
            half = exact.astype(np.float16)
            up = np.nextafter(half, np.float16(np.inf))
            scales.append(np.where(half < exact, up, half).astype(np.float64))
        codes[:, j] = np.clip(np.round(w[:, j] / scales[-1]), -8, 7)
        error = (w[:, j] - codes[:, j] * scales[-1]) / inverse[j, j]
        w[:, j + 1 :] -= np.outer(error, inverse[j, j + 1 :])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes, np.stack(scales, axis=1)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("dead", [[], [3, 40, 41]])
def test_codes_are_those_of_the_explicit_inverse(model, statistics, act_order, dead):
    """Inputs that never come count as 1 in the Hessian's diagonal, as in the authors' code: here more than others."""
    w, gram = model.params.layers[0].mlp.down, np.asarray(statistics[0]["down"].gram).copy()
    gram *= 1e-3 if dead else 1
    gram[dead] = gram[:, dead] = 0
    given = gram.copy()  # JAX may read it while what follows writes
    got, finite = solve(w, given, 0.01, fmt=parse_weight_format("w4a16-g32"), act_order=act_order)
    order = np.argsort(-np.diag(gram), kind="stable") if act_order else np.arange(64)
    gram[dead, dead] = 1
    codes, scales = reference_gptq(w, gram, order, 32)
    assert finite
    np.testing.assert_array_equal(weight_codes.unpack4(got.values, signed=True), codes)
    np.testing.assert_array_equal(np.asarray(got.scales, np.float64).T, scales)
    assert (got.columns is None) == (not act_order)
    want = np.zeros((32, 64))
    want[:, order] = codes * np.repeat(scales, 32, axis=1)
    np.testing.assert_allclose(decode(got, jnp.float64), want, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("w4a16-g64-zp", {"act_order": True, "static_groups": True}),
        ("nf4-g32", {}),
        ("nf4-g32-dq", {"act_order": True}),
        ("w8a8", {}),
        ("uint8-zp", {"act_order": True}),
        ("fp8", {}),
        ("fp8-b128", {}),
    ],
)
def test_outputs_move_less_than_by_rounding(model, statistics, name, options):
    """In every format that a weight can have; tokens fewer than columns, as for a short calibration."""
    fmt, w, gram = parse_weight_format(name), model.params.layers[0].mlp.down, statistics[0]["down"].gram
    got, finite = solve(w, gram, 0.01, fmt=fmt, **options)
    rounded = encode(w, fmt)
    assert finite
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(lambda x: (x.shape, x.dtype), rounded)
    errors = [float(output_error(decode(q, jnp.float64) - w, gram)) for q in (got, rounded)]
    assert errors[0] < 0.8 * errors[1]


def test_padded_weights_and_dead_inputs():
    """A weight whose sizes are no multiples of 32; inputs that never come are rounded to nearest."""
    rng = np.random.default_rng(0)
    w, x = jnp.asarray(rng.normal(size=(20, 52))), rng.normal(size=(200, 52))
    x[:, 7] = 0
    fmt = parse_weight_format("w8a8")
    got, finite = solve(w, jnp.asarray(x.T @ x), 0.01, fmt=fmt)
    assert finite
    assert not np.asarray(got.values[:20, 52:]).any()
    np.testing.assert_array_equal(decode(got, jnp.float64)[:, 7], decode(encode(w, fmt), jnp.float64)[:, 7])


def test_gptq_goes_through_quantized_layers(model, tmp_path):
    """The second layer's weights are solved for what the quantized first one yields; files keep columns' order."""
    params = ptq.gptq(model, "w4a16-g32", TOKENS, act_order=True)
    quantized = replace(model, params=params)
    stats = list(ptq.layer_statistics(quantized, TOKENS, ("qkv",)))
    found, source = params.layers[1].attention.qkv, model.params.layers[1].attention.qkv
    again, _ = solve(source, stats[1]["qkv"].gram, 0.01, fmt=found.format, act_order=True)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)
    narrow = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x, params)
    narrow = replace(
        narrow, layers=tuple(with_fields(layer, {"qkv_bias": None}, {"gate_up_bias": None}) for layer in narrow.layers)
    )
    config = replace(model.config, dtype="float32", embedding_multiplier=1.0)  # as files of LLaMA have it
    save(tmp_path, narrow, config)
    for a, b in zip(jax.tree.leaves(load_params(tmp_path, config)), jax.tree.leaves(narrow), strict=True):
        np.testing.assert_array_equal(a, b)


# AWQ


def test_searched_scales_and_clips_move_outputs_less(model, statistics):
    fmt = parse_weight_format("w4a16-g32")
    layer, stats = model.params.layers[0], statistics[0]
    for field in ("qkv", "o"):
        w, gram = matrices(layer)[field], stats[field].gram
        plain = output_error(decode(encode(w, fmt), jnp.float64) - w, gram)
        s = search_scales(layer, model.config, field, stats[field], fmt)
        scaled = decode(encode(w * s[None, :], fmt), jnp.float64) / s[None, :]
        assert output_error(scaled - w, gram) < (0.9 if field == "qkv" else 1.0001) * plain
    heads = np.asarray(s).reshape(2, 2, 16)  # of o: alike for query heads that share a KV head
    np.testing.assert_array_equal(heads[:, 0], heads[:, 1])
    clipped = decode(round_clipped(w, gram, fmt), jnp.float64)
    blocks = [slice(g, g + 32) for g in (0, 32)]
    for b in blocks:  # what the search minimizes, of each row and group
        before, after = (
            (np.asarray(x - w)[:, b] @ gram[b, b]) * np.asarray(x - w)[:, b]
            for x in (decode(encode(w, fmt), jnp.float64), clipped)
        )
        assert (after.sum(axis=1) <= before.sum(axis=1) * (1 + 1e-9)).all()
        assert after.sum() < 0.95 * before.sum()
    exempt = decode(round_clipped(w, gram, fmt, exempt=5), jnp.float64)
    np.testing.assert_array_equal(exempt[:5], decode(encode(w, fmt), jnp.float64)[:5])
    np.testing.assert_array_equal(exempt[5:], clipped[5:])


def divergence(model, params) -> float:
    p, q = (jax.nn.log_softmax(full_logits(replace(model, params=x), TOKENS[0])) for x in (model.params, params))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def test_awq_of_a_whole_model(model):
    """Better than rounding, where inputs are uneven; and it would be the same function, were nothing rounded."""
    awq = ptq.awq(model, "w4a16-g32", TOKENS)
    assert divergence(model, awq) < 0.7 * divergence(model, quantize(model.params, "w4a16-g32"))
    ratio = np.asarray(awq.layers[0].attention.norm / model.params.layers[0].attention.norm)
    wide = np.asarray(decode(awq.layers[0].attention.qkv, jnp.float64))[:64] * ratio[None, :]
    want = np.asarray(model.params.layers[0].attention.qkv)[:64]
    assert np.linalg.norm(wide - want) < 0.15 * np.linalg.norm(want)
    plain = ptq.awq(model, "w4a16-g32", TOKENS, clip=False)
    for a, b in zip(awq.layers, plain.layers, strict=True):  # ranges of values are clipped, of queries and keys not
        alike = np.asarray(decode(a.attention.qkv, jnp.float64) == decode(b.attention.qkv, jnp.float64))
        assert alike[: 64 + 32].all()
        assert not alike[64 + 32 :].all()


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: ptq.gptq(m, "w4a16-g32", [1, 2, 3]), r"integers \[rows, length\], not int64\[3\]"),
        (lambda m: ptq.gptq(m, "w4a16-g32", [[1, 97]]), r"in \[0, 97\)"),
        (lambda m: ptq.gptq(m, "w4a16-g32", np.zeros((1, 200), np.int32)), "the context is 128"),
        (lambda m: ptq.gptq(m, "w4a16-g32", TOKENS, damping=0), "damping must be above 0"),
        (lambda m: ptq.awq(m, "w4a61", TOKENS), "unknown quantization scheme 'w4a61'"),
        (lambda m: ptq.smooth(m, TOKENS, alpha=1.5), "alpha must be in 0 .. 1"),
        (lambda m: ptq.smooth(m, TOKENS, fields=["up"]), "unknown field 'up'; known are qkv, o, gate_up, down"),
        (
            lambda m: ptq.awq(replace(m, params=quantize(m.params, "w8a16")), "nf4", TOKENS),
            "qkv_proj is quantized already",
        ),
    ],
)
def test_refused(model, call, message):
    with pytest.raises(QuantizationError, match=message):
        call(model)


def test_own_tokens_are_the_models(model):
    first = replace(model, config=replace(model.config, bos_id=1))
    draw = partial(own_tokens, first, rows=2, length=5, max_slots=2, buckets=(Bucket(2, 2, 2),))
    ids = draw(seed=3)
    assert ids.shape == (2, 5)
    assert (ids[:, 0] == 1).all()
    np.testing.assert_array_equal(ids, draw(seed=3))
    with pytest.raises(EvaluationError, match="neither BOS nor EOS"):
        own_tokens(replace(model, config=replace(model.config, eos_ids=())))


def test_names_that_are_gone_say_what_does_better():
    for name in ptq.GONE:
        with pytest.raises(ImportError, match=f"{name} is gone: use"):
            getattr(ptq, name)


def test_a_checkpoint_with_scales_that_were_moved_loads(tmp_path):
    """Scales that some other method chose, and so no longer fit the largest value of their group, stay as stored."""
    model = tiny_model(intermediate_size=64, hidden_size=32)
    plain = quantize(model.params, "w4a16-g32")
    moved = jax.tree.map(lambda leaf: leaf * jnp.float16(0.75) if leaf.dtype == jnp.float16 else leaf, plain)
    save(tmp_path, moved, model.config)
    again = jllm.load(tmp_path, dtype=model.params.dtype)
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(a, b)
