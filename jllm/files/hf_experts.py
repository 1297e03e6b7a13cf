"""Reads and writes the fields of config.json that describe a Mixture of Experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jllm.config import MOST_LAYERS, MOST_SIZE, Experts, LlamaConfig
from jllm.errors import ConfigError, counted
from jllm.files.hf_fields import read_boolean, read_integer


@dataclass(frozen=True)
class ExpertFields:
    """Names the fields of one family, with the defaults of transformers."""

    count: str
    counts: int
    chosen: int
    ffn: str
    columns: int
    normalize: bool | None  # None: norm_topk_prob says so
    shared: str | None = None  # the columns of an expert that computes every token
    biases: bool = False
    sparse: bool = False  # mlp_only_layers and decoder_sparse_step say which layers have experts


def read_experts(raw: Mapping[str, Any], fields: ExpertFields, layers: int) -> Experts:
    """Returns the experts that config.json describes. A field may have the name that transformers 5 writes. Raises
    ConfigError for what does not fit."""
    name = fields.count if raw.get(fields.count) is not None else "num_local_experts"
    count = read_integer(raw, name, fields.counts, least=1, most=MOST_SIZE)
    chosen = read_integer(raw, "num_experts_per_tok", fields.chosen, least=1, most=MOST_SIZE)
    if chosen > count:
        raise ConfigError(f"num_experts_per_tok = {chosen}, but there are {counted(count, 'expert')}")
    return Experts(
        count=count,
        chosen=chosen,
        ffn=read_integer(raw, fields.ffn, fields.columns, least=1, most=MOST_SIZE),
        normalize=read_boolean(raw, "norm_topk_prob") if fields.normalize is None else fields.normalize,
        shared_ffn=0 if fields.shared is None else read_integer(raw, fields.shared, 5632, least=1, most=MOST_SIZE),
        biases=fields.biases,
        layers=_layers(raw, layers) if fields.sparse else (),
    )


def _layers(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has experts."""
    step = read_integer(raw, "decoder_sparse_step", 1, least=1, most=MOST_LAYERS)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise ConfigError(f"mlp_only_layers = {dense!r} is not a list of layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def write_experts(config: LlamaConfig, fields: ExpertFields) -> dict[str, Any]:
    """Returns the fields of config.json for a config's experts: the inverse of read_experts."""
    experts = config.experts
    if experts is None:
        return {}
    raw: dict[str, Any] = {fields.count: experts.count, "num_experts_per_tok": experts.chosen, fields.ffn: experts.ffn}
    if fields.shared is not None:
        raw[fields.shared] = experts.shared_ffn
    if fields.normalize is None:
        raw["norm_topk_prob"] = experts.normalize
    if fields.sparse:
        raw["decoder_sparse_step"] = 1
        raw["mlp_only_layers"] = [i for i in range(config.num_layers) if not config.has_experts(i)]
    return raw
