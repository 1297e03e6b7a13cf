"""Runs XLA's collective (NCCL on GPUs), whose parts are each summed at one place and then spread."""

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.all_reduce.axis import MeshAxis
from pallas_kernels.formats.numerics import compute_dtype


def all_reduce(x: jax.Array, axis: MeshAxis, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Returns the sum of x [T, E], bias [E] and residual [T, E]; see api.py."""
    return _add(lax.psum(x, axis.name), bias, residual)


def in_rank_order(x: jax.Array, axis: MeshAxis, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    """Gathers the parts of all devices on each, and adds them in their order. XLA's own order depends on the number of
    bytes."""
    return _add(reduce(jnp.add, list(lax.all_gather(x, axis.name))), bias, residual)


def _add(y: jax.Array, bias: jax.Array | None, residual: jax.Array | None) -> jax.Array:
    dtype, wide = y.dtype, compute_dtype(y.dtype)
    y = y.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)[None]
    if residual is not None:
        y = y + residual.astype(wide)
    return y.astype(dtype)
