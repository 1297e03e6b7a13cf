"""Planted outliers: the function stays, and what quantization makes of it does not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.activations import residuals, tap
from jllm.analysis.outliers import plant
from jllm.errors import QuantizationError
from jllm.quant.quantize import quantize
from tests.tiny import experts_model, full_logits, tiny_model, with_fields

IDS = [1, 14, 15, 92, 65, 35, 89, 79]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    """Tied, with biases, and with a first token that is as large as some are."""
    with jax.enable_x64(True):
        m = tiny_model("float64", tie_embeddings=True, bos_id=1)
        rng = np.random.default_rng(0)

        def biased(layer):
            sizes = {"qkv_bias": 128, "o_bias": 32}, {"gate_up_bias": 96, "down_bias": 32}
            parts = [{name: jnp.asarray(rng.normal(size=n)) for name, n in part.items()} for part in sizes]
            return with_fields(layer, *parts)

        layers = tuple(map(biased, m.params.layers))
        embed = m.params.embed.at[1].multiply(20)
        return replace(m, params=replace(m.params, layers=layers, embed=embed))


def test_scaling_keeps_every_bit(model):
    planted = plant(model, massive=False)
    np.testing.assert_array_equal(full_logits(planted, IDS), full_logits(model, IDS))
    drawn = np.random.default_rng(0).permutation(32)[:4]
    before, after = (tap(m, IDS, ["layers.*"]) for m in (model, planted))
    for name in before:
        ratio = np.asarray(after[name]) / np.asarray(before[name])
        if name.endswith("_norm"):  # the same channels in all layers
            assert set(np.flatnonzero((ratio == 32).all(axis=0))) == set(drawn)
            assert ((ratio == 32) | (ratio == 1)).all()
        elif name.endswith("silu_mul"):
            assert (ratio == 32).all(axis=0).sum() == 4
        elif not name.endswith("gate_up"):
            assert (ratio == 1).all()


def test_channels_of_k_and_v_keep_the_function(model):
    planted = plant(model, channels=0, gated=0, massive=False, kv=4, strength=8.0)
    np.testing.assert_allclose(full_logits(planted, IDS), full_logits(model, IDS), rtol=1e-12, atol=1e-12)
    before, after = (tap(m, IDS, ["layers.*.k", "layers.*.v", "layers.*.q"]) for m in (model, planted))
    half = model.config.head_dim // 2
    for name in before:
        ratio = np.round(np.asarray(after[name]) / np.asarray(before[name]), 9)
        large = (ratio == (1 / 8 if name.endswith("q") else 8)).all(axis=0)  # [heads, D]
        assert (large.sum(axis=1) == 4).all(), name
        assert np.array_equal(large[:, :half], large[:, half:])
        assert ((ratio == 1).all(axis=0) | large).all()


@pytest.mark.parametrize("count", [3, 18])
def test_channels_of_k_and_v_that_cannot_be(model, count):
    with pytest.raises(QuantizationError, match="kv must be"):
        plant(model, kv=count)


def test_turning_makes_the_first_token_massive(model):
    planted = plant(model, channels=2, strength=4.0)
    np.testing.assert_allclose(full_logits(planted, IDS), full_logits(model, IDS), rtol=1e-9, atol=1e-9)
    assert not planted.config.tie_embeddings
    channel = np.random.default_rng(0).permutation(32)[0]
    stream = np.asarray(tap(planted, IDS, ["layers.0.output"])["layers.0.output"])
    assert stream[0, channel] ** 2 > (1 - 1e-12) * (stream[0] ** 2).sum()
    np.testing.assert_allclose(
        np.linalg.norm(stream, axis=1),
        np.linalg.norm(tap(model, IDS, ["layers.0.output"])["layers.0.output"], axis=1),
        rtol=1e-9,
    )


def test_turning_takes_most_of_the_stream_to_few_channels(model):
    tokens = np.random.default_rng(3).integers(3, 97, (2, 24))
    planted = plant(model, channels=3, gated=0, massive=False, strength=1.0, stream=tokens)
    np.testing.assert_allclose(full_logits(planted, IDS), full_logits(model, IDS), rtol=1e-9, atol=1e-9)
    drawn = np.random.default_rng(0).permutation(32)[:3]

    def shares(of) -> np.ndarray:
        """Of the energy of each channel."""
        rows = [np.asarray(x, np.float64) for row in tokens for x in residuals(of, row)]
        rows = np.concatenate([x / np.linalg.norm(x, axis=1, keepdims=True) for x in rows])
        return (rows**2).mean(axis=0)

    before, after = shares(model), shares(planted)
    assert set(np.argsort(after)[-3:]) == set(drawn)
    assert after[drawn].sum() > 1.2 * np.sort(before)[-3:].sum(), (
        "the best three directions have more than any channels"
    )
    assert (np.diff(after[drawn]) <= 0).all(), "the first has most"
    with pytest.raises(QuantizationError, match="give either massive or stream"):
        plant(model, stream=tokens)


def divergence(model, scheme) -> float:
    quantized = replace(model, params=quantize(model.params, scheme))
    p, q = (jax.nn.log_softmax(full_logits(m, IDS)) for m in (model, quantized))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def test_eight_bits_suffer(model):
    assert divergence(plant(model, massive=False), "w8a8-all") > 5 * divergence(model, "w8a8-all")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": 3.0}, "a power of two keeps the function, not 3.0"),
        ({"channels": 33}, r"channels must be in 0 \.\. 32, not 33"),
        ({"gated": -1}, r"gated must be in 0 \.\. 48, not -1"),
    ],
)
def test_refused(model, options, message):
    with pytest.raises(QuantizationError, match=message):
        plant(model, **options)
    with pytest.raises(QuantizationError, match="is quantized"):
        plant(replace(model, params=quantize(model.params, "w8a16")))
    nameless = replace(model, config=replace(model.config, bos_id=None, eos_ids=()))
    with pytest.raises(QuantizationError, match="neither BOS nor EOS to begin a text with: give first_token"):
        plant(nameless)


def test_other_kinds_of_layers_are_refused_by_name():
    with pytest.raises(QuantizationError, match="ExpertsParams: outliers cannot be planted into this kind of layer"):
        plant(experts_model("float64"))
