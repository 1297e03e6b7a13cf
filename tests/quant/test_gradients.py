"""Gradients through quantized weights: finite differences where the loss is smooth, the straight-through rule where
activations are rounded."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.model.backbone import Packed, packed_logits
from jllm.model.fused_linear import norm_linear, silu_linear
from jllm.model.linear import linear
from jllm.model.weight_inputs import rounded_inputs
from jllm.quant.quantize import quantize
from pallas_kernels.formats import quantized_weights
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode
from pallas_kernels.formats.weight_formats import parse_weight_format
from tests.tiny import tiny_model

IDS = jnp.asarray([3, 14, 15, 92, 65, 35, 89, 79], jnp.int32)
GROUPS = parse_weight_format("w8a8-act-g32")
encode = jax.jit(quantized_weights.encode, static_argnums=1)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def widen(w):
    """Scales in float64, so that a small step in them is one."""
    if not isinstance(w, QuantizedWeight) or w.format.double_quant:
        return w
    return replace(w, scales=w.scales.astype(jnp.float64))


@partial(jax.jit, static_argnums=1)
def loss(params, config):
    batch = Packed(IDS, jnp.arange(8, dtype=jnp.int32), jnp.zeros(8, jnp.int32))
    logprobs = jax.nn.log_softmax(packed_logits(params, config, batch))
    return -logprobs[jnp.arange(7), IDS[1:]].mean()


gradient = jax.jit(jax.grad(loss, allow_int=True), static_argnums=1)


def test_whole_model_against_finite_differences():
    """Of a random direction in all that is not an integer: scales, norms, embedding and head."""
    model = tiny_model("float64", num_layers=1, intermediate_size=64)
    quantized = quantize(model.params, "w4a16-g32")
    params = jax.tree.map(widen, quantized, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    grads = gradient(params, model.config)
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(params)
    moved, slope = [], 0.0
    for leaf, grad in zip(leaves, jax.tree.leaves(grads), strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            assert grad.dtype == jax.dtypes.float0
            moved.append(None)
            continue
        direction = np.asarray(leaf) * rng.standard_normal(leaf.shape)
        assert np.abs(grad).max() > 0
        moved.append(direction)
        slope += float((np.asarray(grad) * direction).sum())

    def at(step):
        new = [x if d is None else x + step * d for x, d in zip(leaves, moved)]
        return float(loss(jax.tree.unflatten(tree, new), model.config))

    assert slope == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-6)
    # What is stored is float16: the same gradient, in that.
    stored = gradient(quantized, model.config).layers[0].mlp.down.scales
    assert stored.dtype == quantized.layers[0].mlp.down.scales.dtype
    np.testing.assert_allclose(stored, grads.layers[0].mlp.down.scales, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["w8a8", "fp8", "w8a8-tensor", "w8a8-act-g32", "llm-int8-t2"])
def test_rounding_of_activations_is_passed_straight_through(name):
    """Inputs get what the decoded weight says, weights what the rounded inputs say."""
    fmt = parse_weight_format(name)
    K = fmt.row_group or 40
    w, x, g = encode(normal(0, 64, K), fmt), normal(1, 6, K), normal(2, 6, 64)
    bias, residual = normal(3, 64), normal(4, 6, 64)
    y, pull = jax.vjp(lambda *args: linear(args[0], args[1], args[2], residual=args[3]), x, widen(w), bias, residual)
    dx, dw, db, dr = pull(g)
    full = np.asarray(decode(w, jnp.float64))
    np.testing.assert_allclose(dx, g @ full, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(dr, g)
    np.testing.assert_allclose(db, np.asarray(g).sum(axis=0), rtol=1e-12)
    # The product without addends is linear in each row's scale: its gradient is <g, y> of that row over the scale.
    rows = (np.asarray(g) * np.asarray(y - bias[None, :] - residual)).sum(axis=0) / np.asarray(
        w.scales[:64], np.float64
    )
    np.testing.assert_allclose(dw.scales[:64], rows, rtol=1e-9)
    if fmt.codes == "int8":
        assert dw.values.dtype == jax.dtypes.float0
    else:
        assert not np.asarray(dw.values, np.float32).any()


@pytest.mark.parametrize("name", ["w8a8", "nf4"])
def test_norm_and_silu_before_a_product(name):
    """As if the product's inputs had been made apart, and rounded straight through."""
    fmt = parse_weight_format(name)
    w, x, weight, g = encode(normal(0, 64, 64), fmt), normal(1, 6, 64), 1 + normal(2, 64) / 4, normal(3, 6, 64)
    full = decode(w, jnp.float64)

    def rms(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight[None, :]

    def silu(x):
        return jax.nn.silu(x[:, :64]) * x[:, 64:]

    dot = partial(jnp.einsum, "tk,nk->tn")
    got = jax.vjp(lambda x, weight: norm_linear(x, weight, w, eps=1e-5), x, weight)[1](g)
    want = jax.vjp(lambda x, weight: dot(rms(x, weight), full), x, weight)[1](g)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    gate_up, residual = normal(4, 6, 128), normal(5, 6, 64)
    got = jax.vjp(lambda x: silu_linear(x, w, residual=residual), gate_up)[1](g)
    want = jax.vjp(lambda x: dot(silu(x), full) + residual, gate_up)[1](g)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-10, atol=1e-12)


def test_an_mlp_whose_down_projection_takes_groups():
    """As if its values had been made apart, and rounded straight through."""
    w, reader = encode(normal(0, 128, 64), parse_weight_format("w8a8")), encode(normal(1, 64, 64), GROUPS)
    x, weight, bias, g = normal(2, 6, 64), 1 + normal(3, 64) / 4, normal(4, 64), normal(5, 6, 64)

    def plain(x, weight, bias):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight[None, :]
        gate, up = jnp.split(jnp.einsum("tk,nk->tn", rounded_inputs(y, w.format), decode(w, jnp.float64)), 2, axis=1)
        z = rounded_inputs(jax.nn.silu(gate) * up, GROUPS)
        return jnp.einsum("tk,nk->tn", z, decode(reader, jnp.float64)) + bias[None, :] + x

    def quantized(x, weight, bias):
        return silu_linear(norm_linear(x, weight, w, eps=1e-5), reader, bias, residual=x)

    got = jax.vjp(quantized, x, weight, bias)[1](g)
    for a, b in zip(got, jax.vjp(plain, x, weight, bias)[1](g), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_eight_bits_everywhere_point_the_same_way():
    """Of the whole model with rounded activations: close to the wide model's gradient, which rounding alone would not
    let through at all."""
    model = tiny_model("float64", num_layers=1)
    wide = gradient(model.params, model.config)
    got = gradient(quantize(model.params, "w8a8-all"), model.config)
    for a, b in ((got.embed, wide.embed), (got.layers[0].attention.norm, wide.layers[0].attention.norm)):
        cosine = float((a * b).sum() / jnp.sqrt((a * a).sum() * (b * b).sum()))
        assert cosine > 0.97
