"""Implements SmoothQuant (Xiao et al., arXiv 2211.10438), which moves outliers of activations into weights before both
are rounded.

SmoothAttention (QServe, arXiv 2405.04532) does the same for K and V before they are rounded into the cache.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike
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
from jllm.quant.quantize import quantize, with_chosen_codes
from jllm.quant.schemes import Scheme
from pallas_kernels.formats.numerics import compute_dtype


def smooth(model: Model, tokens: ArrayLike, *, alpha: float = 0.5, fields: Sequence[str] = FIELDS) -> Params:
    """Returns Params of the same function, in which a channel's largest input and weight are closer to each other.

    Input channel j is divided by max|x_j|^alpha / max|w_j|^(1 - alpha). Maxima are over calibration tokens i32[B, T]
    and over output rows. The paper smooths ("qkv", "gate_up"), whose inputs come from a norm. The inputs of "o" and
    "down" come from value and up projections, which can take a scale as well. Raises QuantizationError for alpha
    outside 0 .. 1.
    """
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"alpha must be in 0 .. 1 (0 moves no outlier, 1 moves all of it), not {alpha}")
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


def smooth_attention(model: Model, tokens: ArrayLike, *, alpha: float = 0.5) -> Params:
    """Returns Params of the same function, in whose K and V no channel is much larger than others.

    A channel's factor is fixed beforehand. A KV format's scales of tokens come on top. Channel j of a head is divided
    by max|x_j|^alpha, a maximum over calibration tokens i32[B, T]. For K the maximum covers both channels that rotary
    embedding rotates together. It covers all heads if Q and K have norms. Queries and `o` take the factor in return. A
    head's factors have a geometric mean of 1, so its K and V keep about their size. The paper smooths K alone, with an
    alpha of 0.5. Raises QuantizationError for alpha outside 0 .. 1.
    """
    if not 0 <= alpha <= 1:
        raise QuantizationError(f"alpha must be in 0 .. 1 (0 changes no channel, 1 makes all alike), not {alpha}")
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
    """Runs a layer on x [B, T, E]. Returns its outputs, and the largest magnitudes [K, D] of its K and V before they
    are stored."""

    def one(row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y, found = run_layer(layer, row, config, ("k", "v"))
        k, v = (jnp.abs(found[name]).max(axis=0).astype(compute_dtype(x.dtype)) for name in ("k", "v"))
        return y, k, v

    y, k, v = jax.lax.map(one, x)
    return y, k.max(axis=0), v.max(axis=0)


def _factors(largest: jax.Array, alpha: float) -> jax.Array:
    """Returns the divisors of channels [K, ...]; 1 for channels that are always zero."""
    logs = jnp.where(largest > 0, alpha * jnp.log(jnp.where(largest > 0, largest, 1)), 0)
    return jnp.exp(logs - logs.mean(axis=1, keepdims=True))


def smoothquant(
    model: Model, scheme: str | Scheme, tokens: ArrayLike, *, alpha: float = 0.5, fields: Sequence[str] = FIELDS
) -> Params:
    """Returns Params after `smooth` and then rounding by `scheme`."""
    plan(model, scheme)
    return with_chosen_codes(quantize(smooth(model, tokens, alpha=alpha, fields=fields), scheme))


def smoothing_scales(layer: LayerParams, config: LlamaConfig, field: str, stats: InputStats, alpha: float) -> jax.Array:
    """Returns the divisors [K] of the inputs of `field`; 1 where inputs or weights are always zero."""
    x, w = stats.absmax, jnp.abs(matrices(layer)[field]).max(axis=0).astype(stats.absmax.dtype)
    if field == "o":
        x, w = tie_heads(x, config), tie_heads(w, config)
    s = x**alpha / w ** (1 - alpha)
    return jnp.where((x > 0) & (w > 0), s, 1)
