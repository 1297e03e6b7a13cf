"""Reads and writes OLMo 2, whose blocks end with their norm, OLMo 3, most of whose layers have a window, and OLMoE,
whose blocks begin with their norm and have experts. All have norms of q and k over all heads of a token."""

from typing import Any

from jllm.config import LlamaConfig
from jllm.files.families.family import (
    Family,
    Fields,
    read_biases,
    read_window,
    read_windows,
    words,
    write_biases,
    write_windows,
)
from jllm.files.hf_experts import ExpertFields, read_experts, write_experts
from jllm.files.hf_rope import read_rope_by_window, write_rope_by_window

_EXPERTS = ExpertFields("num_experts", 64, 8, "intermediate_size", 2048, normalize=None)


def _read_olmo2(raw: Fields, layers: int) -> dict[str, Any]:
    return read_biases(raw) | {"norms": "after", "qk_norm": True, "qk_norm_whole": True}


def _read_olmo3(raw: Fields, layers: int) -> dict[str, Any]:
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)]
    return _read_olmo2(raw, layers) | {"windows": read_windows(raw, layers, read_window(raw, 4096), kinds)}


def _write_olmo3(config: LlamaConfig) -> dict[str, Any]:
    return write_biases(config) | write_windows(config, 4096) | write_rope_by_window(config)


def _olmo3_rope(raw: Fields, context: int, head_dim: int, source: str) -> dict[str, Any]:
    return read_rope_by_window(raw, context, source, theta=500_000.0)


def _read_olmoe(raw: Fields, layers: int) -> dict[str, Any]:
    norms = {"qk_norm": True, "qk_norm_whole": True}
    return read_biases(raw) | norms | {"experts": read_experts(raw, _EXPERTS, layers)}


def _write_olmoe(config: LlamaConfig) -> dict[str, Any]:
    return write_biases(config) | write_experts(config, _EXPERTS)


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    context=2048,
    eos=50279,
    eps=1e-5,
    fields=words("attention_bias"),
    read=_read_olmo2,
    write=write_biases,
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    context=2048,
    eos=50279,
    eps=1e-5,
    fields=words("attention_bias sliding_window layer_types"),
    rope=_olmo3_rope,
    read=_read_olmo3,
    write=_write_olmo3,
)
OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    context=4096,
    eos=50279,
    eps=1e-5,
    fields=words("attention_bias num_experts num_local_experts num_experts_per_tok norm_topk_prob"),
    read=_read_olmoe,
    write=_write_olmoe,
)
