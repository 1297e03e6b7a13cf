"""Families' config.json: what absent fields mean to transformers, older layouts, and what is refused by name."""

import pytest

from jllm.config import RopeScaling
from jllm.errors import ConfigError
from jllm.files.hf_config import from_hf, to_hf
from tests.files.test_config import hf

LINEAR = {"rope_type": "linear", "factor": 8.0}
LONGROPE = {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


@pytest.mark.parametrize(
    ("family", "fields", "wanted"),
    [
        ("SmolLM3", {}, {"unrotated": (False, False, False, True), "rope_theta": 2e6, "tie_embeddings": True}),
        ("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}, {"unrotated": (False, True, False, True)}),
        ("Gemma2", {}, {"windows": (4096, None, 4096, None), "attention_softcap": 50.0, "logit_softcap": 30.0}),
        ("Gemma2", {}, {"embedding_multiplier": 8.0, "attention_scale": 1 / 16, "norm_offset": 1.0, "head_dim": 256}),
        ("Gemma2", {"attn_logit_softcapping": None}, {"attention_softcap": None, "norms": "around"}),
        ("Gemma3", {}, {"windows": (4096,) * 4, "rope_theta": 1e6, "window_theta": 1e4, "logit_softcap": None}),
        (
            "Gemma3",
            {"sliding_window_pattern": 2, "rope_local_base_freq": 5e3, "rope_scaling": LINEAR},
            {"windows": (4096, None, 4096, None), "window_theta": 5e3, "rope_scaling": RopeScaling("linear", 8.0)},
        ),
        (
            "Gemma3",
            {"rope_parameters": {"full_attention": LINEAR | {"rope_theta": 2e6}}},
            {"rope_theta": 2e6, "window_theta": 1e4, "rope_scaling": RopeScaling("linear", 8.0)},
        ),
        ("Olmo2", {}, {"norms": "after", "qk_norm_whole": True, "norm_eps": 1e-5, "eos_ids": (50279,)}),
        ("Olmo3", {"rope_theta": 2e4}, {"windows": (4096, 4096, 4096, None), "rope_theta": 2e4, "window_theta": 2e4}),
        ("Phi3", {}, {"rotary_dim": None, "windows": (), "context": 4096, "eos_ids": (32000,)}),
        ("Phi3", {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE}, {"rotary_dim": 12}),
        ("Granite", {"logits_scaling": 8.0}, {"logit_divisor": 8.0, "attention_scale": 1.0, "embedding_multiplier": 1}),
        ("GptOss", {}, {"windows": (128, None, 128, None), "qkv_bias": True, "sinks": True, "rope_theta": 150000.0}),
        ("Qwen3Moe", {"use_sliding_window": True, "max_window_layers": 2}, {"windows": (4096,) * 4, "qk_norm": True}),
        ("Qwen2Moe", {"use_sliding_window": True}, {"windows": (4096, None, 4096, None), "qkv_bias": True}),
        ("Olmoe", {}, {"qk_norm_whole": True, "norms": "before"}),
        ("GptOss", {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": None, "rope_theta": 150000.0}),
        ("Mixtral", {}, {"rope_theta": 1e6, "norm_eps": 1e-5}),
        ("Gemma3", {"attn_logit_softcapping": 0}, {"attention_softcap": None}),
    ],
)
def test_fields(family, fields, wanted):
    config = from_hf(hf(family, num_hidden_layers=4, **fields))
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "Olmo3", "GptOss"])
def test_files_name_a_window_that_no_layer_has(family):
    """transformers makes its mask wherever a family has one."""
    config = from_hf(hf(family, layer_types=["full_attention"] * 3))
    assert config.windows == ()
    assert to_hf(config)["sliding_window"]
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("Gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        (
            "Gemma3",
            {"rope_parameters": {"sliding_attention": LINEAR}},
            "rope type 'linear' is not supported for layers",
        ),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, "no_rope_layers must list 0 or 1 for each of the 3 layers"),
        ("Phi3", {"partial_rotary_factor": 0.1}, "rotary_dim is 1, but must be even"),
        ("Phi3", {"rope_scaling": LINEAR}, "rope type 'linear' is not supported for Phi"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("GptOss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0 is not supported"),
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier = 0 is not a positive number"),
        ("Olmo2", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ],
)
def test_refused(family, fields, words):
    with pytest.raises(ConfigError, match=words):
        from_hf(hf(family, **fields))
