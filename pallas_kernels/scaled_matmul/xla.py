"""Runs scaled matmuls in plain jnp."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.formats.weight_formats import BLOCK


@partial(jax.jit, static_argnames="out_dtype")
def scaled_matmul(
    x: jax.Array,
    w: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Returns [M, N] of x [M, K], w [N, K], x_scale [M], w_scale [N], bias [N] and residual [M, N]; see api.py."""
    y = product(x, w, x_scale.dtype).astype(x_scale.dtype) * x_scale[:, None] * w_scale[None, :]
    if bias is not None:
        y = y + bias.astype(y.dtype)[None, :]
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return y.astype(out_dtype)


@partial(jax.jit, static_argnames="out_dtype")
def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Returns [M, N] of x [M, K], w [N, K], x_scale [M, G], w_scale [N] or [G, N], bias [N], residual [M, N]; see
    api.py. The last group may have fewer columns."""
    (M, K), N, G = x.shape, w.shape[0], x_scale.shape[1]
    size = -(-K // G) if w_scale.ndim == 1 else BLOCK
    x, w = (jnp.pad(array, ((0, 0), (0, G * size - K))) for array in (x, w))

    def add(g: jax.Array, total: jax.Array) -> jax.Array:
        own_x, own_w = (lax.dynamic_slice_in_dim(array, g * size, size, axis=1) for array in (x, w))
        scale = lax.dynamic_slice_in_dim(x_scale, g, 1, axis=1)
        if w_scale.ndim == 2:
            scale = scale * lax.dynamic_slice_in_dim(w_scale, g, 1)
        return total + product(own_x, own_w, total.dtype).astype(total.dtype) * scale

    y = lax.fori_loop(0, G, add, jnp.zeros((M, N), x_scale.dtype))
    if w_scale.ndim == 1:
        y = y * w_scale[None, :]
    for addend in (None if bias is None else bias[None, :], residual):
        y = y if addend is None else y + addend.astype(y.dtype)
    return y.astype(out_dtype)


def product(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns x [M, K] times w [N, K] transposed: [M, N], int32 of int8, exactly; else `dtype`, which sums are in."""
    if x.dtype == jnp.int8:
        multiply = partial(_dot, dtype=jnp.int32)
        return lax.platform_dependent(x, w, cpu=partial(_two_rows, multiply), default=multiply)
    if jnp.dtype(dtype) == jnp.float64:
        return _dot(x.astype(dtype), w.astype(dtype), dtype)
    # On a GPU XLA hands a matmul of two fp8 arrays to cuBLASLt as it is. Its CPU backend is fastest in bfloat16, which
    # holds e4m3 exactly.
    multiply = partial(_dot, dtype=dtype)
    return lax.platform_dependent(x, w, cpu=partial(_two_rows, partial(_upcast, multiply)), default=multiply)


def _dot(x: jax.Array, w: jax.Array, dtype: DTypeLike) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _upcast(multiply: "partial[jax.Array]", x: jax.Array, w: jax.Array) -> jax.Array:
    return multiply(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))


def _two_rows(multiply: "partial[jax.Array]", x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies two rows for one: XLA's CPU backend has no fast matrix-vector product of eight or 16 bits."""
    if x.shape[0] != 1:
        return multiply(x, w)
    return multiply(jnp.broadcast_to(x, (2, x.shape[1])), w)[:1]
