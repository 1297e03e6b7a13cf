"""all_reduce by XLA's collective (NCCL on GPUs), whose parts are each summed at one place and then spread."""

import jax
from jax import lax

from pallas_kernels.numerics import compute_dtype


def all_reduce(x: jax.Array, axis: str, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """x [T, E], bias [E] and residual [T, E] or None -> [T, E]; see api.py."""
    wide = compute_dtype(x.dtype)
    y = lax.psum(x, axis).astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)[None]
    if residual is not None:
        y = y + residual.astype(wide)
    return y.astype(x.dtype)
