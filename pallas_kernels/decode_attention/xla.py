"""decode_attention in plain jnp: a tile of Q query rows a sequence."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.segments import Segments, depths
from pallas_kernels.tiled_attention import Trees, attend


@partial(jax.jit, static_argnames=("scale", "window"))
def decode_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    segments: Segments | None = None,
) -> jax.Array:
    """q [R Q, H, D], page_table i32[R, M], lengths i32[R] -> [R Q, H, D]; see api.py."""
    if q.shape[0] == 0:
        return q
    R = lengths.shape[0]
    Q = q.shape[0] // R
    if segments is None:
        segments = Segments(jnp.where(lengths > 0, Q, 0))
    tiles, own_row = q.reshape(R, Q, *q.shape[1:]), Q * jnp.arange(R, dtype=jnp.int32)
    if Q == 1 and segments.ancestors is None:
        out = attend(tiles, pages, page_table, lengths[:, None] - 1, scale, window, own_row=own_row)
        return out.reshape(q.shape).astype(q.dtype)
    row, start = jnp.arange(Q, dtype=jnp.int32)[None, :], lengths - segments.rows
    trees, depth = None, row
    if segments.ancestors is not None:
        depth = depths(segments.ancestors)
        trees = Trees(start, segments.ancestors, depth)
    positions = jnp.where(row < segments.rows[:, None], start[:, None] + depth, -1)
    out = attend(tiles, pages, page_table, positions, scale, window, trees, own_row)
    return out.reshape(q.shape).astype(q.dtype)
