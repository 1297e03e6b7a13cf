"""Checkpoints with scales of K and V that are not 1: the function is that of a checkpoint without, and a cache of
float8 holds K and V over their scales."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jllm
from jllm.analysis.activations import tap
from jllm.analysis.evaluate import evaluate
from jllm.files.save import save
from tests.checkpoint_cases import assert_same_bits
from tests.files.importers import layouts
from tests.tiny import full_logits, with_fields

TOKENS = np.random.default_rng(3).integers(3, 96, 24)
POWERS = {"k": 8.0, "v": 4.0}
ODD = {"k": 3.3, "v": 1.7}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def with_scales(weights, *, layout, scales, shape=(), plain=False):
    """The layout with these scales in both layers; `plain`: attention's projections are not quantized."""
    written = layout({m: w for m, w in weights.items() if not (plain and m.endswith(ATTENTION))})
    if plain:
        written.tensors |= {f"{m}.weight": w for m, w in weights.items() if m.endswith(ATTENTION)}
    for i, x in ((i, x) for i in range(2) for x in scales):
        name = f"model.layers.{i}.self_attn.{x}_proj.{x}_scale"
        written.tensors[name] = np.full(shape, scales[x] ** (1 + i), np.float32)
    kv = {"dynamic": False, "num_bits": 8, "type": "float"}
    written.config |= {"kv_cache_scheme": kv, "ignore": ["lm_head", "*self_attn*"] if plain else ["lm_head"]}
    return written


def model_of(kind):
    model = layouts.small_model(num_layers=2)
    rng = np.random.default_rng(1)
    normal = lambda n, mean=0.0: jnp.asarray(mean + 0.3 * rng.normal(size=n), jnp.float32)  # noqa: E731
    if kind == "biases":
        layers = tuple(with_fields(layer, {"qkv_bias": normal(128)}, {}) for layer in model.params.layers)
        model = replace(model, config=replace(model.config, architecture="Qwen2ForCausalLM", qkv_bias=True))
    elif kind == "norms":
        norms = lambda: {"q_norm": normal(16, 1.0), "k_norm": normal(16, 1.0)}  # noqa: E731
        layers = tuple(with_fields(layer, norms(), {}) for layer in model.params.layers)
        model = replace(model, config=replace(model.config, architecture="Qwen3ForCausalLM", qk_norm=True))
    else:
        return model
    return replace(model, params=replace(model.params, layers=layers))


def loaded(path, model, layout, **options):
    layouts.write(path, model, partial(with_scales, layout=layout, **options))
    return jllm.load(path)


def keys_and_values(model):
    found = tap(model, TOKENS, [f"layers.{i}.{x}" for i in range(2) for x in "kv"])
    return {name: np.asarray(value) for name, value in found.items()}


FP8 = partial(layouts.modelopt_fp8, kv_scale=None)
CASES = [
    ("plain", layouts.modelopt, {}),
    ("biases", FP8, {}),
    ("norms", FP8, {}),
    ("plain", FP8, {"plain": True}),
    ("plain", FP8, {"shape": (1,)}),
]


@pytest.mark.parametrize("scales", [POWERS, ODD], ids=["powers of two", "any"])
@pytest.mark.parametrize(("kind", "layout", "options"), CASES)
def test_the_function_stays_and_the_cache_holds_quotients(kind, layout, options, scales, tmp_path):
    model = model_of(kind)
    one = loaded(tmp_path / "one", model, layout, scales={"k": 1.0, "v": 1.0}, **options)
    other = loaded(tmp_path / "other", model, layout, scales=scales, **options)
    exact = scales is POWERS
    close = np.testing.assert_array_equal if exact else partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3)
    # Codes of inputs may change by one where o_proj's scale is not a power of two.
    if exact:
        np.testing.assert_allclose(full_logits(other, TOKENS), full_logits(one, TOKENS), rtol=1e-5, atol=1e-5)
    else:
        far = np.linalg.norm(full_logits(other, TOKENS) - full_logits(one, TOKENS))
        assert far < 1e-2 * np.linalg.norm(full_logits(one, TOKENS))
    before, after = keys_and_values(one), keys_and_values(other)
    for name in ("layers.0.k", "layers.0.v"):  # later layers' inputs may differ by rounding
        close(after[name], before[name] / np.float32(scales[name[-1]]))
    for name, value in before.items() if exact else ():
        scale = np.float32(scales[name[-1]] ** (1 + int(name.split(".")[1])))
        wanted = (value / scale).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(after[name].astype(ml_dtypes.float8_e4m3fn), wanted)
    save(tmp_path / "saved", other.params, other.config)
    assert_same_bits(jllm.load(tmp_path / "saved").params, other.params)


def test_scales_keep_what_float8_would_cut_off(tmp_path):
    """Of keys far beyond 448: the format saturates, and the scales are what it takes to hold them."""
    model = layouts.small_model(num_layers=2)
    rows = np.ones((128, 1), np.float32)
    rows[:64], rows[64:96] = 2.0**-9, 2.0**9  # queries and keys: scores stay
    layers = tuple(with_fields(layer, {"qkv": layer.attention.qkv * rows}, {}) for layer in model.params.layers)
    model = replace(model, params=replace(model.params, layers=layers))
    kl = {}
    for scale in (1.0, 512.0):
        found = loaded(tmp_path / str(scale), model, layouts.modelopt, scales={"k": scale, "v": 1.0})
        ids = [TOKENS.tolist()]
        kl[scale] = evaluate(found, ids, "document", reference=found, kv_cache="fp8").kl
    assert kl[512.0] < kl[1.0] / 3
