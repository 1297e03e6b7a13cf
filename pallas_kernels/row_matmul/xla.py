"""Runs row_matmul in plain jnp: few rows each read their own matrix, and many are sorted into tiles of one matrix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.one_order import in_tiles

FEW = 64  # rows that each read their own matrix
TALL = 64  # rows of a tile, if there are more


@partial(jax.jit, static_argnames=("parts", "out_dtype"))
def row_matmul(
    x: jax.Array, w: jax.Array, layer: jax.Array, group: jax.Array, parts: tuple[int, ...], out_dtype: DTypeLike
) -> jax.Array:
    """Returns [M, N] of x [M, P, K], w [L, X, N, K], layer i32[] and group i32[M]; see api.py."""
    run = _gathered if x.shape[0] <= FEW else _sorted
    return run(x, w, layer, group, parts).astype(out_dtype)


@partial(jax.jit, static_argnames=("parts", "out_dtype"))
def in_one_order(
    x: jax.Array, w: jax.Array, layer: jax.Array, group: jax.Array, parts: tuple[int, ...], out_dtype: DTypeLike
) -> jax.Array:
    """Returns row_matmul, computed in tiles of one number of rows."""
    return in_tiles(lambda x, group: _gathered(x, w, layer, group, parts).astype(out_dtype), x, group)


def _gathered(x: jax.Array, w: jax.Array, layer: jax.Array, group: jax.Array, parts: tuple[int, ...]) -> jax.Array:
    """Multiplies each row by its own matrix. A GPU reads the matrix where it sums, without a copy."""
    wide = compute_dtype(x.dtype)
    valid = (group >= 0) & (group < w.shape[1])
    own = w.at[layer, jnp.where(valid, group, 0)].get(mode="clip")
    each = x if len(parts) == 1 else jnp.take(x, np.repeat(np.arange(len(parts)), parts), axis=1)
    return jnp.where(valid[:, None], jnp.sum(each.astype(wide) * own.astype(wide), axis=2), jnp.zeros((), wide))


def _sorted(x: jax.Array, w: jax.Array, layer: jax.Array, group: jax.Array, parts: tuple[int, ...]) -> jax.Array:
    """Multiplies tiles of rows that share a matrix."""
    (M, _, _), X, wide = x.shape, w.shape[1], compute_dtype(x.dtype)
    key = jnp.where((group >= 0) & (group < X), group, X)
    sizes = jnp.zeros(X, jnp.int32).at[key].add(1, mode="drop")
    # Tiles in the order of groups: the last one of each may have fewer rows.
    ends, starts = jnp.cumsum(-(-sizes // TALL), dtype=jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    tile = jnp.arange((M + (TALL - 1) * min(X, M)) // TALL, dtype=jnp.int32)
    own = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), X - 1)
    first = (tile - (ends + -sizes // TALL)[own])[:, None] * TALL
    place = first + jnp.arange(TALL, dtype=jnp.int32)[None, :]
    inside = (tile < ends[-1])[:, None] & (place < sizes[own][:, None])
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    row = order.at[jnp.where(inside, starts[own][:, None] + place, M)].get(mode="fill", fill_value=M)
    rows, own = x.at[row].get(mode="fill", fill_value=0), w.at[layer, own].get(mode="clip")
    products, start, batched = [], 0, (((2,), (2,)), ((0,), (0,)))
    for part, size in enumerate(parts):
        one = rows[:, :, part], own[:, start : start + size].astype(x.dtype), batched
        products.append(lax.dot_general(*one, precision="highest", preferred_element_type=wide))
        start += size
    flat = jnp.concatenate(products, axis=2).reshape(-1, start)
    return jnp.zeros((M, start), wide).at[row.reshape(-1)].set(flat, mode="drop")
