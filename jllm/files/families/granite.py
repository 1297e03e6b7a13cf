"""Reads and writes Granite 3, which multiplies embeddings, attention, the residual stream and logits by constants."""

from typing import Any

from jllm.config import LlamaConfig
from jllm.files.families.family import Family, Fields, read_biases, words, write_biases
from jllm.files.hf_fields import read_boolean, read_number

_FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logit_divisor",
}


def _read(raw: Fields, layers: int) -> dict[str, Any]:
    factors = {ours: read_number(raw, theirs, 1.0) for theirs, ours in _FACTORS.items()}
    return read_biases(raw) | {"mlp_bias": read_boolean(raw, "mlp_bias")} | factors


def _write(config: LlamaConfig) -> dict[str, Any]:
    factors = {theirs: getattr(config, ours) for theirs, ours in _FACTORS.items()}
    return write_biases(config) | {"mlp_bias": config.mlp_bias} | factors


GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    context=2048,
    bos=1,
    eos=2,
    fields=words(
        "attention_bias mlp_bias embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
    ),
    read=_read,
    write=_write,
)
