"""Rotates by position (Su et al. 2021, arXiv:2104.09864), paired by halves as Hugging Face's LLaMA does."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Rotates each pair (x[i], x[i + D/2]) by its row's angle i: x [T, H, D] and cos, sin [T, D/2] give [T, H, D].
    With fewer angles than pairs, the first dims of a head are rotated like a head of their own, and the others kept.
    Computes in promote_types(x.dtype, float32) and returns `dtype` (default: x's)."""
    compute = compute_dtype(x.dtype)
    turned, kept = x, None
    if 2 * cos.shape[1] < x.shape[2]:
        turned, kept = x[..., : 2 * cos.shape[1]], x[..., 2 * cos.shape[1] :]
    first, second = jnp.split(turned.astype(compute), 2, axis=-1)
    cos, sin = cos.astype(compute)[:, None, :], sin.astype(compute)[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    if kept is not None:
        rotated = jnp.concatenate([rotated, kept.astype(compute)], axis=-1)
    return rotated.astype(x.dtype if dtype is None else dtype)
