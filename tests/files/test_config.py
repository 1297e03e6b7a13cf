"""config.json in both layouts: what is read, what is refused, and that writing it back loses nothing."""

import dataclasses
import json
import math
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jllm.config import LlamaConfig, RopeScaling
from jllm.errors import ConfigError
from jllm.files.families import FAMILIES
from jllm.files.hf_config import from_hf, load_config, to_hf
from jllm.files.load import load
from jllm.files.save import save
from jllm.model.param_specs import abstract_params
from jllm.model.rope import angles, inverse_frequencies
from tests.parity import PARITY, WIDE

ROPES = json.loads((Path(__file__).parents[1] / "data" / "ropes.json").read_text())
CONFIGS = Path(__file__).parents[2] / "configs"

PARAMETER_COUNTS = {  # as published, or as the released checkpoints' index files count them
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "granite-3.3-2b": 2_533_539_840,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-4": 14_659_507_200,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "smollm3-3b": 3_075_098_624,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def hf(family="Llama", **fields):
    raw = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in (raw | fields).items() if value is not ...}


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_every_shipped_shape_has_the_published_parameter_count(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(file)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))
    assert count == PARAMETER_COUNTS[file.stem]
    assert from_hf(to_hf(config)) == config


def test_there_is_one_way_to_read_a_config():
    with pytest.raises(AttributeError, match="use jllm.files.hf_config.from_hf"):
        LlamaConfig.from_hf({})


def test_the_page_names_every_family():
    page = (CONFIGS.parent / "docs" / "models-and-files.md").read_text()
    assert [family.model_type for family in FAMILIES.values() if f"`{family.model_type}`" not in page] == []


def test_no_shipped_shape_is_missing():
    assert {file.stem for file in CONFIGS.glob("*.json")} == PARAMETER_COUNTS.keys()


@pytest.mark.parametrize(
    ("family", "context", "kv_heads", "head_dim", "bos", "eos"),
    [
        ("Llama", 2048, 32, 2, 1, (2,)),
        ("Mistral", 131072, 8, 2, 1, (2,)),
        ("Qwen2", 32768, 32, 2, None, ()),
        ("Qwen3", 32768, 32, 128, None, ()),
    ],
)
def test_absent_fields_mean_what_transformers_means(family, context, kv_heads, head_dim, bos, eos):
    config = from_hf(hf(family, num_attention_heads=32, num_key_value_heads=..., torch_dtype=...))
    assert config == LlamaConfig(
        architecture=f"{family}ForCausalLM",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=72,
        num_layers=3,
        num_heads=32,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        norm_eps=1e-6,
        windows=(4096,) * 3 if family == "Mistral" else (),
        qkv_bias=family == "Qwen2",
        qk_norm=family == "Qwen3",
        dtype="float32",
        bos_id=bos,
        eos_ids=eos,
    )
    assert from_hf(hf(family, num_attention_heads=32, num_key_value_heads=None)).num_kv_heads == 32


@pytest.mark.parametrize(
    ("older", "newer", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, 1e4, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            1e4,
            RopeScaling("linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
            {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
        ),
    ],
    ids=["default", "absent", "linear", "llama3"],
)
def test_both_rope_layouts_mean_the_same(older, newer, theta, scaling):
    one = from_hf(hf(**older))
    assert (one.rope_theta, one.rope_scaling) == (theta, scaling)
    assert one == from_hf(hf(**newer, torch_dtype=..., dtype="float32")) == from_hf(hf(**older, **newer))
    assert from_hf(to_hf(one)) == one


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_are_those_of_transformers(name):
    """In float64, at positions within the original context and beyond it (tests/data/make_parity.py)."""
    case = ROPES[name]
    config = from_hf(hf(head_dim=16, max_position_embeddings=128, **case["fields"]))
    assert from_hf(to_hf(config)) == config
    positions = np.array([0, 1, 15, 16, 31, 32, 127, 128, 319, 4000], np.int32)
    want = case["attention_factor"] * np.exp(1j * positions[:, None] * np.asarray(case["frequencies"])[None])
    with jax.enable_x64(True):
        cos, sin = angles(config, jnp.asarray(positions), jnp.float64)
    np.testing.assert_allclose(np.asarray(cos) + 1j * np.asarray(sin), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"type": "linear", "factor": 4.0}, 128),
        ({"type": "dynamic", "factor": 2.5}, 320),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 128),
        ({"type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}, 128),
    ],
    ids=lambda value: str(value),
)
def test_a_factor_extends_the_context_where_the_file_states_the_original(fields, context):
    assert from_hf(hf(head_dim=16, max_position_embeddings=128, rope_scaling=fields)).context == context


def test_up_to_its_original_length_a_dynamic_rope_is_plain():
    dynamic = from_hf(hf(rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=64))
    plain = inverse_frequencies(dataclasses.replace(dynamic, rope_scaling=None))
    np.testing.assert_array_equal(inverse_frequencies(dataclasses.replace(dynamic, context=64)), plain)
    assert (inverse_frequencies(dynamic)[1:] < plain[1:]).all()


def test_original_context_defaults_to_the_context_and_may_stand_beside_the_rope_dict():
    rope = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    plain = from_hf(hf(rope_scaling=rope, max_position_embeddings=77))
    beside = from_hf(hf(rope_scaling=LLAMA3_ROPE, original_max_position_embeddings=48))
    assert plain.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 77)
    assert beside.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 48)


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("Mistral", {"sliding_window": None}, ()),
        ("Mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, (8, 8, 8)),
        ("Llama", {"layer_types": ["full_attention"] * 3}, ()),
        ("Qwen2", {"sliding_window": 8}, ()),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True}, ()),  # max_window_layers is 28
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8, 8)),
        (
            "Qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(family, fields, windows):
    config = from_hf(hf(family, **fields))
    assert config.windows == windows
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("family", "biases"),
    [("Llama", (True, True, True)), ("Qwen2", (True, False, False)), ("Qwen3", (True, True, False))],
)
def test_biases(family, biases):
    config = from_hf(hf(family, attention_bias=True, **({"mlp_bias": True} if family == "Llama" else {})))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert from_hf(to_hf(config)) == config


def test_architecture_from_model_type_alone():
    assert from_hf(hf(architectures=..., model_type="qwen3")).architecture == "Qwen3ForCausalLM"


def test_generation_config_overrides_token_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf(bos_token_id=3, eos_token_id=4)))
    assert load_config(tmp_path).eos_ids == (4,)
    generation = {"bos_token_id": None, "eos_token_id": [5, 6], "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = load_config(tmp_path)
    assert (config.bos_id, config.eos_ids) == (3, (5, 6))
    assert config == load_config(tmp_path / "config.json")
    assert from_hf(to_hf(config)) == config
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id = 'x' is not a token id"):
        load_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json: not valid JSON"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": [{}]}, ["architecture {} is not supported"]),
        ({"architectures": ..., "model_type": {}}, ["names no known architecture"]),
        ({"model_type": "gemma2"}, ["model_type 'gemma2' contradicts architecture LlamaForCausalLM", "'llama'"]),
        ({"architectures": ..., "model_type": "gpt2"}, ["architecture", "LlamaForCausalLM"]),
        ({"hidden_size": ...}, ["hidden_size is missing"]),
        ({"vocab_size": None}, ["vocab_size is missing"]),
        ({"vocab_size": "96"}, ["vocab_size = '96'"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers = 2.5"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers = 0"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings = 0"]),
        ({"vocab_size": 0}, ["vocab_size = 0"]),
        ({"intermediate_size": -72}, ["intermediate_size = -72"]),
        ({"num_attention_heads": 0}, ["num_attention_heads = 0"]),
        ({"num_attention_heads": 5}, ["hidden_size 64", "5 heads"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3 KV heads"]),
        ({"head_dim": 15}, ["head_dim is 15"]),
        ({"rms_norm_eps": "tiny"}, ["rms_norm_eps = 'tiny'"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps = nan"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings = 'yes'"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id = '</s>'"]),
        ({"eos_token_id": [2, -1]}, ["eos_token_id = [2, -1]"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "silu"]),
        ({"rope_scaling": {"type": "ntk", "factor": 4.0}}, ["ntk", "default, linear, dynamic, llama3, yarn, longrope"]),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["factor is missing"]),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 1, "beta_slow": 2}}, ["beta_fast 1.0", "beta_slow 2.0"]),
        ({"rope_scaling": {"type": "yarn", "truncate": 3}}, ["truncate = 3"]),
        ({"rope_scaling": {"type": "yarn"}, "rope_theta": 1}, ["rope_theta = 1.0", "yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["short_factor is missing"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1] * 7, "long_factor": [1] * 8}},
            ["longrope has 7 factors", "8 pairs"],
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [0] * 8}}, ["short_factor = 0"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor = 0"]),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, ["high_freq_factor 1.0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"factor": 4}},
            ["disagree about factor"],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            ["disagree about rope_type"],
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_parameters": {"type": "default"}},
            ["disagree about rope_type"],
        ),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2}}, ["'default'", "'linear'"]),
        ({"rope_scaling": {"type": {}}}, ["rope type {}"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor = 0.5"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
        ({"logits_scaling": 8.0}, ["logits_scaling = 8.0"]),
        ({"residual_multiplier": 0.22}, ["residual_multiplier = 0.22"]),
        ({"clip_qkv": 8.0}, ["clip_qkv = 8.0"]),
        ({"num_local_experts": 8}, ["num_local_experts = 8"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["layer_types"]),
        ({"layer_types": 3}, ["layer_types = 3"]),
        ({"layer_types": [{}, {}]}, ["layer_types = [{}, {}]"]),
    ],
    ids=str,
)
def test_refused(fields, words):
    with pytest.raises(ConfigError) as error:
        from_hf(hf(**fields), source="here/config.json")
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in ["here/config.json: ", *words]), text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "each of the 3 layers"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window = 0"),
        ({"mlp_bias": True}, "mlp_bias = True"),
    ],
)
def test_refused_for_qwen(fields, words):
    with pytest.raises(ConfigError, match=words):
        from_hf(hf("Qwen2", **fields))


def test_more_experts_of_a_token_than_there_are_is_refused_by_the_fields_name():
    with pytest.raises(ConfigError, match="num_experts_per_tok = 5, but there are 4 experts"):
        from_hf(hf("Mixtral", num_local_experts=4, num_experts_per_tok=5))


def test_mistral_has_no_biases():
    assert not from_hf(hf("Mistral", attention_bias=False)).qkv_bias
    with pytest.raises(ConfigError, match="attention_bias = True"):
        from_hf(hf("Mistral", attention_bias=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "swish", "partial_rotary_factor": 1.0, "final_logit_softcapping": None, "num_experts": 0},
        {"attention_dropout": 0.1, "pad_token_id": 0, "transformers_version": "4.40.0", "_private": 1},
        {"quantization_config": None, "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4}},
    ],
)
def test_neutral_and_harmless_fields_are_accepted_silently(fields):
    assert from_hf(hf(**fields)) == from_hf(hf())  # a warning would be an error here


def test_unknown_fields_are_named_in_one_warning():
    with pytest.warns(UserWarning, match="here: unknown fields are ignored: apple, pear") as caught:
        assert from_hf(hf(pear=1, apple=2), source="here") == from_hf(hf())
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="unknown rope fields are ignored: mscale"):
        from_hf(hf(rope_scaling={"type": "linear", "factor": 2, "mscale": 1}))


@pytest.mark.parametrize("text", ["{", "[1]", b"\xff\xfe", "[" * 100_000], ids=lambda text: str(text[:9]))
def test_unreadable_json(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"config\.json: ") as error:
        load_config(tmp_path)
    assert "\n" not in str(error.value)


def test_missing_config(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match="cannot be read: No such file"):
            load_config(path)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "MistralForCausalLM", "qkv_bias": True},
        {"qkv_bias": True},  # Llama's attention_bias is about o as well
        {"qk_norm": True},
        {"windows": (8, 8, 8)},
        {"architecture": "MistralForCausalLM", "windows": (8, None, 8)},
        {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "windows": (8, 16, 8)},
        {"rope_scaling": RopeScaling("linear", 2.0, original_context=7)},
        {"rope_scaling": RopeScaling("yarn", 2.0, low_freq_factor=2.0)},
        {"rope_scaling": RopeScaling("ntk", 2.0)},
        {"architecture": "Unknown"},
    ],
)
def test_a_config_that_its_architecture_cannot_express_is_not_written(change):
    with pytest.raises(ConfigError):
        to_hf(dataclasses.replace(from_hf(hf()), **change))


def test_windows_must_fit_the_layers_and_none_has_one_spelling():
    with pytest.raises(ConfigError, match="2 sliding windows for 3 layers"):
        dataclasses.replace(from_hf(hf()), windows=(8, 8))
    assert dataclasses.replace(from_hf(hf()), windows=(None, None, None)) == from_hf(hf())


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", *WIDE])
def test_weights_come_back_under_the_names_of_their_family(tmp_path, family):
    model = load(PARITY / family)
    save(tmp_path, model.params, model.config)
    before, after = (
        safetensors.numpy.load_file(folder / "model.safetensors") for folder in (PARITY / family, tmp_path)
    )
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    assert load_config(tmp_path) == model.config
