"""Runs weight_only_matmul in plain jnp: the weight is decoded once, then multiplied."""

from functools import partial

import jax
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode_padded
from pallas_kernels.matmul.xla import matmul


@partial(jax.jit, static_argnames="out_dtype")
def weight_only_matmul(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    """Returns [M, N] of x [M, K'] with columns as stored, bias [N] and residual [M, N]; see api.py. On a GPU the
    decoded weight is rounded to x's dtype, and the matmul is that of any weight. A CPU has no fast matmuls of 16 bits.
    """
    return lax.platform_dependent(
        x, w, bias, residual, cpu=partial(_widened, out_dtype=out_dtype), default=partial(_narrow, out_dtype=out_dtype)
    )


def _narrow(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    decoded = lax.optimization_barrier(decode_padded(w, x.dtype)[: w.shape[0]])
    return matmul(x, decoded, bias, residual, out_dtype)


def _widened(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    wide = compute_dtype(x.dtype)
    contract = (((1,), (1,)), ((), ()))
    y = lax.dot_general(
        x.astype(wide), decode_padded(w, wide), contract, precision="highest", preferred_element_type=wide
    )
    return finish(y[:, : w.shape[0]], bias, residual, out_dtype)


def finish(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike) -> jax.Array:
    """Adds bias [N] and residual [M, N] to y [M, N], rounded once."""
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, :]
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return y.astype(out_dtype)
