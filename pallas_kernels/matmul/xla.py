"""Runs matmul in plain jnp."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.hopper.gemm_sm90.skinny_config import MOST_ROWS


def _dot(x: jax.Array, w: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    dtype = compute_dtype(x.dtype) if dtype is None else dtype
    return jax.lax.dot_general(x, w, contract, precision="highest", preferred_element_type=dtype)


def _dot_16_bits(x: jax.Array, w: jax.Array, rounded: DTypeLike | None) -> jax.Array:
    """Multiplies in float32 or, as `rounded`, in 16 bits. On a GPU the sums are in float32 all the same. The matmul's
    own epilogue then rounds them, not another kernel."""
    dtype = jnp.float32 if rounded is None else rounded
    # XLA's CPU backend has no bf16 matrix-vector product: one row takes far longer than two.
    on_cpu = _dot_two_rows if x.dtype == jnp.bfloat16 and x.size == x.shape[-1] else _dot
    return jax.lax.platform_dependent(
        x, w, cuda=partial(_dot, dtype=dtype), default=lambda x, w: on_cpu(x, w).astype(dtype)
    )


def _dot_and_residual(x: jax.Array, w: jax.Array, residual: jax.Array) -> jax.Array:
    """Adds the residual to float32 sums. On a GPU the sums only look rounded before: cuBLASLt adds it in its epilogue,
    if a step is compiled for that (jllm.programs)."""

    def default(x: jax.Array, w: jax.Array, residual: jax.Array) -> jax.Array:
        return (_dot(x, w) + residual.astype(jnp.float32)).astype(residual.dtype)

    cuda = lambda x, w, residual: _dot(x, w, residual.dtype) + residual  # noqa: E731
    return jax.lax.platform_dependent(x, w, residual, cuda=cuda, default=default)


def _dot_two_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(jnp.broadcast_to(x.reshape(1, -1), (2, x.size)), w)[0].reshape(*x.shape[:-1], -1)


@partial(jax.jit, static_argnames="out_dtype")
def matmul(
    x: jax.Array, w: jax.Array, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    """Returns [..., N] of x [..., K], w [N, K], bias [N] and residual [..., N]; see api.py."""
    alike = x.itemsize == 2 and x.dtype == out_dtype and x.size > MOST_ROWS * x.shape[-1]
    if alike and bias is None and residual is not None and residual.dtype == out_dtype:
        return _dot_and_residual(x, w, residual)
    alone = bias is None and residual is None
    y = _dot_16_bits(x, w, out_dtype if alone and x.dtype == out_dtype else None) if x.itemsize == 2 else _dot(x, w)
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + bias.shape)
    if residual is not None:
        y = y + residual.astype(y.dtype)
    return y.astype(out_dtype)
