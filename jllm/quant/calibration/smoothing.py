"""SmoothQuant (Xiao et al., arXiv 2211.10438): outliers of activations moved into weights, before both are rounded."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jllm.config import LlamaConfig
from jllm.errors import QuantizationError
from jllm.params import LayerParams, Params, matrices
from jllm.pretrained import Model
from jllm.quant.calibration.inputs import DELAY, InputStats, layer_statistics, plan
from jllm.quant.calibration.migration import FIELDS, migrate, tie_heads
from jllm.quant.quantize import quantize
from jllm.quant.schemes import Scheme


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


def smoothquant(
    model: Model, scheme: str | Scheme, tokens: Any, *, alpha: float = 0.5, fields: Sequence[str] = FIELDS
) -> Params:
    """`smooth`, then rounding."""
    plan(model, scheme)
    return quantize(smooth(model, tokens, alpha=alpha, fields=fields), scheme)


def smoothing_scales(layer: LayerParams, config: LlamaConfig, field: str, stats: InputStats, alpha: float) -> jax.Array:
    """[K], what the inputs of `field` are divided by; 1 where inputs or weights are zero throughout."""
    x, w = stats.absmax, jnp.abs(matrices(layer)[field]).max(axis=0).astype(stats.absmax.dtype)
    if field == "o":
        x, w = tie_heads(x, config), tie_heads(w, config)
    s = x**alpha / w ** (1 - alpha)
    return jnp.where((x > 0) & (w > 0), s, 1)
