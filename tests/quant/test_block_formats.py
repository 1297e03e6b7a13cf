"""MX and NVFP4 as schemes of a whole model: rounded, calibrated, saved, loaded, served."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.analysis.evaluate import evaluate
from jllm.errors import QuantizationError
from jllm.files.save import save
from jllm.model.linear import linear
from jllm.quant import calibration as ptq
from jllm.quant.calibration.scale_search import output_error
from jllm.quant.quantize import quantize, weight_formats
from pallas_kernels.formats.block_floats import KINDS, round_blocks
from pallas_kernels.formats.quantized_weights import decode, encode
from pallas_kernels.formats.weight_formats import parse_weight_format
from tests.tiny import full_logits, tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1}  # matrices have two shapes
IDS = [[1, 14, 15, 92, 65, 35, 89, 79, 4, 11, 60, 33], [5, 77, 12, 45, 45, 61, 3, 18]]
ENDS = ("", "-weight", "-h", "-h-weight")
NAMES = [name + end for name in KINDS for end in ENDS]
SAVED = [name + end for name, end in zip(KINDS, ENDS, strict=True)]  # each kind and each end once
OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES if name not in SAVED]


def divergence(model, params, **options):
    return evaluate(replace(model, params=params), IDS, "document", reference=model, **options).kl


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    fmt = parse_weight_format(name)
    assert fmt.name == name
    assert fmt.block_kind == name.removesuffix("-weight").removesuffix("-h")
    assert fmt.rotated == ("-h" in name)
    assert fmt.row_codes is None


@pytest.mark.parametrize("name", SAVED + OTHERS)
def test_saved_and_loaded_bit_for_bit(name, tmp_path):
    model = tiny_model(**SIZES)
    save(tmp_path / "wide", model.params, model.config)
    made = jllm.load(tmp_path / "wide", quantize=name)
    assert {fmt.name for fmt in weight_formats(made.params).values()} == {name}
    save(tmp_path / "made", made.params, made.config)
    again = jllm.load(tmp_path / "made")
    for a, b in zip(jax.tree.leaves(made.params), jax.tree.leaves(again.params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert jax.tree.structure(made.params) == jax.tree.structure(again.params)


@pytest.mark.parametrize("name", list(KINDS))
def test_inputs_are_rounded_as_the_weight_says(name):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((7, 64), (96, 64)))
    encoded = encode(w, parse_weight_format(name))
    wanted = np.asarray(round_blocks(x, name), np.float64) @ np.asarray(decode(encoded), np.float64).T
    np.testing.assert_allclose(linear(x, encoded), wanted, rtol=1e-4, atol=1e-4)
    kept = encode(w, parse_weight_format(f"{name}-weight"))
    plain = np.asarray(x, np.float64) @ np.asarray(decode(kept), np.float64).T
    np.testing.assert_allclose(linear(x, kept), plain, rtol=1e-4, atol=1e-4)
    assert np.abs(plain - wanted).max() > 0.02
    alone = linear(x[3:4], encoded)
    np.testing.assert_allclose(alone[0], linear(x, encoded)[3], rtol=1e-5, atol=1e-5)  # whatever else there is
    gradient = jax.grad(lambda x: linear(x, encoded).sum())(x)  # straight through rounding
    np.testing.assert_allclose(gradient, np.tile(np.asarray(decode(encoded)).sum(axis=0), (7, 1)), rtol=1e-4, atol=1e-4)


def test_more_bits_and_smaller_blocks_lose_less():
    model = tiny_model(seed=1, hidden_size=64, intermediate_size=96)
    kl = {name: divergence(model, quantize(model.params, name)) for name in NAMES if "-h" not in name}
    assert kl["mxfp8"] < kl["mxfp8-e5m2"] < kl["nvfp4"] < kl["mxfp4"]
    assert all(0 < kl[f"{name}-weight"] < kl[name] for name in KINDS)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "nvfp4", pytest.param("mxfp8-e5m2", marks=pytest.mark.exhaustive)])
def test_gptq_moves_outputs_less_than_rounding(name):
    model = tiny_model(seed=1, **SIZES)
    tokens = np.random.default_rng(0).integers(3, 97, (8, 64))
    gram = next(ptq.layer_statistics(model, tokens, ("qkv",)))["qkv"].gram
    w = model.params.layers[0].attention.qkv
    errors = []
    for params in (ptq.gptq(model, f"{name}-weight", tokens), quantize(model.params, f"{name}-weight")):
        leaf = params.layers[0].attention.qkv
        assert leaf.format.name == f"{name}-weight"
        errors.append(float(output_error(decode(leaf) - w, gram)))
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_awq_takes_them(name):
    model = tiny_model(seed=1, **SIZES)
    params = ptq.awq(model, name, np.random.default_rng(0).integers(3, 97, (4, 32)))
    assert {fmt.name for fmt in weight_formats(params).values()} == {name}
    assert divergence(model, params) < 2 * divergence(model, quantize(model.params, name))


def test_gptq_orders_columns_of_powers_of_two(tmp_path):
    model = tiny_model(**SIZES)
    params = ptq.gptq(model, "mxfp4", np.random.default_rng(0).integers(3, 97, (4, 32)), act_order=True)
    assert params.layers[0].mlp.down.columns is not None
    save(tmp_path, params, model.config)
    again = jllm.load(tmp_path)
    wanted = full_logits(replace(model, params=params), IDS[0])
    np.testing.assert_array_equal(full_logits(again, IDS[0]), wanted)


def test_what_they_cannot_do_says_so():
    with pytest.raises(QuantizationError, match="mxfp4 cannot hold shape .*K must be a multiple of 32"):
        quantize(tiny_model(hidden_size=48, intermediate_size=96).params, "mxfp4")
