"""Reads and writes Phi-3 and Phi-4, which rotate a part of each head and store q, k and v as one tensor."""

from typing import Any

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.files.families.family import Family, Fields, one_window, read_window, words
from jllm.files.hf_rope import read_partial_rope

_LONGROPE = ("su", "yarn")  # older names of it in this family


def _rope(raw: Fields, context: int, head_dim: int, source: str) -> dict[str, Any]:
    raw = {"original_max_position_embeddings": 4096} | dict(raw)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = raw.get(key)
        if isinstance(scaling, dict):
            kinds = {name: "longrope" for name in ("type", "rope_type") if scaling.get(name) in _LONGROPE}
            raw[key] = scaling | kinds
    rope = read_partial_rope(raw, context, source, head_dim=head_dim)
    if rope["rope_scaling"] is not None and rope["rope_scaling"].kind != "longrope":
        raise ConfigError(f"rope type {rope['rope_scaling'].kind!r} is not supported for Phi; supported: longrope")
    return rope


def _read(raw: Fields, layers: int) -> dict[str, Any]:
    window = read_window(raw, None)
    return {"windows": () if window is None else (window,) * layers}


def _write(config: LlamaConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "sliding_window": one_window(config),
        "partial_rotary_factor": config.rotated_dims / config.head_dim,
        "original_max_position_embeddings": config.context if scaling is None else scaling.original_context,
    }


PHI3 = Family(
    "Phi3ForCausalLM",
    "phi3",
    context=4096,
    bos=1,
    eos=32000,
    eps=1e-5,
    fields=words("sliding_window partial_rotary_factor"),
    rope=_rope,
    read=_read,
    write=_write,
    merged=True,
)
