"""Runs row_matmul in plain jnp: few rows each read their own matrix, and many are sorted into tiles of one matrix."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.one_order import in_tiles

FEW = 64  # rows that each read their own matrix
TALL = (16, 32, 64, 128)  # rows of a tile, if there are more


class Operands(NamedTuple):
    """Holds what rows meet."""

    w: jax.Array  # [L, X, N, K]
    scale: jax.Array | None  # [L, X, P]
    layer: jax.Array  # i32[]
    parts: tuple[int, ...]  # numbers of w's rows that multiply each of the P parts


class Rows(NamedTuple):
    """Holds M rows."""

    x: jax.Array  # [M, P, K]
    group: jax.Array  # i32[M]
    residual: jax.Array | None  # [M, N]


@partial(jax.jit, static_argnames=("parts", "out_dtype", "runs"))
def row_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    layer: jax.Array,
    group: jax.Array,
    residual: jax.Array | None,
    parts: tuple[int, ...],
    out_dtype: DTypeLike,
    runs: int | None = None,
) -> jax.Array:
    """Returns [M, N] of x [M, P, K]; see api.py."""
    run = _gathered if x.shape[0] <= FEW else _sorted
    return run(Rows(x, group, residual), Operands(w, scale, layer, parts), out_dtype)


@partial(jax.jit, static_argnames=("parts", "out_dtype", "runs"))
def in_one_order(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    layer: jax.Array,
    group: jax.Array,
    residual: jax.Array | None,
    parts: tuple[int, ...],
    out_dtype: DTypeLike,
    runs: int | None = None,
) -> jax.Array:
    """Returns row_matmul, computed in tiles of one number of rows."""
    of = Operands(w, scale, layer, parts)
    return in_tiles(lambda rows: _gathered(rows, of, out_dtype), Rows(x, group, residual))


def _gathered(rows: Rows, of: Operands, out_dtype: DTypeLike) -> jax.Array:
    """Multiplies each row by its own matrix. A GPU reads the matrix where it sums, without a copy."""
    wide = compute_dtype(rows.x.dtype)
    own = of.w.at[of.layer, jnp.where(_valid(rows, of), rows.group, 0)].get(mode="clip")
    each = rows.x if len(of.parts) == 1 else jnp.take(rows.x, _part(of), axis=1)
    return _added(jnp.sum(each.astype(wide) * own.astype(wide), axis=2), rows, of, out_dtype)


def _sorted(rows: Rows, of: Operands, out_dtype: DTypeLike) -> jax.Array:
    """Multiplies tiles of rows that share a matrix. Products have w's dtype, and are gathered where they are added."""
    row, own, place = _tiles(jnp.where(_valid(rows, of), rows.group, of.w.shape[1]), of.w.shape[1])
    x = rows.x.at[row].get(mode="fill", fill_value=0).astype(of.w.dtype)
    w = of.w.at[of.layer, own].get(mode="clip")
    products, start, batched = [], 0, (((2,), (2,)), ((0,), (0,)))
    for part, size in enumerate(of.parts):
        one = lax.dot_general(
            x[:, :, part],
            w[:, start : start + size],
            batched,
            precision="highest",
            preferred_element_type=of.w.dtype,
        )
        products.append(one.reshape(-1, size).at[place].get(mode="fill", fill_value=0))
        start += size
    return _added(jnp.concatenate(products, axis=1).astype(compute_dtype(rows.x.dtype)), rows, of, out_dtype)


def _tiles(key: jax.Array, X: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts M rows by their keys i32[M] below X, and cuts each key's into tiles. Returns the row i32[G, tall] at each
    place, M where there is none, the key i32[G] of each tile, and the place i32[M] of each row."""
    M = key.shape[0]
    tall = next(
        (tall for tall in TALL if tall * min(X, M) >= M), TALL[-1]
    )  # every key may have a tile that is not full
    sizes = jnp.zeros(X, jnp.int32).at[key].add(1, mode="drop")
    ends, starts = jnp.cumsum(-(-sizes // tall), dtype=jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    firsts = ends + -sizes // tall
    tile = jnp.arange((M + (tall - 1) * min(X, M)) // tall, dtype=jnp.int32)
    own = jnp.minimum(jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32), X - 1)
    within = (tile - firsts[own])[:, None] * tall + jnp.arange(tall, dtype=jnp.int32)[None, :]
    inside = (tile < ends[-1])[:, None] & (within < sizes[own][:, None])
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    row = order.at[jnp.where(inside, starts[own][:, None] + within, M)].get(mode="fill", fill_value=M)
    rank = jnp.zeros(M, jnp.int32).at[order].set(jnp.arange(M, dtype=jnp.int32))
    known = jnp.minimum(key, X - 1)
    return row, own, jnp.where(key < X, firsts[known] * tall + rank - starts[known], tile.size * tall)


def _valid(rows: Rows, of: Operands) -> jax.Array:
    return (rows.group >= 0) & (rows.group < of.w.shape[1])


def _part(of: Operands) -> np.ndarray:
    """Returns the part i[N] that each of w's rows multiplies."""
    return np.repeat(np.arange(len(of.parts)), of.parts)


def _added(sums: jax.Array, rows: Rows, of: Operands, out_dtype: DTypeLike) -> jax.Array:
    """Returns sums [M, N] scaled, with the residual, in out_dtype. Rows of no group have the residual alone."""
    if of.scale is not None:
        scale = of.scale.at[of.layer, jnp.where(_valid(rows, of), rows.group, 0)].get(mode="clip").astype(sums.dtype)
        sums = sums * (scale if len(of.parts) == 1 else jnp.take(scale, _part(of), axis=1))
    sums = jnp.where(_valid(rows, of)[:, None], sums, jnp.zeros((), sums.dtype))
    return (sums if rows.residual is None else rows.residual.astype(sums.dtype) + sums).astype(out_dtype)
