"""Weights with adapters: products of any base, gradients, and what merging gives."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.errors import ConfigError, QuantizationError
from jllm.model.adapted import Adapted, OneAdapter, Slots
from jllm.model.adapters import all_targets, empty_slots, init_adapter, merge_params, padded
from jllm.model.fused_linear import norm_gate_up, norm_linear
from jllm.model.linear import linear
from jllm.quant.quantize import quantize
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.forward import forward
from jllm.step.state import init_state
from pallas_kernels.formats.quantized_weights import encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from tests.tiny import tiny_model

PARTS, R, K, T = (32, 16, 16), 4, 64, 12


def adapted(base, dtype="float32"):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 3 * R, K)) / K**0.5, rng.normal(size=(2, 3, sum(PARTS), R))
    scale = jnp.asarray(rng.uniform(1, 2, size=(2, 3, 3)), "float32")
    slots = Slots(jnp.asarray(a, dtype), jnp.asarray(b, dtype), scale)
    rows = jnp.asarray([0, 2, -1] * 4, jnp.int32)
    return Adapted(base, slots, jnp.int32(1), rows, PARTS)


@pytest.mark.parametrize("backend", [None, "deterministic"])
@pytest.mark.parametrize("name", ["plain", "w8a8", "nf4", "w4a16-g32"])
def test_a_base_of_any_format_stays_as_it_is(name, backend):
    rng = np.random.default_rng(1)
    plain = jnp.asarray(rng.normal(size=(sum(PARTS), K)), "float32")
    base = plain if name == "plain" else encode(plain, parse_weight_format(name))
    x, residual = jnp.asarray(rng.normal(size=(T, K)), "float32"), jnp.asarray(rng.normal(size=(T, 64)), "float32")
    w = adapted(base)
    got, alone = (linear(x, each, residual=residual, backend=backend) for each in (w, base))
    assert (np.asarray(got)[2::3] == np.asarray(alone)[2::3]).all(), "rows without an adapter"
    part = np.repeat(np.arange(3), PARTS)
    for i, own in enumerate(np.asarray(w.rows).tolist()):
        if own >= 0:
            a, b, scale = (np.asarray(each[1, own], np.float64) for each in jax.tree.leaves(w.adapters))
            low = (a @ np.asarray(x[i], np.float64)).reshape(3, R) * scale[:, None]
            want = (low[part] * b).sum(1)
            assert np.abs(np.asarray(got - alone)[i] - want).max() < 1e-5 * np.abs(want).max()
    one = OneAdapter(*(each[1, 2] for each in jax.tree.leaves(w.adapters)))
    alike = linear(x, replace(w, adapters=one, layer=None, rows=None), residual=residual, backend=backend)
    np.testing.assert_allclose(np.asarray(alike)[1::3], np.asarray(got)[1::3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operation", [norm_linear, norm_gate_up])
def test_a_model_that_names_kernels_has_a_norm_before_adapters(operation):
    x, norm, base = jnp.ones((T, K)), jnp.ones(K), jnp.ones((sum(PARTS), K))
    w = adapted(base)
    w = replace(w, adapters=OneAdapter(*(each[1, 2] for each in jax.tree.leaves(w.adapters))), layer=None, rows=None)
    named, own = (operation(x, norm, w, eps=1e-5, backend=backend) for backend in ("mosaic", None))
    np.testing.assert_array_equal(named, own, "Mosaic's norm takes no float32")


@pytest.mark.parametrize("scheme", [None, pytest.param("w8a8", marks=pytest.mark.exhaustive), "nf4"])
def test_rows_without_an_adapter_have_the_bits_of_a_model_without_any(scheme):
    model = tiny_model("bfloat16", num_layers=1, hidden_size=64, intermediate_size=64)
    config, params = model.config, model.params if scheme is None else quantize(model.params, scheme)
    slots = empty_slots(all_targets(config), 2, R, np.dtype("bfloat16"), config)
    adapters = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), slots)
    chunks = [PromptChunk(0, [5, 6, 7], pages=[1]), PromptChunk(1, [8, 9], pages=[2], sampling={"adapter": 1})]

    def logits(params, count):
        state = init_state(config, slots=2, num_pages=4, dtype="bfloat16", adapters=params.adapters is not None)
        batch = ragged_batch(chunks[:count], adapters=params.adapters is not None)
        return forward(params, state, batch, config=config, backend="deterministic")[1].values

    alone, both = logits(params, 1), logits(replace(params, adapters=adapters), 2)
    assert (np.asarray(alone)[0] == np.asarray(both)[0]).all()
    assert not (np.asarray(logits(params, 2))[1] == np.asarray(both)[1]).all()


def test_merging_is_refused_where_it_would_round():
    model = tiny_model(num_layers=1, hidden_size=64, intermediate_size=64)
    adapter = init_adapter(model.config, jax.random.key(0), 2)
    with pytest.raises(QuantizationError, match="qkv is quantized: merge first, or serve the adapter beside it"):
        merge_params(quantize(model.params, "w8a16"), model.config, adapter)
    with pytest.raises(ConfigError, match="an adapter's rank must be an integer from 1 to 1024, not 0"):
        init_adapter(model.config, jax.random.key(0), 0)


def test_padding_a_rank_changes_no_value():
    config = tiny_model(num_layers=1).config
    adapter = init_adapter(config, jax.random.key(0), 3)
    adapter = {name: replace(each, b=jnp.ones_like(each.b)) for name, each in adapter.items()}
    params = tiny_model(num_layers=1).params
    merged = (merge_params(params, config, each) for each in (adapter, padded(adapter, 5)))
    for one, other in zip(*map(jax.tree.leaves, merged), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
