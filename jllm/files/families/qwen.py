"""Reads and writes Qwen2, whose q, k and v have biases, Qwen3, whose queries and keys have norms, and the mixtures of
both. An expert of Qwen2's computes every token."""

from typing import Any

from jllm.config import LlamaConfig
from jllm.files.families.family import (
    KINDS,
    Family,
    Fields,
    layer_types,
    one_window,
    read_biases,
    read_one_window,
    read_window,
    read_windows,
    words,
    write_biases,
)
from jllm.files.hf_experts import ExpertFields, read_experts, write_experts
from jllm.files.hf_fields import read_boolean, read_integer

_WINDOWS = "sliding_window use_sliding_window max_window_layers layer_types"
_MOE = (
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step "
    "mlp_only_layers"
)
_EXPERTS = ExpertFields("num_experts", 128, 8, "moe_intermediate_size", 768, normalize=None, sparse=True)
_QWEN2_EXPERTS = ExpertFields(
    "num_experts",
    60,
    4,
    "moe_intermediate_size",
    1408,
    normalize=None,
    shared="shared_expert_intermediate_size",
    sparse=True,
)


def _read_windows(raw: Fields, layers: int) -> dict[str, Any]:
    window = read_window(raw, 4096)
    if not read_boolean(raw, "use_sliding_window"):
        window = None
    first = read_integer(raw, "max_window_layers", 28)
    kinds = [KINDS[window is not None and i >= first] for i in range(layers)]
    return {"windows": read_windows(raw, layers, window, kinds)}


def _write_windows(config: LlamaConfig) -> dict[str, Any]:
    window, kinds = one_window(config), layer_types(config)
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": kinds,
        "max_window_layers": (kinds + ["sliding_attention"]).index("sliding_attention"),
    }


def _read_qwen2(raw: Fields, layers: int) -> dict[str, Any]:
    return _read_windows(raw, layers) | {"qkv_bias": True}


def _read_qwen3(raw: Fields, layers: int) -> dict[str, Any]:
    return _read_windows(raw, layers) | read_biases(raw) | {"qk_norm": True}


def _write_qwen3(config: LlamaConfig) -> dict[str, Any]:
    return _write_windows(config) | write_biases(config)


def _read_qwen2_moe(raw: Fields, layers: int) -> dict[str, Any]:
    window = read_window(raw, 4096) if read_boolean(raw, "use_sliding_window") else None
    last = read_integer(raw, "max_window_layers", 28)
    kinds = [KINDS[window is not None and i < last and i % 2 == 0] for i in range(layers)]
    return {
        "windows": read_windows(raw, layers, window, kinds),
        "qkv_bias": read_boolean(raw, "qkv_bias", True),
        "experts": read_experts(raw, _QWEN2_EXPERTS, layers),
    }


def _write_qwen2_moe(config: LlamaConfig) -> dict[str, Any]:
    return _write_windows(config) | {"qkv_bias": config.qkv_bias} | write_experts(config, _QWEN2_EXPERTS)


def _read_qwen3_moe(raw: Fields, layers: int) -> dict[str, Any]:
    window = read_window(raw, 4096) if read_boolean(raw, "use_sliding_window") else None
    return read_biases(raw) | {
        "qk_norm": True,
        "windows": read_one_window(raw, layers, window),  # transformers reads no max_window_layers here
        "experts": read_experts(raw, _EXPERTS, layers),
    }


def _write_qwen3_moe(config: LlamaConfig) -> dict[str, Any]:
    return _write_qwen3(config) | write_experts(config, _EXPERTS)


QWEN2 = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    context=32768,
    kv_heads=32,
    fields=words(_WINDOWS),
    fixed=words("attention_bias"),
    read=_read_qwen2,
    write=_write_windows,
)
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "qwen2_moe",
    context=32768,
    kv_heads=16,
    fields=words(f"{_WINDOWS} qkv_bias shared_expert_intermediate_size {_MOE}"),
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    context=32768,
    kv_heads=32,
    head_dim=128,
    fields=words(f"{_WINDOWS} attention_bias"),
    read=_read_qwen3,
    write=_write_qwen3,
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    context=32768,
    kv_heads=4,
    fields=words(f"{_WINDOWS} attention_bias {_MOE}"),
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
)
