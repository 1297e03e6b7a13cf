"""linear(x, w): the one place that knows how to multiply by each kind of weight leaf."""

import jax

from pallas_kernels.matmul import matmul


def linear(x: jax.Array, w: jax.Array, bias: jax.Array | None = None, *, out_dtype=None) -> jax.Array:
    """x [..., in] times w [out, in] transposed, plus bias [out]: [..., out] in out_dtype (default: x's)."""
    return matmul(x, w, bias=bias, out_dtype=out_dtype)
