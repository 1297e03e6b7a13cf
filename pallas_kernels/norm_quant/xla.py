"""Runs norm_quant in plain jnp."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows, quantize_rows
from pallas_kernels.formats.rounding import round_to


@partial(jax.jit, static_argnames=("eps", "kind"))
def norm_quant(
    x: jax.Array, weight: jax.Array | None, *, eps: float, residual: jax.Array | None = None, kind: str | None = None
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    """Returns rows [T, E], summed [T, E] of x, residual [T, E] and weight [E]; see api.py."""
    compute = compute_dtype(x.dtype)
    summed = x if residual is None else round_to(x.astype(compute) + residual.astype(compute), x.dtype)
    if weight is None:
        return (summed if kind is None else quantize_rows(summed, kind)), summed
    y = summed.astype(compute)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + jnp.asarray(eps, compute))
    y = round_to(y, x.dtype).astype(compute)
    normed = round_to(y * weight.astype(compute)[None, :], x.dtype)
    return (normed if kind is None else quantize_rows(normed, kind)), summed
