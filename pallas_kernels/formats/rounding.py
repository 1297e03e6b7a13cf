"""Rounds in ways that a compiler may not drop."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns x, of a type at least as wide, rounded to `dtype`. It stays rounded when it is converted back. XLA may
    drop a conversion to a narrower type and back, and does so on a GPU. It keeps `reduce_precision`, which however
    turns numbers below the narrow type's normal ones into zero."""
    narrow, wide = jnp.finfo(dtype), jnp.finfo(x.dtype)
    kept = jax.lax.reduce_precision(x, narrow.nexp, narrow.nmant).astype(dtype)
    if narrow.nexp == wide.nexp:
        return kept
    return jnp.where(jnp.abs(x) < narrow.smallest_normal.astype(x.dtype), x.astype(dtype), kept)


def to_float8(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds x, of 32 bits or more and within range, to a type of 8 bits. It stays rounded when converted back."""
    narrow = jnp.finfo(dtype)
    kept = jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, narrow.nmant)
    step = float(narrow.smallest_subnormal)
    below = jnp.round(x * (1 / step)) * step  # below the normal numbers, which have their steps by exponent
    return jnp.where(jnp.abs(x) < float(narrow.smallest_normal), below, kept).astype(dtype)
