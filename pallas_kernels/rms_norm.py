"""Computes root mean square norms (Zhang and Sennrich, arXiv 1910.07467) in plain jnp."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype


class HeadNorms(NamedTuple):
    """Norms of each head of Q and K before they are rotated, as in Qwen3: weights [D], which `offset` is added to."""

    q: jax.Array
    k: jax.Array
    eps: float
    offset: float = 0.0


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, offset: float = 0.0) -> jax.Array:
    """Returns the norm of x [.., E] over the last axis, times weight [E] + offset. Computes in float32 at least. With
    an offset the product is rounded once, as in Gemma."""
    y = x.astype(compute_dtype(x.dtype))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.asarray(eps, y.dtype))
    return times_weight(y, weight, offset, x.dtype)


def times_weight(y: jax.Array, weight: jax.Array, offset: float, dtype: DTypeLike) -> jax.Array:
    """Returns normed rows y [.., E] times weight [E] + offset, in `dtype`."""
    weight = weight.reshape((1,) * (y.ndim - 1) + weight.shape)
    if offset:
        return (y * (weight.astype(y.dtype) + offset)).astype(dtype)
    return y.astype(dtype) * weight.astype(dtype)


def norm_heads(qkv: jax.Array, num_heads: int, norms: HeadNorms) -> jax.Array:
    """Returns qkv [T, H + 2K, D] with Q's and K's heads normed, in one pass on a GPU. If they were split, Q, K and V
    would take a pass each."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k = (rms_norm(qkv, weight, norms.eps, norms.offset) for weight in (norms.q, norms.k))
    head = jnp.arange(qkv.shape[1], dtype=jnp.int32)[None, :, None]
    return jnp.where(head < num_heads, q, jnp.where(head < num_heads + num_kv_heads, k, qkv))
