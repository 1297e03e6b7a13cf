"""Rotations: the function stays before anything is rounded, and what rounding costs beside outliers falls."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.analysis.evaluate import evaluate
from jllm.analysis.outliers import plant
from jllm.errors import QuantizationError
from jllm.files.save import save
from jllm.quant import calibration as ptq
from jllm.quant.quantize import quantize, weight_formats
from jllm.quant.rotation import quantize_model, rotate
from jllm.quant.schemes import Scheme, find_scheme, read_scheme
from tests.tiny import full_logits, tiny_model, with_fields

IDS = [[1, 14, 15, 92, 65, 35, 89, 79, 4, 11, 60, 33, 8, 90, 21, 7], [5, 77, 12, 45, 45, 61, 3, 18, 54, 93]]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("windows", [(None, None), (5, None)])
def test_rotated_kv_changes_nothing_but_rounding(windows):
    model = tiny_model("float64", windows=windows)
    same = evaluate(model, IDS, "document", reference=model, kv_cache="f64-h")
    assert abs(same.kl) < 1e-12
    assert same.top1 == 1
    rounded = evaluate(model, IDS, "document", reference=model, kv_cache="int4-g16-h")
    assert rounded.kl > 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_rotated_kv_halves_what_outliers_cost(seed):
    model = tiny_model("float64", seed=seed)
    planted = plant(model, channels=0, gated=0, massive=False, kv=2, strength=16.0, seed=seed)
    plain, turned = (
        evaluate(planted, IDS, "document", reference=model, kv_cache=name).kl for name in ("int4-g16", "int4-g16-h")
    )
    assert turned < plain / 2


def with_biases(model):
    rng = np.random.default_rng(0)

    def biased(layer):
        sizes = {"qkv_bias": 128, "o_bias": 32}, {"gate_up_bias": 96, "down_bias": 32}
        return with_fields(
            layer, *({name: jnp.asarray(rng.normal(size=n)) for name, n in part.items()} for part in sizes)
        )

    return replace(model, params=replace(model.params, layers=tuple(map(biased, model.params.layers))))


@pytest.mark.parametrize("which", ["kv", "all"])
@pytest.mark.parametrize("tied", [True, False])
def test_rotated_weights_are_the_same_function(which, tied):
    model = with_biases(tiny_model("float64", tie_embeddings=tied))
    turned = rotate(model, which)
    assert turned.config.tie_embeddings == (tied and which == "kv")
    np.testing.assert_allclose(full_logits(turned, IDS[0]), full_logits(model, IDS[0]), rtol=1e-10, atol=1e-10)
    other = rotate(model, which, seed=1)
    assert bool((other.params.embed == turned.params.embed).all()) == (which == "kv")
    for layer, old in zip(turned.params.layers, model.params.layers):
        assert not (layer.attention.o == old.attention.o).all()
        rows = slice(0, -32) if which == "kv" else slice(0, 0)  # queries and keys stay
        assert (layer.attention.qkv[rows] == old.attention.qkv[rows]).all()
        assert not (layer.attention.qkv[-32:] == old.attention.qkv[-32:]).all()


def test_a_seeded_fault_is_seen():
    """Norms that stay where they are do not commute with a rotation."""
    model = tiny_model("float64")
    turned = rotate(model, "all")
    kept = replace(turned.params, norm=model.params.norm)
    assert not np.allclose(full_logits(replace(turned, params=kept), IDS[0]), full_logits(model, IDS[0]), atol=1e-3)


SIZES = {"hidden_size": 64, "intermediate_size": 64}


@pytest.mark.parametrize("method", ["round", "gptq", "awq"])
def test_rotation_spreads_the_outliers_of_the_stream(method):
    """Activations of 8 bits beside outlier channels suffer less; calibration works over turned weights as well."""
    model = tiny_model("float64", **SIZES)
    planted = plant(model, channels=2, gated=0, massive=False, strength=64.0)
    tokens = np.random.default_rng(0).integers(3, 97, (4, 32))
    scheme = {"round": "w8a8-all"}.get(method, "w4a16-g64")
    make = {"round": lambda m, s, t: quantize(m.params, s), "gptq": ptq.gptq, "awq": ptq.awq}[method]

    def kl(subject):
        params = make(subject, scheme, tokens)
        assert set(weight_formats(params)) >= {"model.layers.0.mlp.down_proj"}
        return evaluate(replace(subject, params=params), IDS, "document", reference=model).kl

    assert kl(rotate(planted, "all")) < (0.5 if method == "round" else 1.5) * kl(planted)


def test_a_scheme_rotates(tmp_path):
    model = tiny_model("float64", tie_embeddings=True, **SIZES)
    scheme = find_scheme("w4a16-g32+rotate-all")
    assert scheme.rotate == "all"
    assert scheme.rules == find_scheme("w4a16-g32").rules
    made = quantize_model(model, scheme)
    wanted = quantize(rotate(model, "all").params, "w4a16-g32")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), made.params, wanted))
    shapes = quantize_model(replace(model, params=jax.eval_shape(lambda: model.params)), scheme)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes.params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), made.params
    )
    save(tmp_path / "wide", model.params, model.config)
    loaded = jllm.load(tmp_path / "wide", quantize="w4a16-g32+rotate-all", dtype="float64")
    assert not loaded.config.tie_embeddings
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), made.params, loaded.params))
    save(tmp_path / "made", made.params, made.config)
    again = jllm.load(tmp_path / "made")
    np.testing.assert_array_equal(full_logits(again, IDS[0]), full_logits(made, IDS[0]))
    for suffix, text in ((".toml", scheme.to_toml()), (".json", scheme.to_json())):
        file = tmp_path / f"scheme{suffix}"
        file.write_text(text)
        assert read_scheme(file) == scheme


def test_what_cannot_be_rotated_says_so():
    model = tiny_model("float64", **SIZES)
    with pytest.raises(QuantizationError, match="rotate must be one of kv, all, not 'q'"):
        find_scheme("w8a8+rotate-q")
    with pytest.raises(QuantizationError, match="rotate must be one of kv, all, not 'q'"):
        rotate(model, "q")
    with pytest.raises(QuantizationError, match="rotate must be one of kv, all, not True"):
        Scheme.from_dict({"rules": [], "rotate": True})
    for call in (quantize, lambda params, scheme: ptq.gptq(model, scheme, [[1, 2]])):
        with pytest.raises(
            QuantizationError, match=r"'w8a8\+rotate-kv' rotates the model first: use jllm.quant.rotation"
        ):
            call(model.params, "w8a8+rotate-kv")
    with pytest.raises(QuantizationError, match="is quantized: only wide weights can be rotated"):
        rotate(quantize_model(model, "w8a8"), "kv")
