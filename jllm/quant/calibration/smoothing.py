"""SmoothQuant (Xiao et al., arXiv 2211.10438): outliers of activations moved into weights, before both are rounded; and
SmoothAttention (QServe, arXiv 2405.04532), the same for K and V before they are rounded into the cache."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError
from jllm.model.model import Model
from jllm.model.params import LayerParams, Params, matrices
from jllm.quant.calibration.inputs import (
    DELAY,
    InputStats,
    check_tokens,
    embed_tokens,
    layer_statistics,
    plan,
    run_layer,
)
from jllm.quant.calibration.migration import FIELDS, migrate, scale_keys, tie_heads
from jllm.quant.quantize import quantize
from jllm.quant.schemes import Scheme
from pallas_kernels.formats.numerics import compute_dtype


def smooth(model: Model, tokens: Any, *, alpha: float = 0.5, fields: Sequence[str] = FIELDS) -> Params:
    """Params of the same function, in which a channel's largest input and weight are nearer to each other.

    Input channel j is divided by max|x_j|^alpha / max|w_j|^(1 - alpha), maxima over calibration tokens i32[B, T] and
    over output rows. The paper smooths ("qkv", "gate_up"), whose inputs are a norm's; "o" and "down" have theirs from
    value and up projections, which can take a scale as well. Raises QuantizationError for alpha outside 0 .. 1.
    """
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"alpha must be in 0 .. 1, from all outliers left alone to all moved, not {alpha}")
    if unknown := [field for field in fields if field not in FIELDS]:
        raise QuantizationError(f"unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}")
    plan(model, "bf16")
    layers = []
    stats = layer_statistics(model, tokens, fields, gram=False)
    for layer in tqdm(model.params.layers, "smoothing", delay=DELAY, leave=False, disable=None):
        found = next(stats)
        for field in fields:
            layer = migrate(
                layer, model.config, field, smoothing_scales(layer, model.config, field, found[field], alpha)
            )
        layers.append(layer)
    return replace(model.params, layers=tuple(layers))


def smooth_attention(model: Model, tokens: Any, *, alpha: float = 0.5) -> Params:
    """Params of the same function, in whose K and V no channel is much larger than others: scales of channels, found
    ahead, beside those that a KV format finds for each token.

    Channel j of a head is divided by max|x_j|^alpha, a maximum over calibration tokens i32[B, T]; of K it is that of
    both channels that rotary embedding turns, and of all heads where Q and K have norms. Queries and `o` take the
    factor in return. A head's factors have a geometric mean of 1, so that its K and V stay about as large as they are.
    The paper has an alpha of 0.5, and K alone. Raises QuantizationError for alpha outside 0 .. 1.
    """
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"alpha must be in 0 .. 1, from channels left alone to all alike, not {alpha}")
    plan(model, "bf16")
    c, layers = model.config, []
    x = embed_tokens(model, check_tokens(model, tokens))
    for i, layer in enumerate(tqdm(model.params.layers, "smoothing K and V", delay=DELAY, leave=False, disable=None)):
        x, k, v = _largest_kv(layer, x, c.one_layer(i))
        pairs = jnp.maximum(*jnp.split(k, 2, axis=1))
        if getattr(layer.attention, "q_norm", None) is not None:
            pairs = jnp.broadcast_to(pairs.max(axis=0), pairs.shape)
        layer = scale_keys(layer, c, 1 / jnp.tile(_factors(pairs, alpha), 2))
        values = jnp.repeat(_factors(v, alpha), c.num_heads // c.num_kv_heads, axis=0)
        layers.append(migrate(layer, c, "o", values.reshape(-1)))
    return replace(model.params, layers=tuple(layers))


@partial(jax.jit, static_argnames="config")
def _largest_kv(layer: LayerParams, x: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns a layer on x [B, T, E]: its outputs, and the largest magnitudes [K, D] of its K and V, as a cache gets
    them."""

    def one(row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y, found = run_layer(layer, row, config, ("k", "v"))
        k, v = (jnp.abs(found[name]).max(axis=0).astype(compute_dtype(x.dtype)) for name in ("k", "v"))
        return y, k, v

    y, k, v = jax.lax.map(one, x)
    return y, k.max(axis=0), v.max(axis=0)


def _factors(largest: jax.Array, alpha: float) -> jax.Array:
    """Returns what channels [K, ..] are divided by; 1 for those that are zero throughout."""
    logs = jnp.where(largest > 0, alpha * jnp.log(jnp.where(largest > 0, largest, 1)), 0)
    return jnp.exp(logs - logs.mean(axis=1, keepdims=True))


def smoothquant(
    model: Model, scheme: str | Scheme, tokens: Any, *, alpha: float = 0.5, fields: Sequence[str] = FIELDS
) -> Params:
    """Returns `smooth`, then rounding."""
    plan(model, scheme)
    return quantize(smooth(model, tokens, alpha=alpha, fields=fields), scheme)


def smoothing_scales(layer: LayerParams, config: LlamaConfig, field: str, stats: InputStats, alpha: float) -> jax.Array:
    """Returns [K], what the inputs of `field` are divided by; 1 where inputs or weights are zero throughout."""
    x, w = stats.absmax, jnp.abs(matrices(layer)[field]).max(axis=0).astype(stats.absmax.dtype)
    if field == "o":
        x, w = tie_heads(x, config), tie_heads(w, config)
    s = x**alpha / w ** (1 - alpha)
    return jnp.where((x > 0) & (w > 0), s, 1)
