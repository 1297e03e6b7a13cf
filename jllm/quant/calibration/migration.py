"""Moves a scale from the columns of a weight to the weight that makes its input. The layer's function stays."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError
from jllm.model.params import AttentionParams, LayerParams, MLPParams

FIELDS = ("qkv", "o", "gate_up", "down")  # the weights whose inputs can take a scale


def migrate(layer: LayerParams, config: LlamaConfig, field: str, s: jax.Array) -> LayerParams:
    """Returns `layer` with columns of `field` times s [K]. Its input is divided by s at the source.

    The source is the norm's weight for qkv and gate_up, the value rows for o, and the up rows for down. The result is
    exact up to rounding, and bitwise for powers of two. For o, query heads that share a KV head must have the same
    scales (see tie_heads). Raises QuantizationError for other kinds of layers.
    """
    name = "attention" if field in ("qkv", "o") else "mlp"
    part = getattr(layer, name)
    if not isinstance(part, AttentionParams | MLPParams) or field not in FIELDS:
        raise QuantizationError(f"{type(part).__name__}: no scale can move out of {field!r} of this kind of layer")
    w = getattr(part, field)
    part = replace(part, **{field: (w * s[None, :].astype(w.dtype)).astype(w.dtype)})
    if field in ("qkv", "gate_up"):
        part = replace(part, norm=part.norm / s.astype(w.dtype))
    elif field == "o":
        part = _divide_last_rows(part, "qkv", s.reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1))
    else:
        part = _divide_last_rows(part, "gate_up", s)
    return replace(layer, **{name: part})


def scale_keys(layer: LayerParams, config: LlamaConfig, s: jax.Array) -> LayerParams:
    """Returns `layer` with keys times s [K, D] and their queries divided by s, so that scores stay the same.

    The two channels that rotary embedding rotates together, D / 2 apart, must have the same scale. If Q and K have
    norms, their weights take the scale, so all heads must have the same. The result is exact up to rounding, and
    bitwise for powers of two.
    """
    part = layer.attention
    if not isinstance(part, AttentionParams):
        raise QuantizationError(f"{type(part).__name__}: keys of this kind of layer cannot be scaled")
    if config.rotary_dim is not None or config.qk_norm_whole:
        raise QuantizationError(
            "keys can be scaled where whole heads are rotated, and each has a norm of its own or none"
        )
    if part.q_norm is not None and part.k_norm is not None:
        scaled = replace(part, q_norm=part.q_norm / s[0].astype(part.q_norm.dtype))
        return replace(layer, attention=replace(scaled, k_norm=part.k_norm * s[0].astype(part.k_norm.dtype)))
    queries = jnp.repeat(1 / s, config.num_heads // config.num_kv_heads, axis=0)
    w: Any = part.qkv
    rows = jnp.concatenate([queries, s, jnp.ones_like(s)]).reshape(-1).astype(w.dtype)
    bias = None if part.qkv_bias is None else part.qkv_bias * rows
    return replace(layer, attention=replace(part, qkv=w * rows[:, None], qkv_bias=bias))


def tie_heads(x: jax.Array, config: LlamaConfig) -> jax.Array:
    """Returns o's inputs x [H D], each replaced by the largest among the query heads that share a KV head."""
    groups = x.reshape(config.num_kv_heads, -1, config.head_dim)
    return jnp.broadcast_to(groups.max(axis=1, keepdims=True), groups.shape).reshape(-1)


def _divide_last_rows(part: Any, field: str, s: jax.Array) -> Any:
    """Returns params in which the last rows of a weight and of its bias are divided by s."""
    w, bias = getattr(part, field), getattr(part, f"{field}_bias")
    s = s.astype(w.dtype)
    part = replace(part, **{field: w.at[-s.shape[0] :].divide(s[:, None])})
    return part if bias is None else replace(part, **{f"{field}_bias": bias.at[-s.shape[0] :].divide(s)})
