"""Runs decode_attention in plain jnp: a tile of Q query rows a sequence."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.segments import Segments, depths, related
from pallas_kernels.one_order import TILE, in_tiles
from pallas_kernels.tiled_attention import Moved, Trees, attend


@partial(jax.jit, static_argnames=("scale", "window", "softcap"))
def decode_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    segments: Segments | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns [R Q, H, D] of q [R Q, H, D], page_table i32[R, M] and lengths i32[R]; see api.py."""
    if q.shape[0] == 0:
        return q
    R = lengths.shape[0]
    Q = q.shape[0] // R
    logits: dict[str, Any] = {"softcap": softcap, "sinks": sinks}
    if segments is None:
        segments = Segments(jnp.where(lengths > 0, Q, 0))
    tiles, own_row = q.reshape(R, Q, *q.shape[1:]), Q * jnp.arange(R, dtype=jnp.int32)
    if Q == 1 and segments.ancestors is None:
        out = attend(tiles, pages, page_table, lengths[:, None] - 1, scale, window, own_row=own_row, **logits)
        return out.reshape(q.shape).astype(q.dtype)
    row, start = jnp.arange(Q, dtype=jnp.int32)[None, :], lengths - segments.rows
    trees, depth = None, row
    if segments.ancestors is not None:
        depth = depths(segments.ancestors)
        trees = Trees(start, segments.ancestors, depth)
    positions = jnp.where(row < segments.rows[:, None], start[:, None] + depth, -1)
    out = attend(tiles, pages, page_table, positions, scale, window, trees, own_row, **logits)
    return out.reshape(q.shape).astype(q.dtype)


@partial(jax.jit, static_argnames=("scale", "window", "softcap"))
def in_one_order(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    segments: Segments | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes each row of a segment by itself: its bits are those of plain decoding, and of a prompt's row. In a tree
    a row reads its ancestors' keys in the order of their positions, as those of a chain lie."""
    if q.shape[0] == 0:
        return q
    R = lengths.shape[0]
    Q = q.shape[0] // R
    if segments is None:
        segments = Segments(jnp.where(lengths > 0, Q, 0))
    row, start = jnp.arange(Q, dtype=jnp.int32)[None, :], lengths - segments.rows
    depth, moved = row, None
    if segments.ancestors is not None:
        depth = depths(segments.ancestors)
        on_path = related(segments.ancestors)[:, :, None, :] & (depth[:, None, None, :] == row[:, None, :, None])
        nodes = jnp.sum(jnp.where(on_path, row[:, None, None, :], 0), axis=3, dtype=jnp.int32)  # [R, Q, depth]
        moved = Moved(jnp.repeat(start, Q), nodes.reshape(R * Q, Q))
    positions = jnp.where(row < segments.rows[:, None], start[:, None] + depth, -1).reshape(-1, 1)

    more = ((0, 0), (0, TILE - 1))  # unused rows: each tile is the program of a prompt's, which XLA rounds by its shape

    def tile(q: jax.Array, table: jax.Array, position: jax.Array, own: jax.Array, moved: Moved | None) -> jax.Array:
        queries, positions = jnp.pad(q[:, None], (*more, (0, 0), (0, 0))), jnp.pad(position, more, constant_values=-1)
        how: dict[str, Any] = {"moved": moved, "own_row": own, "softcap": softcap, "sinks": sinks}
        out = attend(queries, pages, table, positions, scale, window, **how)
        return out[:, 0].astype(q.dtype)

    own_row = Q * (jnp.arange(R * Q, dtype=jnp.int32) // Q)
    return in_tiles(tile, q, jnp.repeat(page_table, Q, axis=0), positions, own_row, moved, size=1)
