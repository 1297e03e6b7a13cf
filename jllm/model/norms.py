"""Computes norms, and adds what a block computed to the residual stream."""

from typing import Any

import jax

from jllm.config import LlamaConfig
from jllm.model.adapted import Adapted
from jllm.model.linear import linear
from jllm.model.params import Weight
from jllm.model.shapes import Array, Float, shaped
from jllm.model.taps import Tap
from pallas_kernels.backends import where_faster
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import fenced
from pallas_kernels.rms_norm import rms_norm


@shaped
def norm_rows(
    x: Float[Array, "T E"], weight: Float[Array, " E"], config: LlamaConfig, backend: str | None
) -> Float[Array, "T E"]:
    """Returns the model's norm of each row."""
    if config.norm_offset:
        return fenced(backend, lambda x: rms_norm(x, weight, config.norm_eps, config.norm_offset), x)
    return norm_quant(x, weight, eps=config.norm_eps, backend=where_faster(backend))[0]


@shaped
def add_linear(
    x: Float[Array, "T E"],
    rows: Float[Array, "T inputs"],
    w: Weight | Adapted,
    bias: Float[Array, " E"] | None = None,
    norm: Float[Array, " E"] | None = None,
    *,
    config: LlamaConfig,
    backend: str | None,
    tap: Tap | None = None,
    name: str = "",
) -> Float[Array, "T E"]:
    """Returns the residual stream x plus what a block adds: linear of rows, then its norm if it has one, times the
    model's multiplier. Hooks of `tap` may add to the linear layer by its `name`."""
    shared: dict[str, Any] = {"axis": config.axis, "parts": config.activation_parts, "backend": backend}

    def hooked(y: jax.Array) -> jax.Array:
        return y if tap is None else tap.add(name, rows, y)

    if norm is None and config.residual_multiplier == 1:
        return hooked(linear(rows, w, bias, residual=x, out_dtype=x.dtype, **shared))
    added = hooked(linear(rows, w, bias, out_dtype=x.dtype, **shared))
    if norm is not None:
        added = norm_rows(added, norm, config, backend)

    def add(x: jax.Array, added: jax.Array) -> jax.Array:
        wide = compute_dtype(x.dtype)
        return (x.astype(wide) + added.astype(wide) * config.residual_multiplier).astype(x.dtype)

    return fenced(backend, add, x, added)
