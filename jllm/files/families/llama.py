"""Reads and writes LLaMA 1 to 3."""

from typing import Any

from jllm.config import LlamaConfig
from jllm.files.families.family import Family, Fields, read_biases, words, write_biases
from jllm.files.hf_fields import read_boolean


def _read(raw: Fields, layers: int) -> dict[str, Any]:
    return read_biases(raw) | {"mlp_bias": read_boolean(raw, "mlp_bias")}


def _write(config: LlamaConfig) -> dict[str, Any]:
    return write_biases(config) | {"mlp_bias": config.mlp_bias}


LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    context=2048,
    bos=1,
    eos=2,
    fields=words("attention_bias mlp_bias"),
    read=_read,
    write=_write,
)
