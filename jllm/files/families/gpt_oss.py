"""Reads and writes gpt-oss, whose heads have sinks, and whose router and experts have biases."""

from typing import Any

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.files.families.family import (
    KINDS,
    Family,
    Fields,
    read_plain_rope,
    read_window,
    read_windows,
    words,
    write_biases,
    write_windows,
)
from jllm.files.hf_experts import ExpertFields, read_experts, write_experts
from jllm.files.hf_fields import read_boolean, read_number

_EXPERTS = ExpertFields("num_local_experts", 128, 4, "intermediate_size", 2880, normalize=True, biases=True)
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _rope(raw: Fields, context: int, head_dim: int, source: str) -> dict[str, Any]:
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw = dict(raw) | {"rope_scaling": _YARN}
    return read_plain_rope(raw, context, head_dim, source, theta=150_000.0)


def _read(raw: Fields, layers: int) -> dict[str, Any]:
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):  # as jllm.model.experts has them
        if read_number(raw, key, value) != value:
            raise ConfigError(f"{key} = {raw[key]!r} is not supported; supported: {value}")
    bias = read_boolean(raw, "attention_bias", True)
    kinds = [KINDS[bool((i + 1) % 2)] for i in range(layers)]
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "windows": read_windows(raw, layers, read_window(raw, 128), kinds),
        "experts": read_experts(raw, _EXPERTS, layers),
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    raw = write_biases(config) | write_windows(config, 128) | write_experts(config, _EXPERTS)
    return raw if config.rope_scaling is not None else raw | {"rope_parameters": {"rope_type": "default"}}


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    context=131072,
    kv_heads=8,
    head_dim=64,
    eps=1e-5,
    fields=words(
        "attention_bias sliding_window layer_types num_local_experts num_experts num_experts_per_tok experts_per_token "
        "swiglu_alpha swiglu_limit"
    ),
    rope=_rope,
    read=_read,
    write=_write,
    merged_experts=True,
    names=(("self_attn.sinks", "self_attn.sinks.bias"),),
)
