"""Reads and writes the text models Gemma 2 and 3.

Norms lie around blocks and add 1 to their weights. Embeddings are multiplied by the root of their size. Gates take
GELU. Layers with a window alternate with full attention. Gemma 2 caps logits. Gemma 3 has norms of queries and keys,
and rotates layers with a window by their own base.
"""

import math
from typing import Any

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.files.families.family import (
    KINDS,
    Family,
    Fields,
    read_biases,
    read_optional,
    read_window,
    read_windows,
    words,
    write_biases,
    write_windows,
)
from jllm.files.hf_fields import read_integer, read_number
from jllm.files.hf_rope import read_rope_by_window, write_rope_by_window

_GELU = "gelu_pytorch_tanh"
_FIELDS = (
    "attention_bias hidden_act hidden_activation query_pre_attn_scalar sliding_window layer_types "
    "final_logit_softcapping"
)


def _read(raw: Fields, layers: int, pattern: int, cap: float | None) -> dict[str, Any]:
    """Returns the fields that both have. Each `pattern`-th layer has full attention. `cap` is the default of the
    logits' softcap."""
    activation = raw.get("hidden_activation") or _GELU  # hidden_act was written beside it, and is not read
    if activation != _GELU:
        raise ConfigError(f"hidden_activation = {activation!r} is not supported; supported: {_GELU!r}")
    kinds = [KINDS[bool((i + 1) % pattern)] for i in range(layers)]
    return read_biases(raw) | {
        "norms": "around",
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "embedding_multiplier": math.sqrt(read_integer(raw, "hidden_size", least=1)),
        "attention_scale": read_number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        "logit_softcap": read_optional(raw, "final_logit_softcapping", cap),
        "windows": read_windows(raw, layers, read_window(raw, 4096), kinds),
    }


def _write(config: LlamaConfig) -> dict[str, Any]:
    return (
        write_biases(config)
        | {
            "hidden_act": _GELU,
            "hidden_activation": _GELU,
            "query_pre_attn_scalar": _integer(config.query_scale**-2),
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
        | write_windows(config, 4096)
    )


def _integer(number: float) -> float:
    return round(number) if math.isclose(number, round(number)) else number


def _read_gemma2(raw: Fields, layers: int) -> dict[str, Any]:
    return _read(raw, layers, 2, 30.0) | {"attention_softcap": read_optional(raw, "attn_logit_softcapping", 50.0)}


def _read_gemma3(raw: Fields, layers: int) -> dict[str, Any]:
    pattern = read_integer(raw, "sliding_window_pattern", 6, least=1)
    return _read(raw, layers, pattern, None) | {"qk_norm": True}


def _write_gemma3(config: LlamaConfig) -> dict[str, Any]:
    return _write(config) | write_rope_by_window(config) | {"rope_local_base_freq": config.window_theta}


def _gemma3_rope(raw: Fields, context: int, head_dim: int, source: str) -> dict[str, Any]:
    return read_rope_by_window(raw, context, source, theta=1_000_000.0, window_theta=10_000.0)


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    context=8192,
    bos=2,
    eos=1,
    kv_heads=4,
    head_dim=256,
    tied=True,
    fields=words(f"{_FIELDS} attn_logit_softcapping"),
    read=_read_gemma2,
    write=_write,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    context=131072,
    bos=2,
    eos=1,
    kv_heads=4,
    head_dim=256,
    tied=True,
    fields=words(f"{_FIELDS} sliding_window_pattern rope_local_base_freq"),
    rope=_gemma3_rope,
    read=_read_gemma3,
    write=_write_gemma3,
)
