"""Quantized checkpoints of our own layout: exact round trips, and files that contradict their config."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jllm
from jllm.errors import CheckpointError, ConfigError, OutputError, QuantizationError
from jllm.files.hf_config import load_config
from jllm.files.load_params import load_params
from jllm.files.save import save
from jllm.model.params import matrix_modules, with_matrices
from jllm.quant.quantize import quantize
from jllm.quant.schemes import PRESETS, Scheme
from tests.checkpoint_cases import WEIGHTS, assert_same_bits, rewrite
from tests.tiny import tiny_model

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32}
SAME = ("w8a8", "w8a8-all", "w4a16-g64", "w4a16-g128-zp", "w4a16-g64-zp")  # as others, but for weights or groups
ODD = {"hidden_size": 40, "intermediate_size": 40, "num_heads": 2, "num_kv_heads": 1, "head_dim": 20}  # all padded
EVEN = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in SAME])
def test_round_trip_is_exact(tmp_path, name):
    by_row = not any(
        fmt.group and not fmt.in_blocks
        for formats in PRESETS[name].formats(matrix_modules(tiny_model().params)).values()
        for fmt in formats
    )
    model = tiny_model(**(ODD if by_row else EVEN))  # of two shapes each
    params = quantize(model.params, name)
    save(tmp_path, params, model.config)
    assert load_config(tmp_path) == model.config
    assert_same_bits(load_params(tmp_path, model.config), params)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in raw) == (name != "bf16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_what_is_not_quantized_keeps_its_dtype(tmp_path, dtype):
    with jax.enable_x64(dtype == "float64"):
        model = tiny_model(dtype, **WIDE)
        params = quantize(model.params, Scheme("x", (("o_proj", "w4a16-g32-zp"),)))
        save(tmp_path, params, model.config, max_shard_bytes=5000)
        assert load_config(tmp_path).dtype == dtype
        assert_same_bits(load_params(tmp_path, model.config), params)


@pytest.mark.parametrize(
    "rules",
    [
        [["lm_head", "w8a8"]],
        [["embed_tokens", "w8a16"]],
        [["embed_tokens", "w8a16"], ["lm_head", "bf16"]],
        [["embed_tokens", "nf4"], ["lm_head", "w8a16"], ["layers.1.*", "fp8"]],
    ],
)
def test_tied_models(tmp_path, rules):
    model = tiny_model(tie_embeddings=True, **WIDE)
    params = quantize(model.params, Scheme.from_dict({"rules": rules}))
    save(tmp_path, params, model.config)
    assert_same_bits(load_params(tmp_path, model.config), params)


def test_columns_in_another_order(tmp_path):
    """As GPTQ's desc_act leaves them."""
    model = tiny_model(**WIDE)
    params = quantize(model.params, "w4a16-g32")
    order = jnp.asarray(np.random.default_rng(0).permutation(64), jnp.int32)
    layer = params.layers[0]
    layers = (with_matrices(layer, {"qkv": replace(layer.attention.qkv, columns=order)}), params.layers[1])
    params = replace(params, layers=layers)
    save(tmp_path, params, model.config)
    assert_same_bits(load_params(tmp_path, model.config), params)
    rewrite(tmp_path / WEIGHTS, lambda t: t.update({f"{QKV}.columns": np.zeros(64, np.int32)}))
    refuse(tmp_path, model, f"{QKV}.columns is not a permutation of 64 columns")


def test_load_just_works(tmp_path):
    model = tiny_model(**WIDE)
    params = quantize(model.params, "w8a8")
    save(tmp_path, params, model.config)
    loaded = jllm.load(tmp_path)
    assert_same_bits(loaded.params, params)
    with pytest.raises(QuantizationError, match="is quantized already; load it without scheme 'nf4'"):
        jllm.load(tmp_path, quantize="nf4")


QKV = "model.layers.0.self_attn.qkv_proj"
DOWN = "model.layers.1.mlp.down_proj"


def test_names_in_files_are_the_documented_ones(tmp_path):
    model = tiny_model(**WIDE)
    save(tmp_path, quantize(model.params, Scheme("x", (("o_proj", "bf16"), ("*_proj", "w4a16-g32-zp")))), model.config)
    stored = safetensors.numpy.load_file(tmp_path / WEIGHTS)
    assert stored[f"{QKV}.values"].dtype == np.uint8
    assert stored[f"{QKV}.scales"].dtype == np.float16
    assert stored[f"{QKV}.zeros"].dtype == np.int8
    assert "model.layers.0.self_attn.o_proj.weight" in stored
    assert not any("q_proj" in name for name in stored)
    assert {name.rpartition(".")[2] for name in stored} == {"values", "scales", "zeros", "weight"}


def move(tensors, old, new):
    tensors[new] = tensors.pop(old)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{DOWN}.scales"), ["missing, by its quantization_config", f"{DOWN}.scales"]),
        (
            lambda t: move(t, f"{DOWN}.zeros", f"{DOWN}.weight"),
            ["missing, by its quantization_config", f"{DOWN}.zeros"],
        ),
        (lambda t: t.update({f"{DOWN}.scale_steps": np.ones(2, np.float32)}), ["no use for", f"{DOWN}.scale_steps"]),
        (
            lambda t: t.update({f"{DOWN}.values": t[f"{DOWN}.values"].view(np.int8)}),
            [f"{DOWN}.values is stored as I8, but the quantization_config says U8"],
        ),
        (
            lambda t: t.update({f"{DOWN}.scales": t[f"{DOWN}.scales"].astype(np.float32)}),
            [f"{DOWN}.scales is stored as F32, but the quantization_config says F16"],
        ),
        (
            lambda t: t.update({f"{DOWN}.scales": t[f"{DOWN}.scales"][:2]}),
            [f"{DOWN}.scales has shape [2, 64], but the quantization_config says [3, 64]"],
        ),
    ],
)
def test_tensors_that_contradict_the_config(tmp_path, change, words):
    model = tiny_model(**WIDE)
    save(tmp_path, quantize(model.params, "w4a16-g32-zp"), model.config)
    rewrite(tmp_path / WEIGHTS, change)
    refuse(tmp_path, model, *words)


@pytest.mark.parametrize(
    ("scheme", "array"),
    [
        ("w8a8-all", {"columns": np.arange(96, dtype=np.int32)}),
        ("w8a8-tensor", {"input_scale": np.ones(1, np.float32)}),
        ("w8a16", {"input_scale": np.ones(1, np.float32)}),
    ],
)
def test_arrays_that_a_format_does_not_have(tmp_path, scheme, array):
    model = tiny_model(**WIDE)
    save(tmp_path, quantize(model.params, scheme), model.config)
    rewrite(tmp_path / WEIGHTS, lambda t: t.update({f"{DOWN}.{name}": value for name, value in array.items()}))
    refuse(tmp_path, model, "no use for", *(f"{DOWN}.{name}" for name in array))


@pytest.mark.parametrize(("name", "tensor"), [("w4a16-g32", "scales"), ("fp8", "values"), ("nf4-dq", "scale_steps")])
def test_what_is_no_number_is_named(tmp_path, name, tensor):
    model = tiny_model(**WIDE | {"intermediate_size": 64})
    params = quantize(model.params, Scheme("x", (("down_proj", name),)))
    layer = params.layers[1]
    array = getattr(layer.mlp.down, tensor)
    broken = with_matrices(
        layer, {"down": replace(layer.mlp.down, **{tensor: array.at[(-1,) * array.ndim].set(np.nan)})}
    )
    save(tmp_path, replace(params, layers=(params.layers[0], broken)), model.config)
    refuse(tmp_path, model, f"tensor {DOWN}.{tensor} holds NaN or infinity")


def test_a_scale_of_inputs_that_nothing_can_be_divided_by(tmp_path):
    model = tiny_model(**WIDE)
    params = quantize(model.params, "w8a8-all")
    layer = params.layers[1]
    scaled = with_matrices(layer, {"down": replace(layer.mlp.down, input_scale=jnp.zeros(1, jnp.float32))})
    save(tmp_path, replace(params, layers=(params.layers[0], scaled)), model.config)
    refuse(tmp_path, model, f"tensor {DOWN}.input_scale holds 0, expected a positive number")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, ["quant_method 'hqq' is not supported; supported are jllm"]),
        ({}, ["missing", ".values is there, but no quantization_config for it"]),
        ({"quant_method": "jllm"}, ["version None is not known; known is 1"]),
        ({"quant_method": "jllm", "version": 2, "rules": []}, ["version 2"]),
        ({"quant_method": "jllm", "version": 1}, ["quantization_config: a scheme needs rules"]),
        ({"quant_method": "jllm", "version": 1, "rules": [["o_prj", "nf4"]]}, ["'o_prj' matches no weight"]),
        ({"quant_method": "jllm", "version": 1, "rules": [["*_proj", "w4"]]}, ["unknown weight format 'w4'"]),
        ({"quant_method": "jllm", "version": 1, "rules": [["*_proj", "nf4-g128"]]}, ["nf4-g128 cannot hold shape"]),
        ({"quant_method": "jllm", "version": 1, "rules": [["mlp.*", "w4a16-g32-zp"]]}, ["zeros"]),
        ({"quant_method": "jllm", "version": 1, "rules": [["*_proj", "nf4-g32"]]}, ["missing", "qkv_proj.values"]),
        (
            {"quant_method": "jllm", "version": 1, "rules": [["mlp.*", "w8a16-g32"]]},
            ["gate_up_proj.values", "[192, 64]"],
        ),
    ],
)
def test_configs_that_contradict_the_tensors(tmp_path, config, words):
    model = tiny_model(**WIDE)
    save(tmp_path, quantize(model.params, Scheme("x", (("mlp.*", "nf4-g32"),))), model.config)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    refuse(tmp_path, model, *words)


def test_a_config_that_is_no_object(tmp_path):
    model = tiny_model(**WIDE)
    save(tmp_path, model.params, model.config)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": "int8"}))
    with pytest.raises(ConfigError, match="quantization_config is a str"):
        load_params(tmp_path, model.config)


def test_what_cannot_be_saved(tmp_path):
    model = tiny_model(**WIDE)
    params = quantize(model.params, "w8a8-all")
    other = tiny_model(**WIDE | {"intermediate_size": 64})
    with pytest.raises(CheckpointError, match=r"gate_up has shape \[192, 64\], but the config says \[128, 64\]"):
        save(tmp_path / "new", params, other.config)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        save(tmp_path / "file", params, model.config)
    assert not (tmp_path / "new").exists()


def refuse(path, model, *words):
    with pytest.raises(CheckpointError) as error:
        load_params(path, model.config)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert all(word in message for word in words), message
