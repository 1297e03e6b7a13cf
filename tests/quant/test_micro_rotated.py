"""Formats that rotate their blocks (-h), scales of the least error, and MR-GPTQ, which takes both."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jllm
from jllm.errors import QuantizationError
from jllm.files.save import save
from jllm.model.linear import linear
from jllm.model.weight_inputs import rounded_inputs
from jllm.quant import calibration as ptq
from jllm.quant.calibration.block_scales import search_scales, squared_errors
from jllm.quant.calibration.inputs import rotate_gram
from jllm.quant.calibration.scale_search import output_error, round_clipped
from jllm.quant.calibration.solver import solve
from jllm.quant.quantize import quantize
from pallas_kernels.formats.block_floats import KINDS, round_blocks
from pallas_kernels.formats.hadamard import hadamard
from pallas_kernels.formats.quantized_weights import decode, encode, encode_with, grouped, rotate_groups, take_rows
from pallas_kernels.formats.weight_codes import fit_scales, store_scales
from pallas_kernels.formats.weight_formats import parse_weight_format
from tests.tiny import full_logits, tiny_model

pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1}  # matrices have two shapes
TOKENS = np.random.default_rng(0).integers(3, 97, (8, 64))


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def blocks_turn(columns, kind):
    """The matrix float64 [K, K] of a Hadamard matrix for each block."""
    block = KINDS[kind].block
    return np.kron(np.eye(columns // block), hadamard(block))


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_t(4, shape))


@settings(max_examples=12)
@given(st.sampled_from(list(KINDS)), st.sampled_from([1, 3]), st.integers(0, 99))
def test_the_function_stays_before_rounding(kind, groups, seed):
    with jax.enable_x64(True):
        fmt = parse_weight_format(f"{kind}-h")
        x, w = drawn(5, 32 * groups, seed=seed), drawn(7, 32 * groups, seed=seed + 1)
        turned = [np.asarray(rotate_groups(a, fmt)) for a in (x, w)]
        np.testing.assert_allclose(turned[0], np.asarray(x) @ blocks_turn(32 * groups, kind), atol=1e-12)
        np.testing.assert_allclose(turned[0] @ turned[1].T, x @ w.T, rtol=1e-10, atol=1e-10)
        gram = np.asarray(x).T @ np.asarray(x)
        np.testing.assert_allclose(rotate_gram(jnp.asarray(gram), fmt), turned[0].T @ turned[0], atol=1e-10)


@pytest.mark.parametrize("kind", list(KINDS))
def test_weights_and_inputs_by_the_definition(kind):
    """What is stored is the rotated weight's, what it stands for is turned back, and inputs meet it rotated."""
    x, w, turn = drawn(5, 96), drawn(40, 96, seed=1), blocks_turn(96, kind)
    made = encode(w, parse_weight_format(f"{kind}-h"))
    stored = encode(jnp.asarray(np.asarray(w) @ turn), parse_weight_format(kind))
    for name in ("values", "scales"):
        np.testing.assert_array_equal(*(np.asarray(getattr(a, name)).view(np.uint8) for a in (made, stored)))
    wide = np.asarray(decode(stored, jnp.float64))
    np.testing.assert_allclose(decode(made, jnp.float64), wide @ turn.T, atol=1e-12)
    np.testing.assert_allclose(take_rows(made, jnp.asarray([39, 0]), jnp.float64), (wide @ turn.T)[[39, 0]], atol=1e-12)
    rounded = np.asarray(round_blocks(jnp.asarray(np.asarray(x) @ turn), kind))
    np.testing.assert_allclose(linear(x, made), rounded @ wide.T, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(rounded_inputs(x, made.format), rounded @ turn.T, atol=1e-12)
    kept = replace(made, format=parse_weight_format(f"{kind}-h-weight"))
    np.testing.assert_allclose(linear(x, kept), np.asarray(x) @ turn @ wide.T, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(linear(x[2:3], kept)[0], linear(x, kept)[2], rtol=1e-12)
    gradient = jax.grad(lambda x: linear(x, made).sum())(x)
    np.testing.assert_allclose(gradient, np.tile((wide @ turn.T).sum(axis=0), (5, 1)), atol=1e-10)


def test_rotation_in_sixteen_bits_is_orthonormal():
    """Of a block of 32 an entry is no bfloat16: products are wider."""
    x = jnp.ones((1, 32), jnp.bfloat16) * 3
    turned = rotate_groups(x, parse_weight_format("mxfp4-h"))
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_allclose(turned[0, 0].astype(jnp.float32), 3 * 32**0.5, rtol=2**-9)
    np.testing.assert_array_equal(rotate_groups(turned, parse_weight_format("mxfp4-h")), x)


def nearest(x):
    return x.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def error_of(block, scale):
    return np.square(nearest(np.clip(block / scale, -6, 6)) * scale - block).sum()


def test_powers_of_two_are_the_best_of_three():
    x, fmt = np.asarray(drawn(16, 2, 32)), parse_weight_format("mxfp4")
    scales, stored, steps = search_scales(jnp.asarray(x), fmt)
    assert steps is None
    assert stored.dtype == jnp.uint8
    for n, g in np.ndindex(16, 2):
        asked = 2.0 ** (np.floor(np.log2(np.abs(x[n, g]).max())) - 2)
        best = min((asked, asked / 2, asked * 2), key=lambda scale: error_of(x[n, g], scale))
        assert scales[n, g] == best
    given, _ = fit_scales(jnp.asarray(x), fmt)
    assert 0 < (np.asarray(scales) != np.asarray(given)).mean() < 0.5
    zero = search_scales(jnp.zeros((32, 1, 32)), fmt)[0]
    assert (zero >= 2.0**-126).all()


def test_e4m3_scales_and_their_unit_lower_the_error():
    x, fmt = drawn(32, 6, 16), parse_weight_format("nvfp4")
    scales, stored, steps = search_scales(x, fmt)
    assert stored.dtype == ml_dtypes.float8_e4m3fn
    assert len(set(np.asarray(steps).tolist())) == 1
    np.testing.assert_array_equal(scales, np.asarray(stored, np.float32) * np.asarray(steps)[:, None])
    given = store_scales(fit_scales(x, fmt)[0], fmt)[0]
    found, plain = squared_errors(x, scales, fmt).sum(), squared_errors(x, given, fmt).sum()
    assert found < 0.85 * plain
    other = np.asarray(stored, np.float32) * np.asarray(steps)[:, None] * np.float32(1.02)
    assert found < squared_errors(x, jnp.asarray(other, jnp.float64), fmt).sum()  # the unit is fitted to them
    one = error_of(np.asarray(x[3, 2]), float(scales[3, 2]))
    np.testing.assert_allclose(squared_errors(x, scales, fmt)[3, 2], one, rtol=1e-12)
    assert jnp.isfinite(search_scales(jnp.zeros((32, 2, 16)), fmt)[0]).all()


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_columns_by_the_explicit_inverse(kind):
    """In the order of their inputs, with scales found before, the weight's columns staying where they are."""
    fmt, group = parse_weight_format(f"{kind}-h"), KINDS[kind].block
    turn = blocks_turn(64, kind)
    x, w = np.asarray(drawn(200, 64, seed=2)) * np.linspace(0.1, 3, 64), np.asarray(drawn(32, 64))
    got, finite = solve(
        jnp.asarray(w), jnp.asarray(x.T @ x), 0.01, fmt=fmt, act_order=True, static_groups=True, search=True
    )
    assert finite
    assert got.columns is None
    scales = np.repeat(np.asarray(search_scales(jnp.asarray(w @ turn).reshape(32, -1, group), fmt)[0]), group, axis=1)
    gram = turn.T @ x.T @ x @ turn
    order = np.argsort(-np.diag(gram), kind="stable")
    left, inverse = w @ turn, np.linalg.inv(gram + 0.01 * np.diag(gram).mean() * np.eye(64))
    want = np.zeros_like(left)
    for j in order:
        want[:, j] = nearest(np.clip(left[:, j] / scales[:, j], -6, 6)) * scales[:, j]
        left = left - np.outer((left[:, j] - want[:, j]) / inverse[j, j], inverse[j])
        with np.errstate(invalid="ignore", divide="ignore"):
            inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    np.testing.assert_allclose(decode(got, jnp.float64) @ turn, want, atol=1e-10)


@pytest.mark.parametrize("name", ["nvfp4-h", pytest.param("mxfp4-h", marks=pytest.mark.exhaustive)])
def test_mr_gptq_of_a_whole_model(name, tmp_path):
    model = tiny_model(seed=1, **SIZES)
    gram = next(ptq.layer_statistics(model, TOKENS, ("qkv",)))["qkv"].gram
    params = ptq.mr_gptq(model, name, TOKENS)
    leaf, w = params.layers[0].attention.qkv, model.params.layers[0].attention.qkv
    assert leaf.format.name == name
    errors = [
        float(output_error(decode(q) - w, gram))
        for q in (leaf, ptq.gptq(model, name, TOKENS).layers[0].attention.qkv, encode(w, leaf.format))
    ]
    assert errors[0] < errors[1] < 0.9 * errors[2]
    save(tmp_path, params, model.config)
    again = jllm.load(tmp_path)
    np.testing.assert_array_equal(full_logits(again, TOKENS[0]), full_logits(replace(model, params=params), TOKENS[0]))


def test_clipping_sees_rotated_inputs():
    """AWQ's clipping of groups moves outputs no more than rounding does, by the inputs that the groups meet."""
    fmt, w, x = parse_weight_format("mxfp4-h"), drawn(32, 64), np.array(drawn(100, 64, seed=5))
    x[:, 3] *= 30
    gram = jnp.asarray(x.T @ x)
    clipped, plain = round_clipped(w, gram, fmt), encode(w, fmt)
    block = np.s_[32:]  # one block: errors of several add up in other ways
    alone = jnp.zeros_like(gram).at[block, block].set(gram[block, block])
    errors = [float(output_error(decode(q, jnp.float64) - w, alone)) for q in (clipped, plain)]
    assert errors[0] <= errors[1]
    np.testing.assert_array_equal(grouped(w, fmt).shape, (32, 2, 32))


def test_what_cannot_be_says_so():
    model = tiny_model(**SIZES)
    for call, message in (
        (lambda: ptq.mr_gptq(model, "mxfp4", TOKENS), "takes formats that rotate blocks, such as mxfp4-h, not mxfp4"),
        (lambda: ptq.gptq(model, "mxfp4-h", TOKENS, act_order=True), "mxfp4-h rotates columns as they are: act_order"),
        (lambda: ptq.gptq(model, "w4a16-g32", TOKENS, search=True), "search is for blocks of small floats"),
        (lambda: quantize(model.params, "mxfp4-k"), "unknown quantization scheme 'mxfp4-k'; near ones"),
    ):
        with pytest.raises(QuantizationError, match=message):
            call()
    fmt = parse_weight_format("mxfp4-h")
    with pytest.raises(ValueError, match="mxfp4-h rotates groups of inputs in their order"):
        encode_with(drawn(32, 32), jnp.ones((32, 1)), None, fmt, columns=jnp.arange(32, dtype=jnp.int32))
