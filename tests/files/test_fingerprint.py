"""Fingerprints of weights: the same for the same weights wherever and however they lie, others for others."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jllm
from jllm.files import fingerprint
from jllm.files.load_params import load_params
from jllm.files.safetensors_io import read_header
from jllm.files.save import save
from jllm.model.params import with_matrices
from jllm.quant.quantize import quantize
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from tests.tiny import tiny_model

MODEL = tiny_model("bfloat16")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory whose embedding (384 KiB) is sampled, and whose other tensors are read whole."""
    folder = tmp_path_factory.mktemp("weights") / "model"
    model = tiny_model("bfloat16", vocab_size=6144)
    save(folder, model.params, model.config)
    return folder, model


def test_files_elsewhere_and_in_shards_are_the_same_weights(saved, tmp_path):
    folder, model = saved
    save(tmp_path / "other", model.params, replace(model.config, context=64), max_shard_bytes=40_000)
    assert len(list((tmp_path / "other").glob("*.safetensors"))) > 1
    assert fingerprint.of_files(tmp_path / "other") == fingerprint.of_files(folder)


@pytest.mark.parametrize("where", ["first byte", "last byte", "small tensor", "dtype"])
def test_other_files_are_other_weights(saved, tmp_path, where):
    folder, _ = saved
    file = tmp_path / "model.safetensors"
    raw = bytearray((folder / file.name).read_bytes())
    tensors = read_header(folder / file.name)
    embed, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    at = {"first byte": embed.offset, "last byte": embed.offset + embed.nbytes - 1, "small tensor": norm.offset + 9}
    if where == "dtype":
        raw = raw.replace(b'"BF16"', b'"F16" ')
    else:
        raw[at[where]] ^= 1
    file.write_bytes(raw)
    assert fingerprint.of_files(tmp_path) != fingerprint.of_files(folder)


def test_fingerprints_of_the_bundled_model_stay_what_they_were():
    """Files of cached K and V that users have name these."""
    params = jllm.load().params
    assert fingerprint.of_params(params) == "ca05a36efdf5d6c0c6555c4aadedbfd1"
    assert fingerprint.of_params(quantize(params, "w8a8-all")) == "f6ecf0a68223a680c99f220f14b034c6"


def test_params_are_known_by_their_values(saved):
    folder, model = saved
    ours = fingerprint.of_params(model.params)
    assert len(ours) == 32
    assert fingerprint.of_params(load_params(folder, model.config, "bfloat16")) == ours
    assert fingerprint.of_params(load_params(folder, model.config, "float32")) == ours  # widened: the same values
    assert fingerprint.of_params(jax.tree.map(np.asarray, model.params)) == ours


def test_any_changed_value_makes_other_params():
    params = MODEL.params
    layer = params.layers[1]
    swapped = with_matrices(
        layer, {"down": layer.mlp.down.at[jnp.asarray([3, 4])].set(layer.mlp.down[jnp.asarray([4, 3])])}
    )
    others = [
        replace(params, embed=params.embed.at[41, 7].multiply(-1)),
        replace(params, norm=params.norm.at[0].add(0.01)),
        replace(params, layers=(params.layers[0], swapped)),
        replace(params, layers=(layer, params.layers[0])),
        quantize(params, "w8a16"),
    ]
    found = [fingerprint.of_params(p) for p in (params, *others)]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("change", [{"rope_theta": 500.0}, {"norm_eps": 1e-3}, {"windows": (4, None)}], ids=str)
def test_the_same_weights_in_another_config_are_another_model(change):
    other = replace(MODEL.config, **change)
    for of in (fingerprint.of_model, fingerprint.of_function):
        assert of(MODEL.params, MODEL.config) != of(MODEL.params, other)


def test_the_same_codes_that_meet_other_inputs_are_another_model():
    def without(leaf):
        return replace(leaf, format=replace(leaf.format, activations=None)) if is_quantized(leaf) else leaf

    eight = quantize(MODEL.params, "w8a8")
    plain = jax.tree.map(without, eight, is_leaf=is_quantized)
    assert fingerprint.of_params(eight) == fingerprint.of_params(plain)
    assert fingerprint.of_model(eight, MODEL.config) != fingerprint.of_model(plain, MODEL.config)


def is_quantized(leaf):
    return isinstance(leaf, QuantizedWeight)
