"""The residual stream after every layer, against the whole model's, and the noise of quantized weights in it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.activations import compare_layers, residuals
from jllm.errors import EvaluationError
from jllm.model.backbone import Packed, backbone
from jllm.quant.quantize import quantize
from tests.tiny import tiny_model

IDS = np.random.default_rng(3).integers(0, 97, size=20).tolist()


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("windows", [(), (4, None)])
def test_residuals_are_those_of_models_cut_off(windows):
    model = tiny_model("float64", windows=windows, embedding_multiplier=3.0)
    got = list(residuals(model, IDS))
    positions = jnp.arange(len(IDS), dtype=jnp.int32)
    batch = Packed(jnp.asarray(IDS, jnp.int32), positions, jnp.zeros_like(positions))
    assert len(got) == 3
    for n, x in enumerate(got):
        want = backbone(replace(model.params, layers=model.params.layers[:n]), model.config, batch, None)[0]
        np.testing.assert_allclose(x, want, rtol=1e-12, atol=1e-12)


def test_noise_of_quantized_weights():
    model = tiny_model("float64", intermediate_size=64)
    quantized = replace(model, params=quantize(model.params, "w4a16-g32"))
    got = compare_layers(quantized, model, IDS)
    streams = [[np.asarray(x) for x in residuals(m, IDS)] for m in (quantized, model)]
    assert got[0].snr_db == np.inf  # embeddings stay as they are
    for error, x, y in zip(got[1:], *(s[1:] for s in streams), strict=True):
        assert error.snr_db == pytest.approx(10 * np.log10((y**2).sum() / ((x - y) ** 2).sum()), rel=1e-10)
        assert error.largest == np.abs(x).max() == np.abs(x[:, error.channel]).max()
        assert error.largest_reference == np.abs(y).max()
    assert [e.layer for e in got] == [0, 1, 2]
    assert 5 < got[2].snr_db < got[1].snr_db < 40


def test_a_planted_outlier_is_found():
    model = tiny_model("float64")
    planted = replace(model, params=replace(model.params, embed=model.params.embed.at[:, 11].set(100.0)))
    got = compare_layers(planted, model, IDS)
    assert [(e.largest > 90, e.channel) for e in got] == [(True, 11)] * 3
    assert all(e.largest_reference < 50 for e in got)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "at least one"), ([0.5], "not float64"), ([97], r"in \[0, 97\)"), ([[1]], r"int64\[1, 1\]")],
)
def test_refused(tokens, message):
    with pytest.raises(EvaluationError, match=message):
        list(residuals(tiny_model(), tokens))


def test_models_of_other_shapes():
    with pytest.raises(EvaluationError, match=r"not \(97, 2, 32\) and \(97, 1, 32\)"):
        compare_layers(tiny_model(), tiny_model(num_layers=1), IDS)
