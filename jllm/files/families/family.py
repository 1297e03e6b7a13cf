"""Defines what a family of models is: how its config.json is read and written, and what its tensors are called."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jllm.config import LlamaConfig
from jllm.errors import ConfigError
from jllm.files.hf_fields import read_boolean, read_integer, read_number
from jllm.files.hf_rope import read_rope

Fields = Mapping[str, Any]  # of a config.json, and of a LlamaConfig
KINDS = ("full_attention", "sliding_attention")


def read_plain_rope(raw: Fields, context: int, head_dim: int, source: str, theta: float = 10000.0) -> dict[str, Any]:
    """Returns LlamaConfig's fields of rotary embeddings, where all layers rotate whole heads by the same base."""
    base, scaling = read_rope(raw, context, source, theta=theta)
    return {"rope_theta": base, "rope_scaling": scaling}


def no_fields(_: Any, layers: int = 0) -> dict[str, Any]:
    """Returns no fields: of a family whose config.json has LLaMA's alone."""
    return {}


@dataclass(frozen=True)
class Family:
    """Describes one architecture. Defaults are those of transformers for fields that config.json leaves out."""

    architecture: str
    model_type: str
    context: int
    bos: int | None = None
    eos: int | None = None
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden size / heads
    fields: frozenset[str] = frozenset()  # of config.json, which `read` understands beside those of all families
    fixed: frozenset[str] = frozenset()  # fields that files of this family may have, and that change nothing in it
    eps: float = 1e-6
    tied: bool = False
    rope: Callable[[Fields, int, int, str], dict[str, Any]] = read_plain_rope  # of context, head dim and source
    read: Callable[[Fields, int], dict[str, Any]] = no_fields  # LlamaConfig's fields of a config.json of so many layers
    write: Callable[[LlamaConfig], dict[str, Any]] = no_fields  # the inverse of read
    merged: bool = False  # files have q, k and v as one tensor, and gate and up
    merged_experts: bool = False  # files have all experts of a layer as one tensor (merged_experts.py)
    names: tuple[tuple[str, str], ...] = ()  # tensors' names in files, and in the table of weights; {} is a number


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def read_biases(raw: Fields) -> dict[str, Any]:
    """Returns whether attention has biases, where one field decides for q, k, v and o."""
    bias = read_boolean(raw, "attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}


def write_biases(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": config.o_bias}


def read_optional(raw: Fields, key: str, default: float | None) -> float | None:
    """Returns a positive number; `default` if it is absent, None if it is null."""
    return None if raw.get(key, default) is None else read_number(raw, key, default)


def read_window(raw: Fields, default: int | None) -> int | None:
    """Returns sliding_window; `default` if it is absent, None if it is null."""
    return None if raw.get("sliding_window", default) is None else read_integer(raw, "sliding_window", default, least=1)


def read_windows(raw: Fields, layers: int, window: int | None, kinds: list[str]) -> tuple[int | None, ...]:
    """Returns the window of each layer, by layer_types (`kinds` if absent)."""
    found = kinds if raw.get("layer_types") is None else raw["layer_types"]
    if not isinstance(found, list) or len(found) != layers:
        raise ConfigError(f"layer_types must list one type for each of the {layers} layers")
    for kind in found:
        if kind not in KINDS:
            raise ConfigError(f"layer type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    if "sliding_attention" not in found:
        return ()
    if window is None:
        raise ConfigError("layer_types has sliding_attention, but use_sliding_window or sliding_window is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in found)


def read_one_window(raw: Fields, layers: int, window: int | None) -> tuple[int | None, ...]:
    """Returns the window of each layer, where all have this one. Raises ConfigError if layer_types says otherwise."""
    kind, kinds = KINDS[window is not None], raw.get("layer_types")
    if kinds is not None and kinds != [kind] * layers:
        raise ConfigError(f"layer_types = {kinds!r} is not supported; all layers of this family are of type {kind}")
    return (window,) * layers if window is not None else ()


def one_window(config: LlamaConfig) -> int | None:
    """Returns the window of the first layer that has one."""
    return next((window for window in config.windows if window is not None), None)


def layer_types(config: LlamaConfig) -> list[str]:
    return [KINDS[config.window(i) is not None] for i in range(config.num_layers)]


def write_windows(config: LlamaConfig, default: int) -> dict[str, Any]:
    """Returns the fields of windows. transformers needs one even if no layer has it: `default`."""
    return {"sliding_window": one_window(config) or default, "layer_types": layer_types(config)}


def renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    """Returns a name with the first of these patterns in it replaced. {} is the same number in both."""
    for old, new in pairs:
        pattern = re.escape(old).replace(r"\{\}", r"(\d+)")
        if found := re.search(rf"(?<![^.]){pattern}(?![^.])", name):
            return name[: found.start()] + new.format(*found.groups()) + name[found.end() :]
    return name
