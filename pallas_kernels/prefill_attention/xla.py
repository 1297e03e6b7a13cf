"""Runs prefill_attention in plain jnp: each chunk is cut into tiles of query rows."""

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.one_order import Run, plainly
from pallas_kernels.tiled_attention import attend

MAX_TILE = 32  # query rows


@partial(jax.jit, static_argnames=("scale", "window", "tile", "apart", "softcap"))
def prefill_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    scale: float,
    window: int | None,
    tile: int | None = None,
    apart: Run = plainly,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns [C, H, D] of q [C, H, D], page_table i32[B, M], cu_q_lens i32[B + 1] and kv_lens i32[B]; see api.py.
    `tile`: rows of a tile, by default no more than there are. `apart` runs what is each tile's own."""
    num_rows, num_heads, head_dim = q.shape
    num_chunks = page_table.shape[0]
    if num_rows == 0 or num_chunks == 0:
        return jnp.zeros_like(q)
    tile = min(MAX_TILE, num_rows) if tile is None else tile
    num_tiles = -(-num_rows // tile) + num_chunks

    # Tile w is the i-th of chunk b; tile_ends[b] counts the tiles of chunks 0..b.
    begin, end = cu_q_lens[:-1], cu_q_lens[1:]
    tile_counts = (end - begin + tile - 1) // tile
    tile_ends = jnp.cumsum(tile_counts, dtype=jnp.int32)
    tile_begins = tile_ends - tile_counts

    def owner(ends: jax.Array, at: jax.Array) -> jax.Array:  # empty chunks own nothing
        found = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
        return jnp.minimum(found, num_chunks - 1)

    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    chunk = owner(tile_ends, tiles)
    rows = begin[chunk] + (tiles - tile_begins[chunk]) * tile
    rows = rows[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]  # [W, tile]
    used = rows < end[chunk][:, None]
    positions = jnp.where(used, rows - end[chunk][:, None] + kv_lens[chunk][:, None], -1)
    first = 0 if pages.tail is None or pages.tail.rows is None else pages.tail.rows[0].shape[0] - num_rows
    own = first + rows[:, 0]  # among all rows of the step, of which the chunks' are the last

    def attention(q: jax.Array, table: jax.Array, positions: jax.Array, own: jax.Array) -> jax.Array:
        return attend(q, pages, table, positions, scale, window, own_row=own, softcap=softcap, sinks=sinks)

    out = apart(attention, q.at[rows].get(mode="clip"), page_table[chunk], positions, own)

    row = jnp.arange(num_rows, dtype=jnp.int32)
    chunk = owner(end, row)
    slot = tile_begins[chunk] * tile + row - begin[chunk]
    out = out.reshape(num_tiles * tile, num_heads, head_dim).at[slot].get(mode="clip")
    return jnp.where((row < cu_q_lens[-1])[:, None, None], out, 0).astype(q.dtype)
