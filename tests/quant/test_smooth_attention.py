"""SmoothAttention: the function stays, channels of K and V come nearer to each other, and 4-bit K and V lose less."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.activations import tap
from jllm.analysis.evaluate import evaluate, record
from jllm.analysis.outliers import plant
from jllm.errors import QuantizationError
from jllm.quant import calibration as ptq
from jllm.quant.calibration import smoothing
from jllm.quant.quantize import quantize
from tests.tiny import full_logits, tiny_model, with_fields

TOKENS = np.random.default_rng(0).integers(3, 97, (3, 40))


@pytest.fixture(autouse=True, scope="module")
def wide():
    with jax.enable_x64(True):
        yield


def model_of(kind: str):
    model = tiny_model("float64", num_heads=4, num_kv_heads=2)
    rng = np.random.default_rng(1)

    def field(*shape):
        return jnp.asarray(1 + 0.5 * rng.normal(size=shape))

    made = {
        "plain": lambda: {},
        "biases": lambda: {"qkv_bias": field(8 * 16), "o_bias": field(32)},
        "norms": lambda: {"q_norm": field(16), "k_norm": field(16)},
    }[kind]
    layers = tuple(with_fields(layer, made()) for layer in model.params.layers)
    changes = {"plain": {}, "biases": {"qkv_bias": True, "o_bias": True}, "norms": {"qk_norm": True}}[kind]
    return replace(model, params=replace(model.params, layers=layers), config=replace(model.config, **changes))


def largest_of(model, name) -> np.ndarray:
    """[K, D]: a value's largest magnitudes over all tokens."""
    return np.max([np.abs(np.asarray(tap(model, row, [name])[name])).max(axis=0) for row in TOKENS], axis=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["plain", "biases", "norms"])
def test_the_function_stays_and_channels_are_divided_by_their_maxima(kind, alpha):
    model = model_of(kind)
    smoothed = replace(model, params=ptq.smooth_attention(model, TOKENS, alpha=alpha))
    np.testing.assert_allclose(full_logits(smoothed, TOKENS[0]), full_logits(model, TOKENS[0]), rtol=1e-9, atol=1e-9)
    for name in ("k", "v"):
        before, after = (largest_of(m, f"layers.1.{name}") for m in (model, smoothed))
        largest = before
        if name == "k":
            largest = np.tile(np.maximum(before[:, :8], before[:, 8:]), 2)
            largest = np.broadcast_to(largest.max(axis=0), largest.shape) if kind == "norms" else largest
        wanted = largest**alpha / np.exp(np.log(largest**alpha).mean(axis=1, keepdims=True))
        np.testing.assert_allclose(before / after, wanted, rtol=1e-9)


def divergence(model, subject, **options) -> float:
    ids = [row.tolist() for row in np.random.default_rng(2).integers(3, 97, (2, 60))]
    return evaluate(subject, ids, "document", reference=record(model, ids, "document"), **options).kl


def test_planted_channels_cost_four_bits_little():
    model = tiny_model("float64")
    planted = plant(model, channels=0, gated=0, kv=2, massive=False, strength=32.0)
    smoothed = replace(planted, params=ptq.smooth_attention(planted, TOKENS, alpha=1.0))
    plain, better = (divergence(model, subject, kv_cache="int4-g16") for subject in (planted, smoothed))
    assert better < 0.2 * plain


def test_a_fault_is_found(monkeypatch):
    monkeypatch.setattr(smoothing, "scale_keys", lambda layer, config, s: layer.__class__(layer.attention, layer.mlp))
    with pytest.raises(AssertionError):
        test_the_function_stays_and_channels_are_divided_by_their_maxima("plain", 1.0)


def test_what_is_refused():
    model = tiny_model("float64", num_layers=1)
    with pytest.raises(QuantizationError, match=r"alpha must be in 0 \.\. 1 \(0 changes no channel, 1 makes all alike"):
        ptq.smooth_attention(model, TOKENS, alpha=2)
    with pytest.raises(QuantizationError, match="is quantized already"):
        ptq.smooth_attention(replace(model, params=quantize(model.params, "w8a16")), TOKENS)
