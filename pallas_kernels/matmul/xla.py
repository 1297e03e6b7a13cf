"""matmul in plain jnp."""

from functools import partial

import jax
from jax.typing import DTypeLike

from pallas_kernels.numerics import compute_dtype


@partial(jax.jit, static_argnames="out_dtype")
def matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, out_dtype: DTypeLike) -> jax.Array:
    """x [..., K], w [N, K], bias [N] -> [..., N]; see api.py."""
    compute = compute_dtype(x.dtype)
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    y = jax.lax.dot_general(x, w, contract, precision="highest", preferred_element_type=compute)
    if bias is not None:
        y = y + bias.astype(compute).reshape((1,) * (y.ndim - 1) + bias.shape)
    return y.astype(out_dtype)
