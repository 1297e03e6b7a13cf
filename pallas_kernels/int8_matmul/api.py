"""Computes (x @ w.T) * x_scale[:, None] * w_scale + bias + residual, of int8 operands."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.scaled_matmul.api import scaled_matmul

LARGEST_K = 2**17 - 1  # (-128)^2 * K below 2^31


def int8_matmul(
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
    """Returns x int8[M, K] times w int8[N, K] transposed, scaled by x_scale [M] and w_scale [N]: [M, N] of `out_dtype`.

    Codes are multiplied and added in int32, exactly: K below 2^17 keeps the largest sums in range. Then `sums *
    x_scale[:, None] * w_scale + bias + residual` is computed in the order written, in the scales' dtype, float32 or
    float64. It is rounded once to `out_dtype`: bfloat16, float16, float32 or float64. bias [N] and residual [M, N] are
    of any of those dtypes.

    Backend "mosaic" takes N and K in multiples of 32, float32 scales, and a residual of `out_dtype`. With x_scale [M,
    G] every K / G columns of a row have a scale of their own; backend "xla" alone does that. Raises ValueError where
    shapes or dtypes disagree, and NotImplementedError for what a named backend doesn't do.
    """
    if x.ndim == 2 and x.shape[1] > LARGEST_K:
        raise ValueError(f"K={x.shape[1]} may overflow int32 sums, expected at most {LARGEST_K}")
    return scaled_matmul(
        x, w, x_scale, w_scale, bias=bias, residual=residual, out_dtype=out_dtype, backend=backend,
        operand=jnp.int8,
    )  # fmt: skip
