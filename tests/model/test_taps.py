"""Named values of prefill and decode: each from its formula, the same by every way through the model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jllm.analysis.activations import tap
from jllm.errors import EvaluationError
from jllm.model.backbone import Packed, tapped_backbone
from jllm.model.taps import EXPERTS, LAYER, resolve_taps, tap_names
from jllm.quant.quantize import quantize
from jllm.step.batch import PromptChunk, ragged_batch
from jllm.step.merge import step
from jllm.step.state import Variant, init_state
from tests.tiny import full_logits, tiny_model

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    with jax.enable_x64(True):
        return tiny_model("float64")


@pytest.fixture(scope="module")
def everything(model):
    with jax.enable_x64(True):
        return {name: np.asarray(x) for name, x in tap(model, IDS, ["*", "*.weights"], prompt=7).items()}


def rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def test_each_follows_from_the_one_before(model, everything):
    """By the formulas of a layer, in numpy."""
    c, T = model.config, len(IDS)
    assert list(everything) == [name for name in tap_names(c.num_layers) if name.rpartition(".")[2] not in EXPERTS]
    np.testing.assert_array_equal(everything["embedding"], np.asarray(model.params.embed)[IDS])
    for i, p in enumerate(jax.tree.map(np.asarray, model.params.layers)):
        t = {name: everything[f"layers.{i}.{name}"] for name in LAYER}
        before = "embedding" if i == 0 else f"layers.{i - 1}.output"
        np.testing.assert_array_equal(t["input"], everything[before])
        H, K, D, F = c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size
        heads = t["qkv"].reshape(T, H + 2 * K, D)
        silu = t["gate_up"][:, :F] / (1 + np.exp(-t["gate_up"][:, :F]))
        scores = np.einsum("qhd,khd->hqk", t["q"], np.repeat(t["k"], H // K, axis=1)) / np.sqrt(D)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        want = {
            "attn_norm": rms(t["input"], p.attention.norm, c.norm_eps),
            "qkv": t["attn_norm"] @ p.attention.qkv.T,
            "v": heads[:, H + K :],
            "attention": np.einsum("hqk,khd->qhd", weights, np.repeat(t["v"], H // K, axis=1)).reshape(T, -1),
            "middle": t["input"] + t["attention"] @ p.attention.o.T,
            "mlp_norm": rms(t["middle"], p.mlp.norm, c.norm_eps),
            "gate_up": t["mlp_norm"] @ p.mlp.gate_up.T,
            "silu_mul": silu * t["gate_up"][:, F:],
            "output": t["middle"] + t["silu_mul"] @ p.mlp.down.T,
        }
        for name, x in want.items():
            np.testing.assert_allclose(t[name], x, rtol=1e-10, atol=1e-12, err_msg=name)
        # Position 0 is not rotated; rotation keeps norms.
        np.testing.assert_allclose(t["q"][0], heads[0, :H], rtol=1e-12)
        np.testing.assert_allclose(
            np.linalg.norm(t["k"], axis=-1), np.linalg.norm(heads[:, H : H + K], axis=-1), rtol=1e-12
        )
    np.testing.assert_allclose(everything["logits"], full_logits(model, IDS), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        everything["logits"], everything["norm"] @ np.asarray(model.params.head).T, rtol=1e-10, atol=1e-12
    )


@pytest.fixture(scope="module")
def first_layer(model):
    """The model cut off after its first layer."""
    params = replace(model.params, layers=model.params.layers[:1])
    return replace(model, params=params, config=replace(model.config, num_layers=1))


def test_the_step_that_serves_yields_them(first_layer, everything):
    """Prefill, then decode of the token that it samples."""
    state = init_state(first_layer.config, slots=2, num_pages=4, page_size=8, max_pages=4, dtype=jnp.float64)
    variant = Variant(taps=("layers.0.attention", "layers.0.silu_mul", "logits"))
    fixed = {"config": first_layer.config, "variant": variant}
    state, first = step(first_layer.params, state, ragged_batch([PromptChunk(0, IDS[:7], pages=[2, 1])]), **fixed)
    assert set(first.taps) == set(variant.taps)
    for name in ("layers.0.attention", "layers.0.silu_mul"):
        np.testing.assert_allclose(first.taps[name], everything[name][:7], rtol=1e-10, atol=1e-12)
    _, second = step(first_layer.params, state, ragged_batch(decodes=[0]), **fixed)
    whole = full_logits(first_layer, [*IDS[:7], int(first.tokens[0])])
    np.testing.assert_allclose(first.taps["logits"][0], whole[6], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(second.taps["logits"][0], whole[7], rtol=1e-10, atol=1e-12)


def test_nothing_is_computed_unasked():
    """Without taps, and with one that is an output anyway, a step has the same operations."""
    model = tiny_model("float64", num_layers=1)
    batch = Packed(*(jnp.zeros(4, jnp.int32) for _ in range(3)))

    def operations(taps) -> int:
        text = jax.jit(lambda p: tapped_backbone(p, model.config, batch, None, taps)).lower(model.params).as_text()
        return text.count("stablehlo.") + text.count("call @")

    plain = operations(())
    assert operations(("layers.0.output",)) == plain
    assert operations(("layers.0.weights",)) > plain


def test_readers_of_eight_bits_show_what_they_round(first_layer, everything):
    """Rounding comes after the value: taps of a quantized layer's first norm are the wide model's."""
    quantized = replace(first_layer, params=quantize(first_layer.params, "w8a8-all"))
    got = tap(quantized, IDS, ["layers.0.attn_norm", "layers.0.qkv"])
    np.testing.assert_allclose(got["layers.0.attn_norm"], everything["layers.0.attn_norm"], rtol=1e-12)
    assert 0 < np.abs(got["layers.0.qkv"] - everything["layers.0.qkv"]).max() < 0.2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers.0.attn_norms"], "near ones: .*attn_norm"),
        (["silumul"], r"near ones: layers\.\*\.silu_mul"),
        (["layers.2.output"], r"the model has layers 0 \.\. 1"),
        (["xyzzy"], r"names: embedding, norm, logits, layers\.I\. and input"),
        ("logits", "not the string 'logits'"),
    ],
)
def test_unknown_names(model, names, message):
    with pytest.raises(EvaluationError, match=message):
        tap(model, IDS, names)


def test_patterns_and_order():
    names = resolve_taps(["logits", "layers.*.v", "embedding"], 2)
    assert names == ("embedding", "layers.0.v", "layers.1.v", "logits")


@pytest.mark.parametrize("prompt", [0, 11])
def test_refused(model, prompt):
    with pytest.raises(EvaluationError, match=r"prompt must be in 1 \.\. 10"):
        tap(model, IDS, ["logits"], prompt=prompt)
