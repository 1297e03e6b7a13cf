"""Models from other projects' checkpoints: what they compute, and what stands around the quantized weights."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import jllm
from jllm.errors import CheckpointError, ConfigError
from jllm.files.save import save
from jllm.model.params import with_matrices
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode
from tests.checkpoint_cases import assert_same_bits
from tests.files.importers import layouts
from tests.files.importers.layouts import awq, compressed, gptq, nf4
from tests.tiny import full_logits, with_fields

TOKENS = np.random.default_rng(3).integers(3, 96, 24)
LAYOUTS = {
    "gptq": partial(gptq, desc_act=True, sym=False, lm_head=True),
    "gptq-8": partial(gptq, bits=8, sym=False),
    "awq": awq,
    "int8": compressed,
    "fp8": partial(compressed, form="float-quantized", kind="float"),
    "fp8-static": partial(layouts.autofp8, static=True),
    "fp8-blocks": layouts.fp8_blocks,
    "nf4": partial(nf4, double=True),
}


def quantized(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedWeight)]


def map_quantized(change, params):
    is_leaf = lambda leaf: isinstance(leaf, QuantizedWeight)  # noqa: E731
    return jax.tree.map(lambda leaf: change(leaf) if is_leaf(leaf) else leaf, params, is_leaf=is_leaf)


def plain(model, weights):
    """The model with the weights that a layout's definition says are stored."""
    layers = []
    for i, layer in enumerate(model.params.layers):
        at = f"model.layers.{i}."
        merged = {
            f: np.concatenate([weights[at + part] for part, _ in entry.modules]) for f, entry in layouts.LINEARS.items()
        }
        layers.append(with_matrices(layer, {f: jax.numpy.asarray(w) for f, w in merged.items()}))
    head = None if model.params.head is None else jax.numpy.asarray(weights["lm_head"])
    return replace(model, params=replace(model.params, layers=tuple(layers), head=head))


def far(logits, other):
    return np.linalg.norm(logits - other) / np.linalg.norm(other)


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_weights_that_are_stored(name, tmp_path):
    model = layouts.small_model(num_layers=2)
    written = layouts.write(tmp_path / "m", model, LAYOUTS[name], shards=3)
    loaded = jllm.load(tmp_path / "m")
    wanted = full_logits(plain(model, written.weights), TOKENS)
    sixteen = map_quantized(lambda w: replace(w, format=replace(w.format, activations=None)), loaded.params)
    # Inputs in 16 bits (here 32): only the order of sums differs, and for nested NF4 scales their rounding to float16.
    assert far(full_logits(replace(loaded, params=sixteen), TOKENS), wanted) < (4e-3 if name == "nf4" else 2e-6)
    if name.startswith(("int8", "fp8")):  # inputs of 8 bits: their rounding shows, and is small (1/254 of the largest)
        assert 1e-4 < far(full_logits(loaded, TOKENS), wanted) < (0.1 if name == "int8" else 0.3)
    assert far(full_logits(model, TOKENS), wanted) > 1e-3  # else the weights could be the unquantized ones


def test_modules_of_the_same_inputs_get_the_largest_of_their_scales(tmp_path):
    def layout(weights):
        written = compressed(weights, static=True, dtype=np.float32)
        written.tensors["model.layers.0.self_attn.k_proj.input_scale"] = np.array([0.25], np.float32)
        return written

    layouts.write(tmp_path / "m", layouts.small_model(), layout)
    layer = jllm.load(tmp_path / "m").params.layers[0]
    assert (layer.attention.qkv.input_scale, layer.mlp.gate_up.input_scale) == (0.25, layouts.INPUT_SCALES["up_proj"])


@pytest.mark.parametrize("changes", [{}, {"activations": False, "symmetric": False}])
def test_sizes_that_are_no_multiples_of_32(changes, tmp_path):
    """Rows and columns that are padded: of values that are not looked at, and with zero points what stands for zero."""
    model = layouts.small_model(hidden_size=72, intermediate_size=100, vocab_size=97)
    written = layouts.write(tmp_path / "m", model, partial(compressed, ignore=(), dtype=np.float32, **changes))
    loaded = jllm.load(tmp_path / "m")
    sixteen = map_quantized(lambda w: replace(w, format=replace(w.format, activations=None)), loaded.params)
    assert len(quantized(sixteen)) == 5
    wanted = full_logits(plain(model, written.weights), TOKENS)
    assert far(full_logits(replace(loaded, params=sixteen), TOKENS), wanted) < 2e-6


def test_blocks_of_fp8_are_each_modules_own(tmp_path):
    """Sizes that blocks of 128 do not divide: the last rows of q share no block with those of k."""
    model = layouts.small_model(hidden_size=144, intermediate_size=200, num_heads=9, num_kv_heads=3, head_dim=16)
    written = layouts.write(tmp_path / "m", model, layouts.fp8_blocks)
    loaded = jllm.load(tmp_path / "m")
    qkv = loaded.params.layers[0].attention.qkv
    assert (qkv.values.shape, qkv.scales.shape) == ((256, 256), (2, 256))
    assert [len(np.unique(qkv.scales[0, a:b])) for a, b in ((0, 128), (128, 144), (144, 192), (192, 240))] == [1] * 4
    assert len(np.unique(qkv.scales[0, :240])) == 4
    wide = full_logits(plain(model, written.weights), TOKENS)
    assert 1e-4 < far(full_logits(loaded, TOKENS), wide) < 0.3
    save(tmp_path / "again", loaded.params, loaded.config)
    assert_same_bits(jllm.load(tmp_path / "again").params, loaded.params)


def test_heads_of_few_rows(tmp_path):
    """Padded by more rows than they have."""
    written = layouts.write(tmp_path / "m", layouts.small_model(vocab_size=5), partial(compressed, ignore=()))
    head = jllm.load(tmp_path / "m").params.head
    assert (head.values.shape, head.scales.shape) == ((32, 64), (32,))
    assert np.array_equal(decode(head), written.weights["lm_head"])


OF_FILES = [
    (gptq, "quantize_config.json"),
    (awq, "quant_config.json"),
    (partial(layouts.modelopt, older=True), "hf_quant_config.json"),
    (partial(layouts.modelopt_fp8, older=True), "hf_quant_config.json"),
]


@pytest.mark.parametrize(("layout", "file"), OF_FILES)
def test_config_in_a_file_beside(layout, file, tmp_path):
    layouts.write(tmp_path / "in", layouts.small_model(), layout)
    layouts.write(tmp_path / "beside", layouts.small_model(), layout, config_file=file)
    inside, beside = (jllm.load(tmp_path / d).params for d in ("in", "beside"))
    assert quantized(beside)
    assert_same_bits(inside, beside)


def test_a_config_in_both_places_must_agree(tmp_path):
    layouts.write(tmp_path / "m", layouts.small_model(), gptq)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    beside = tmp_path / "m" / "quantize_config.json"
    beside.write_text(json.dumps(raw | {"damp_percent": 0.1}))  # says nothing of the layout
    assert quantized(jllm.load(tmp_path / "m").params)
    beside.write_text(json.dumps(raw | {"checkpoint_format": "gptq_v2"}))
    message = r'checkpoint_format = "gptq", but quantize_config.json beside it says "gptq_v2"'
    with pytest.raises(ConfigError, match=message) as error:
        jllm.load(tmp_path / "m")
    assert "\n" not in str(error.value)
    beside.write_text(json.dumps({"quant_method": "awq", "bits": 8}))  # another method's: not asked
    assert quantized(jllm.load(tmp_path / "m").params)


@pytest.mark.parametrize("shards", [1, 2])
def test_files_that_autogptq_called_after_the_quantization(shards, tmp_path):
    layouts.write(tmp_path / "m", layouts.small_model(), gptq, shards=shards)
    want = jllm.load(tmp_path / "m").params
    for file in list((tmp_path / "m").glob("model*")):
        text = file.read_text().replace("model-", "gptq_model-4bit-32g-") if file.suffix == ".json" else None
        name = file.name.replace("model", "gptq_model-4bit-32g", 1)
        file.rename(tmp_path / "m" / name)
        if text is not None:
            (tmp_path / "m" / name).write_text(text)
    assert_same_bits(jllm.load(tmp_path / "m").params, want)
    (tmp_path / "m" / "adapter_model.safetensors").write_bytes(b"")  # is none
    assert_same_bits(jllm.load(tmp_path / "m").params, want)


def test_of_two_files_of_other_names_none_is_guessed(tmp_path):
    layouts.write(tmp_path / "m", layouts.small_model(), gptq)
    for name in ("gptq_model-4bit-32g", "gptq_model-8bit-32g"):
        (tmp_path / "m" / f"{name}.safetensors").write_bytes((tmp_path / "m" / "model.safetensors").read_bytes())
    assert quantized(jllm.load(tmp_path / "m").params)  # of model.safetensors
    (tmp_path / "m" / "model.safetensors").unlink()
    message = r"has gptq_model-4bit-32g.safetensors and gptq_model-8bit-32g.safetensors, but neither model.safetensors"
    with pytest.raises(CheckpointError, match=message) as error:
        jllm.load(tmp_path / "m")
    assert "\n" not in str(error.value)


def test_older_names_of_awq_fields(tmp_path):
    def older(weights):
        written = awq(weights)
        written.config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        return written

    layouts.write(tmp_path / "new", layouts.small_model(), awq)
    layouts.write(tmp_path / "old", layouts.small_model(), older, config_file="quant_config.json")
    assert_same_bits(jllm.load(tmp_path / "new").params, jllm.load(tmp_path / "old").params)


def test_biases_of_the_model_are_kept_and_zeros_of_autogptq_dropped(tmp_path):
    model = layouts.small_model(architecture="Qwen2ForCausalLM", qkv_bias=True)
    bias = jax.numpy.arange(128, dtype="float32")
    layer = with_fields(model.params.layers[0], {"qkv_bias": bias})
    model = replace(model, params=replace(model.params, layers=(layer,)))

    def layout(weights):
        written = gptq(weights, bias=True)
        for module in ("q_proj", "k_proj", "v_proj"):
            del written.tensors[f"model.layers.0.self_attn.{module}.bias"]  # write() stores the model's own
        return written

    layouts.write(tmp_path / "m", model, layout)
    loaded = jllm.load(tmp_path / "m").params.layers[0]
    assert np.array_equal(loaded.attention.qkv_bias, bias)
    assert loaded.attention.o_bias is None


def test_tied_head_stays_the_embedding(tmp_path):
    model = layouts.small_model(tie_embeddings=True)
    layouts.write(tmp_path / "m", model, partial(compressed, ignore=()))
    assert jllm.load(tmp_path / "m").params.head is None


def test_rules_of_gptqmodel_and_lists_of_modules(tmp_path):
    """Negative rules and modules_in_block_to_quantize leave modules in 16 bits, positive ones change fields. Of rules
    that match a module the first one holds."""

    def layout(weights):
        down = "model.layers.0.mlp.down_proj"
        written = gptq({m: w for m, w in weights.items() if not m.endswith("o_proj")})
        written.tensors |= gptq({down: weights[down]}, bits=8, group=96).tensors
        written.config["dynamic"] = {r"-:.*\.o_proj": {}, r".*\.down_proj": {"bits": 8, "group_size": 96}, "+:.*": {}}
        return written

    layouts.write(tmp_path / "rules", layouts.small_model(), layout)
    layer = jllm.load(tmp_path / "rules").params.layers[0]
    assert (layer.attention.qkv.format.name, layer.mlp.down.format.name) == ("w4a16-g32", "w8a16")
    assert not isinstance(layer.attention.o, QuantizedWeight)

    listed = [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    some = lambda weights: gptq(  # noqa: E731
        {m: w for m, w in weights.items() if "mlp" in m}, modules_in_block_to_quantize=listed
    )
    layouts.write(tmp_path / "listed", layouts.small_model(), some)
    assert len(quantized(jllm.load(tmp_path / "listed").params)) == 2


def test_targets_that_name_win_over_patterns_and_classes(tmp_path):
    def layout(weights):
        written = compressed(weights)
        o = "model.layers.0.self_attn.o_proj"
        eight = compressed({o: weights[o]}, form="float-quantized", kind="float", targets=(o,))
        for name in ("weight", "weight_scale"):
            written.tensors[f"{o}.{name}"] = eight.tensors[f"{o}.{name}"]
        groups = written.config["config_groups"]
        groups["group_0"]["format"] = "int-quantized"
        groups["group_1"] = eight.config["config_groups"]["group_0"] | {"format": "float-quantized"}
        written.config["format"] = "mixed-precision"
        return written

    layouts.write(tmp_path / "m", layouts.small_model(), layout)
    layer = jllm.load(tmp_path / "m").params.layers[0]
    assert (layer.attention.qkv.format.name, layer.attention.o.format.name) == ("w8a8", "fp8")


def test_zero_points_of_zero_borrow_from_their_neighbours(tmp_path):
    """Version 1 of GPTQ subtracts one from every field of a word at once: fields of zero reach into the next."""
    positive = lambda weights: gptq({m: np.abs(w) for m, w in weights.items()}, sym=False)  # noqa: E731
    written = layouts.write(tmp_path / "m", layouts.small_model(), positive)
    o = "model.layers.0.self_attn.o_proj"
    assert not (written.tensors[f"{o}.qzeros"].view(np.uint32) == 0xFFFFFFFF).all()
    found = decode(jllm.load(tmp_path / "m").params.layers[0].attention.o)
    assert np.array_equal(found, written.weights[o])


@pytest.mark.parametrize("name", ["gptq", "fp8-static"])
def test_saved_again_in_our_own_layout(name, tmp_path):
    layouts.write(tmp_path / "m", layouts.small_model(), LAYOUTS[name])
    loaded = jllm.load(tmp_path / "m")
    save(tmp_path / "again", loaded.params, loaded.config)
    assert_same_bits(jllm.load(tmp_path / "again").params, loaded.params)
