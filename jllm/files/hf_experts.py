"""Reads and writes the fields of config.json that describe a Mixture of Experts, and the names of its tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jllm.config import MOST_LAYERS, MOST_SIZE, Experts, LlamaConfig
from jllm.errors import ConfigError
from jllm.files.hf_fields import read_boolean, read_integer

_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class ExpertFields:
    """Names the fields of one architecture, with the defaults of transformers."""

    count: str
    counts: int
    chosen: int
    ffn: str
    columns: int
    normalize: bool | None  # None: norm_topk_prob says so
    sparse: bool  # mlp_only_layers and decoder_sparse_step say which layers have experts


FIELDS = {
    "MixtralForCausalLM": ExpertFields("num_local_experts", 8, 2, "intermediate_size", 14336, True, False),
    "Qwen3MoeForCausalLM": ExpertFields("num_experts", 128, 8, "moe_intermediate_size", 768, None, True),
}


def read_experts(raw: Mapping[str, Any], architecture: str, layers: int) -> Experts | None:
    """Returns the experts that config.json describes, or None for an architecture without. A field may have the name
    that transformers 5 writes. Raises ConfigError for what does not fit."""
    fields = FIELDS.get(architecture)
    if fields is None:
        return None
    count = fields.count if raw.get(fields.count) is not None else "num_local_experts"
    return Experts(
        count=read_integer(raw, count, fields.counts, least=1, most=MOST_SIZE),
        chosen=read_integer(raw, "num_experts_per_tok", fields.chosen, least=1, most=MOST_SIZE),
        ffn=read_integer(raw, fields.ffn, fields.columns, least=1, most=MOST_SIZE),
        normalize=read_boolean(raw, "norm_topk_prob") if fields.normalize is None else fields.normalize,
        layers=_layers(raw, layers) if fields.sparse else (),
    )


def _layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has experts."""
    step = read_integer(raw, "decoder_sparse_step", 1, least=1, most=MOST_LAYERS)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise ConfigError(f"mlp_only_layers = {dense!r} is not a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def experts_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of config.json for a config's experts: the inverse of read_experts."""
    fields, experts = FIELDS.get(config.architecture), config.experts
    if fields is None or experts is None:
        return {}
    raw: dict[str, Any] = {fields.count: experts.count, "num_experts_per_tok": experts.chosen, fields.ffn: experts.ffn}
    if fields.normalize is None:
        raw["norm_topk_prob"] = experts.normalize
    if fields.sparse:
        raw["decoder_sparse_step"] = 1
        raw["mlp_only_layers"] = [i for i in range(config.num_layers) if not config.has_experts(i)]
    return raw


def ours(name: str) -> str:
    """Returns a tensor's name in the table of weights (params.py), whatever family's file it is from."""
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"(\.experts\.\d+\.)(w[123])(?=\.)", lambda m: m[1] + _OF_MIXTRAL[m[2]], name)


def theirs(name: str, architecture: str) -> str:
    """Returns a tensor's name in a file of that architecture: the inverse of ours."""
    if architecture != "MixtralForCausalLM":
        return name
    name = re.sub(r"(\.mlp\.experts\.\d+\.)(\w+_proj)(?=\.)", lambda m: m[1] + _MIXTRAL[m[2]], name)
    return re.sub(r"\.mlp\.(?=gate\.|experts\.)", ".block_sparse_moe.", name)


_OF_MIXTRAL = {theirs: ours for ours, theirs in _MIXTRAL.items()}
