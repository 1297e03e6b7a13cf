"""GGUF files: every type's values are those of the package gguf, and a model is the one that was written."""

import struct
from dataclasses import replace

import jax
import numpy as np
import pytest

import jllm
from jllm.errors import CheckpointError, JllmError, QuantizationError
from jllm.files.fingerprint import of_files
from jllm.files.gguf.blocks import TYPES, decode
from jllm.files.gguf.config import raw_config
from jllm.files.run_identity import of_model
from jllm.model.param_specs import param_specs
from jllm.model.rope import inverse_frequencies
from pallas_kernels.formats import quantized_weights
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from tests.files.gguf_files import TYPE, gguf, write
from tests.parity import PARITY
from tests.tiny import EXPERTS, experts_model, tiny_model

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_layers": 1, "vocab_size": 64}
KEPT = {"Q8_0": "w8a16-g32", "Q4_0": "w4a16-g32", "IQ4_NL": "iq4nl-g32", "MXFP4": "mxfp4-weight"}


@pytest.fixture(scope="module")
def wide():
    return tiny_model(**WIDE)


def leaves(model):
    return jax.tree.leaves(model.params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))


@pytest.mark.parametrize("kind", TYPES)
def test_any_bytes_decode_as_ggml_decodes_them(kind):
    octets = np.random.default_rng(0).integers(0, 256, 256 * TYPES[kind][1], dtype=np.uint8).reshape(4, -1)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(octets, TYPE[kind])
    found = decode(octets, kind)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, want)  # NaN where it has NaN
    np.testing.assert_array_equal(np.signbit(found), np.signbit(want))


@pytest.mark.parametrize(
    "family", ["llama1", "llama-mqa", "llama-bias", "llama3.2", "mixtral", "qwen2", "qwen3", "qwen3-moe"]
)
def test_a_model_is_the_one_that_was_written(family, tmp_path):
    model = jllm.load(PARITY / family)
    plain = replace(model.config, rope_scaling=None)
    factors = inverse_frequencies(plain) / inverse_frequencies(model.config)
    more = {"rope_freqs.weight": factors.astype(np.float32)} if model.config.rope_scaling is not None else {}
    loaded = jllm.load(write(tmp_path / "m.gguf", model, more=more).path)
    assert replace(loaded.config, rope_scaling=None) == plain
    np.testing.assert_allclose(inverse_frequencies(loaded.config), inverse_frequencies(model.config), rtol=1e-7)
    for one, other in zip(leaves(loaded), leaves(model), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("kind", list(TYPES)[1:])
def test_each_type_is_kept_as_codes_or_dequantized(kind, wide, tmp_path):
    written = write(tmp_path / "m.gguf", wide, kind)
    loaded = jllm.load(written.path, dtype="float32")
    for spec, leaf in zip(jax.tree.leaves(param_specs(loaded.config)), leaves(loaded), strict=True):
        want = np.concatenate([written.values[name] for name, _ in spec.parts])
        assert isinstance(leaf, QuantizedWeight) == (kind in KEPT and spec.weight is not None)
        if isinstance(leaf, QuantizedWeight):
            assert leaf.format.name == KEPT[kind]
            leaf = quantized_weights.decode(leaf)
        np.testing.assert_array_equal(np.asarray(leaf), want)


def test_experts_are_kept_as_codes(tmp_path):
    model = experts_model(experts=replace(EXPERTS, layers=()))
    model = replace(model, config=replace(model.config, architecture="MixtralForCausalLM", intermediate_size=32))
    written = write(tmp_path / "m.gguf", model, lambda name: "F32" if ".mlp.gate." in name else "Q8_0")
    loaded = jllm.load(written.path, dtype="float32")
    assert raw_config(written.path)["torch_dtype"] == "bfloat16"
    mlp, specs = loaded.params.layers[0].mlp, param_specs(loaded.config).layers[0].mlp
    np.testing.assert_array_equal(mlp.router, model.params.layers[0].mlp.router)
    for leaf, spec in ((mlp.gate_up, specs.gate_up), (mlp.down, specs.down)):
        assert leaf.format.name == "w8a16-g32"
        want = np.concatenate([written.values[name] for name, _ in spec.parts])
        np.testing.assert_array_equal(quantized_weights.decode(leaf), want)


def test_a_merged_weight_of_several_types_is_dequantized(wide, tmp_path):
    kinds = {"v_proj": "Q6_K", "embed_tokens": "F16", "lm_head": "F16"}
    written = write(tmp_path / "m.gguf", wide, lambda name: kinds.get(name.split(".")[-2], "Q4_0"))
    loaded = jllm.load(written.path)
    layer = loaded.params.layers[0]
    assert loaded.config.dtype == "float16"
    assert [isinstance(leaf, QuantizedWeight) for leaf in (layer.attention.qkv, layer.attention.o)] == [False, True]
    assert isinstance(layer.mlp.gate_up, QuantizedWeight)
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    np.testing.assert_array_equal(layer.attention.qkv, np.concatenate([written.values[name] for name in names]))
    with pytest.raises(QuantizationError, match="is quantized already"):
        jllm.load(written.path, quantize="w8a16")
    rounded = jllm.load(write(tmp_path / "k.gguf", wide, "Q4_K").path, quantize="w8a16")  # nothing is kept as codes
    assert isinstance(rounded.params.layers[0].attention.qkv, QuantizedWeight)


def test_what_is_beyond_float16_is_refused_there(wide, tmp_path):
    big = replace(wide, params=replace(wide.params, embed=wide.params.embed.at[0, 0].set(1e6)))
    path = write(tmp_path / "m.gguf", big).path
    with pytest.raises(CheckpointError, match="embed_tokens.weight has values beyond the range of float16"):
        jllm.load(path, dtype="float16")


def test_split_files_are_one_model(wide, tmp_path):
    whole = write(tmp_path / "whole.gguf", wide).path
    write(tmp_path / "m.gguf", wide, split=5)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    assert of_files(parts[0]) == of_files(whole)
    for one, other in zip(leaves(jllm.load(parts[0])), leaves(wide), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(CheckpointError, match=f"is not the first of its 3 parts: give {parts[0].name}"):
        jllm.load(parts[1])
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 parts missing, the first is {parts[2].name}"):
        jllm.load(parts[0])


def test_a_file_is_known_by_its_weights_and_its_metadata(wide, tmp_path):
    paths = {
        "one": write(tmp_path / "one.gguf", wide).path,
        "copy": write(tmp_path / "copy.gguf", wide).path,
        "turned": write(tmp_path / "turned.gguf", wide, more={"llama.rope.freq_base": 500.0}).path,
        "other": write(tmp_path / "other.gguf", tiny_model(**WIDE, seed=1)).path,
    }
    found = {name: of_model(path) for name, path in paths.items()}
    assert found["one"] == found["copy"]
    assert found["one"]["config"] != found["turned"]["config"]
    assert found["one"]["weights"] == found["turned"]["weights"] != found["other"]["weights"]


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.5 * (0.1 * np.log(4.0) + 1),
            },
        ),
    ],
    ids=str,
)
def test_rope_scaling_is_that_of_config_json(more, scaling, wide, tmp_path):
    from jllm.files.hf_rope import read_rope

    more = {f"llama.rope.scaling.{key}": value for key, value in more.items()}
    loaded = jllm.load(write(tmp_path / "m.gguf", wide, more=more).path)
    assert loaded.config.rope_scaling == read_rope({"rope_scaling": scaling}, wide.config.context, "")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"more": {"general.architecture": "gemma2"}}, "architecture 'gemma2' is not supported in GGUF; supported are"),
        ({"more": {"llama.expert_count": 8}}, "its metadata lacks llama.expert_used_count"),
        ({"more": {"llama.expert_count": 8, "llama.expert_used_count": 2}}, "the first is model.layers.0.mlp.gate"),
        ({"drop": "llama.block_count"}, "its metadata lacks llama.block_count"),
        ({"more": {"llama.rope.dimension_count": 32}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"more": {"llama.rope.scaling.type": "longrope"}}, "rope.scaling.type 'longrope' is not supported"),
        ({"more": {"llama.attention.head_count": 3}}, "3 heads do not divide the 256 rows of blk.0.attn_q.weight"),
        ({"more": {"llama.feed_forward_length": 128}}, r"has shape \[256, 256\], but the config says \[128, 256\]"),
        ({"more": {"llama.block_count": 2}}, "12 tensors missing|9 of 21 tensors missing"),
        ({"more": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, "no use for, the first is blk.0.attn_sinks"),
        ({"more": {"odd.weight": np.zeros(4, np.int8)}}, "tensor odd.weight is of type I8; supported are F32, F16"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(options, message, wide, tmp_path):
    path = write(tmp_path / "m.gguf", wide, **options).path
    with pytest.raises(JllmError, match=message) as error:
        jllm.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_damage_is_said_in_one_line(wide, tmp_path):
    path = write(tmp_path / "m.gguf", wide, "Q4_0").path
    data = path.read_bytes()
    kinds = {
        b"": "not a GGUF file: it begins with b''",
        b"GGML" + data[4:]: "not a GGUF file: it begins with b'GGML'",
        b"version https://git-lfs.github.com/spec/v1\n": "git-LFS pointer",
        data[:4] + struct.pack("<I", 99) + data[8:]: "version 99; supported are 2, 3",
        data[:4] + data[4:8][::-1] + data[8:]: "is a big-endian GGUF file",
        data[:-64]: "truncated: .* bytes, but tensor .* ends at",
        data[:16] + b"\xff" * 8 + data[24:]: "damaged|end within the header",
        data[:24] + b"\xff" * 8 + data[32:]: "end within the header",
        data.replace(b"general.", b"general\xff"): "damaged GGUF header",
    }
    kinds |= {data[:end]: "truncated: " for end in range(6, 1500, 113)}
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    kinds[data[:at] + struct.pack("<I", 999) + data[at + 4 :]] = "is of type number 999"  # a type that nobody knows
    for wrong, message in kinds.items():
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=message) as error:
            jllm.load(path)
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match=r"^nowhere\.gguf: no such file$"):
        jllm.load("nowhere.gguf")
    with pytest.raises(CheckpointError, match=rf"give the file itself, {path}"):
        jllm.load(tmp_path)
