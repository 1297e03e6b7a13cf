"""Reads and writes Mistral, whose layers all have one sliding window, and Mixtral, its mixture of experts."""

from functools import partial
from typing import Any

from jllm.config import LlamaConfig
from jllm.files.families.family import Family, Fields, one_window, read_one_window, read_plain_rope, read_window, words
from jllm.files.hf_experts import ExpertFields, read_experts, write_experts

_EXPERTS = ExpertFields("num_local_experts", 8, 2, "intermediate_size", 14336, normalize=True)


def _read(raw: Fields, layers: int, *, default: int | None) -> dict[str, Any]:
    return {"windows": read_one_window(raw, layers, read_window(raw, default))}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {"sliding_window": one_window(config)}


def _read_mixtral(raw: Fields, layers: int) -> dict[str, Any]:
    return _read(raw, layers, default=None) | {"experts": read_experts(raw, _EXPERTS, layers)}


def _write_mixtral(config: LlamaConfig) -> dict[str, Any]:
    return _write(config) | write_experts(config, _EXPERTS)


MISTRAL = Family(
    "MistralForCausalLM",
    "mistral",
    context=4096 * 32,
    bos=1,
    eos=2,
    kv_heads=8,
    fields=words("sliding_window layer_types"),
    read=partial(_read, default=4096),
    write=_write,
)
MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    context=4096 * 32,
    bos=1,
    eos=2,
    kv_heads=8,
    eps=1e-5,
    fields=words("sliding_window layer_types num_local_experts num_experts_per_tok"),
    rope=partial(read_plain_rope, theta=1_000_000.0),
    read=_read_mixtral,
    write=_write_mixtral,
    names=(
        ("block_sparse_moe.gate", "mlp.gate"),
        ("block_sparse_moe.experts.{}.w1", "mlp.experts.{}.gate_proj"),
        ("block_sparse_moe.experts.{}.w3", "mlp.experts.{}.up_proj"),
        ("block_sparse_moe.experts.{}.w2", "mlp.experts.{}.down_proj"),
    ),
)
