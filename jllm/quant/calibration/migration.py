"""Moving a scale from the columns of a weight to what makes its input: the layer's function stays as it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jllm.config import LlamaConfig
from jllm.params import LayerParams

FIELDS = ("qkv", "o", "gate_up", "down")  # whose inputs can take a scale


def migrate(layer: LayerParams, config: LlamaConfig, field: str, s: jax.Array) -> LayerParams:
    """`layer` with columns of `field` times s [K] and its input divided by it, where that input is made: the norm's
    weight before qkv and gate_up, the value rows before o, the up rows before down.

    Exact but for rounding; for powers of two to the last bit. For o, all query heads that share a KV head must have
    the same scales (see tie_heads).
    """
    w = getattr(layer, field)
    columns = (w * s[None, :].astype(w.dtype)).astype(w.dtype)
    if field in ("qkv", "gate_up"):
        source = {"qkv": "attn_norm", "gate_up": "mlp_norm"}[field]
        return replace(layer, **{field: columns, source: getattr(layer, source) / s.astype(w.dtype)})
    if field == "o":
        one_a_head = s.reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)
        return _divide_last_rows(replace(layer, o=columns), "qkv", one_a_head)
    return _divide_last_rows(replace(layer, down=columns), "gate_up", s)


def tie_heads(x: jax.Array, config: LlamaConfig) -> jax.Array:
    """x [H D] of o's input -> the largest among the query heads that share a KV head, [H D]."""
    groups = x.reshape(config.num_kv_heads, -1, config.head_dim)
    return jnp.broadcast_to(groups.max(axis=1, keepdims=True), groups.shape).reshape(-1)


def _divide_last_rows(layer: LayerParams, field: str, s: jax.Array) -> LayerParams:
    """The last rows of a weight and its bias divided by s: those of values or up projections."""
    w, bias = getattr(layer, field), getattr(layer, f"{field}_bias")
    s = s.astype(w.dtype)
    layer = replace(layer, **{field: w.at[-s.shape[0] :].divide(s[:, None])})
    return layer if bias is None else replace(layer, **{f"{field}_bias": bias.at[-s.shape[0] :].divide(s)})
