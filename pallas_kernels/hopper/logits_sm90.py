"""Caps logits and joins sinks, for attention's kernels on Hopper. Both have logits to base 2."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # finite: the difference of two is a number


def tanh(x: jax.Array) -> jax.Array:
    """Returns tanh x, with an error of a few 2^-24. The GPU's own tanh keeps 11 bits, which is too little beside a cap
    of 50. A square of rsqrt takes the place of a division, which would be a dozen instructions."""
    root = lax.rsqrt(jnp.exp2(x * (2 * LOG2_E)) + 1)
    return 1 - 2 * (root * root)


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Returns logits bounded by a softcap, which is to base e."""
    if softcap is None:
        return logits
    bound = softcap * LOG2_E
    return tanh(logits * (1 / bound)) * bound


def sinks_of(sinks_ref: Any, first: jax.Array, heads: jax.Array, count: int) -> jax.Array:
    """Returns the sinks f32 of query heads `first` + heads, where heads i32[..] are below `count`. Those of -inf become
    LOWEST, which weighs nothing beside a key."""
    sinks = jnp.zeros((), jnp.float32)
    for i in range(count):
        one = jnp.maximum(sinks_ref[first + i].astype(jnp.float32) * LOG2_E, LOWEST)
        sinks = jnp.where(heads == i, one, sinks)
    return sinks
