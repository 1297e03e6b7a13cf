"""Rotates by position (Su et al. 2021, arXiv:2104.09864), paired by halves as Hugging Face's LLaMA does."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Rotates each pair (x[i], x[i + D/2]) by its row's angle i: x [T, H, D] and cos, sin [T, D/2] give [T, H, D].
    Computes in promote_types(x.dtype, float32) and returns `dtype` (default: x's)."""
    compute = compute_dtype(x.dtype)
    first, second = jnp.split(x.astype(compute), 2, axis=-1)
    cos, sin = cos.astype(compute)[:, None, :], sin.astype(compute)[:, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype if dtype is None else dtype)
