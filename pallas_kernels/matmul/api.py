"""matmul: x @ w.T + bias."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import choose_backend
from pallas_kernels.checks import check_concrete, check_floats
from pallas_kernels.matmul import reference, xla


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """x [..., K] times w [N, K] transposed, plus bias [N] -> [..., N] of `out_dtype` (default: x's dtype).

    Accumulates in promote_types(x.dtype, float32), float32 and float64 at the highest precision; the bias is added
    before the cast. Raises ValueError where shapes or dtypes disagree.
    """
    chosen = choose_backend(backend)
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape} and w {w.shape}, expected [..., K] and [N, K]")
    check_floats(x=x, w=w)
    if bias is not None and bias.shape != w.shape[:1]:
        raise ValueError(f"bias has shape {bias.shape}, expected [N] with N={w.shape[0]}")
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if chosen == "reference":
        check_concrete(x, w, bias)
        return jnp.asarray(reference.matmul(x, w, bias)).astype(out_dtype)
    return xla.matmul(x, w, bias, out_dtype)
