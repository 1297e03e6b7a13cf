"""weight_only_matmul in plain jnp: the weight is decoded once, then multiplied."""

from functools import partial

import jax
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.numerics import compute_dtype
from pallas_kernels.quantized_weights import QuantizedWeight, decode_padded


@partial(jax.jit, static_argnames="out_dtype")
def weight_only_matmul(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    """x [M, K'] with columns as stored, bias [N], residual [M, N] -> [M, N]; see api.py."""
    return finish(product(x, w)[:, : w.shape[0]], bias, residual, out_dtype)


def product(x: jax.Array, w: QuantizedWeight) -> jax.Array:
    """x [M, K'] times the padded weight transposed -> [M, N'], at least float32. On a GPU the decoded weight is rounded
    to x's dtype; a CPU has no fast products of 16 bits."""
    wide = compute_dtype(x.dtype)

    def narrow(x: jax.Array, w: QuantizedWeight) -> jax.Array:
        return _dot(x, lax.optimization_barrier(decode_padded(w, x.dtype)), wide)

    def widened(x: jax.Array, w: QuantizedWeight) -> jax.Array:
        return _dot(x.astype(wide), decode_padded(w, wide), wide)

    return lax.platform_dependent(x, w, cpu=widened, default=narrow)


def _dot(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=dtype)


def finish(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike) -> jax.Array:
    """y [M, N] plus bias [N] and residual [M, N], rounded once."""
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, :]
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return y.astype(out_dtype)
