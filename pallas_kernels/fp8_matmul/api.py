"""Computes (x @ w.T) * x_scale[:, None] * w_scale + bias + residual, of float8 (e4m3) operands."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.scaled_matmul.api import scaled_matmul


def fp8_matmul(
    x: jax.Array,
    w: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    backend: str | None = None,
) -> jax.Array:
    """Returns x e4m3[M, K] times w e4m3[N, K] transposed, scaled by x_scale [M] and w_scale [N]: [M, N] of `out_dtype`.

    Operands are float8_e4m3fn. Products are added in the scales' dtype, float32 or float64. Hopper's tensor cores keep
    fewer bits of a float8 sum than float32 has. Then `sums * x_scale[:, None] * w_scale + bias + residual` is computed
    in that dtype, as in int8_matmul, and rounded once.

    With x_scale [M, G] and w_scale [G, N], G = K / 128 rounded up, every 128 columns have scales of their own: `sums *
    (x_scale * w_scale)` of each are added in the order of K. A block of 128 rows of w has one scale, which each of its
    rows repeats; the kernels take any. Raises ValueError where shapes or dtypes disagree, and
    NotImplementedError for what a named backend doesn't do.
    """
    return scaled_matmul(
        x, w, x_scale, w_scale, bias=bias, residual=residual, out_dtype=out_dtype, backend=backend,
        operand=jnp.float8_e4m3fn,
    )  # fmt: skip
