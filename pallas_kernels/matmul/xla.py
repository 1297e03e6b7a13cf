"""matmul in plain jnp."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.numerics import compute_dtype


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract, precision="highest", preferred_element_type=compute_dtype(x.dtype))


def _dot_two_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return _dot(jnp.broadcast_to(x.reshape(1, -1), (2, x.size)), w)[0].reshape(*x.shape[:-1], -1)


@partial(jax.jit, static_argnames="out_dtype")
def matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: DTypeLike) -> jax.Array:
    """x [..., K], w [N, K], bias [N] -> [..., N]; see api.py."""
    if x.dtype == jnp.bfloat16 and x.size == x.shape[-1]:
        # XLA's CPU backend has no bf16 matrix-vector product: one row takes tens of times longer than two.
        y = jax.lax.platform_dependent(x, w, cpu=_dot_two_rows, default=_dot)
    else:
        y = _dot(x, w)
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + bias.shape)
    return y.astype(out_dtype)
