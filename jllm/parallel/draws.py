"""Draws where each device of a mesh has the logits of a part of the vocabulary: devices exchange parts, so that each
has whole rows of its own, draws there as one device does, and tells the others the tokens.

A row is moved once in place of (ranks - 1) times, and drawn once. But that is two exchanges, and few rows are sooner
gathered whole on every device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jllm.config import LlamaConfig

# Bytes of all logits, from which on it pays: counted for 18 us an exchange by XLA and 350 GB/s (experiments/LOG.md).
LEAST = 32 << 20


def draws_apart(config: LlamaConfig, rows: int) -> bool:
    """Whether rows of logits are left in parts. config: of one device's share."""
    return config.axis is not None and rows * config.vocab_size * 4 >= LEAST


def draw_apart(draw: Callable[..., Any], config: LlamaConfig) -> Callable[..., Any]:
    """`draw` (logits [R, V], Sampling, token indices i32[R] -> i32[R] tokens, bool[R] which rows are finite) of logits
    [R, V / ranks], of which each device has a part."""
    assert config.axis is not None
    axis = config.axis.name

    def drawn(logits: jax.Array, sampling: Any, index: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        ranks, R = lax.axis_size(axis), logits.shape[0]
        each = -(-R // ranks)

        def own(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, each * ranks - R), *((0, 0),) * (x.ndim - 1)))
            return lax.dynamic_slice_in_dim(padded, lax.axis_index(axis) * each, each)

        padded = jnp.pad(logits, ((0, each * ranks - R), (0, 0)))
        whole = lax.all_to_all(padded, axis, split_axis=0, concat_axis=1, tiled=True)[:, : config.vocab_size]
        tokens, finite = draw(whole, jax.tree.map(own, sampling), own(index), **options)
        told = lax.all_gather(2 * tokens + finite.astype(tokens.dtype), axis, tiled=True)[:R]
        return told // 2, told % 2 == 1

    return drawn
