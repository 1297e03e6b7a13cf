"""The warps of decode_attention that copy: they fill a ring of tiles, on and on across work items."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.shape_sm90 import Item, Shape, first_query, tile_range

Parts = list[tuple[int, str]]


def parts_by_warp(shape: Shape, names: tuple[str, ...]) -> list[Parts]:
    """Which copies of a tile each warp issues: (part of the tile, its source). One warp alone couldn't keep up."""
    parts = [(i, name) for i in range(shape.k.parts) for name in names]
    if shape.k.parts < 4:
        return [parts[w::4] for w in range(4) if parts[w::4]]
    return [[part for part in parts if part[0] % 4 == w] for w in range(4)]


def copy_item(
    shape: Shape,
    q_ref: Any,
    table_ref: Any,
    sources: dict[str, Any],
    with_queries: bool,
    parts: Parts,
    count: jax.Array,
    item: Item,
    tiles: jax.Array,
    *,
    q_raw: Any,
    q_full: Any,
    q_free: Any,
    full: Any,
    free: Any,
    **targets: Any,
) -> jax.Array:
    """One warp's share of an item's copies, of its queries and of keys and values, as room gets free."""
    tile, stages, page_size = shape.config.tile, shape.stages, shape.page_size
    kv_head = item.head if shape.chunks == 1 else item.head // shape.chunks
    if with_queries:
        q_slot = lax.rem(count, jnp.int32(2))

        @pl.when(count >= 2)
        def _wait() -> None:
            plgpu.barrier_wait(q_free.at[q_slot])

        queries = pl.ds(first_query(shape, item), shape.queries)
        plgpu.copy_gmem_to_smem(q_ref.at[queries], q_raw.at[q_slot, pl.ds(0, shape.queries)], q_full.at[q_slot])
    first_page, last_page = item.low // page_size, (item.high - 1) // page_size
    first_tile, end_tile = tile_range(shape, item)
    numbers = sorted({i for i, _ in parts})

    def entries(j: jax.Array) -> tuple[jax.Array, ...]:
        """The pages of tile j that this warp copies; where there is none to read, another one."""
        begin = j * tile // page_size
        return tuple(table_ref[item.row, jnp.clip(begin + i, first_page, last_page)] for i in numbers)

    def copy_tile(j: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        coming = entries(j + 1)  # read ahead: it takes as long as a copy
        number = tiles + j - first_tile
        slot = lax.rem(number, jnp.int32(stages))

        @pl.when(number >= stages)
        def _wait() -> None:
            plgpu.barrier_wait(free.at[slot])

        begin = j * tile // page_size
        offset = lax.rem(j * tile, jnp.int32(page_size)) if page_size > tile else 0
        for i, name in parts:
            there = jnp.logical_and(begin + i >= first_page, begin + i <= last_page)
            page = pages[numbers.index(i)]

            @pl.when(there)
            def _copy(i: int = i, name: str = name, page: jax.Array = page) -> None:
                stored, size = shape.k if name.startswith("k") else shape.v, shape.k.tokens
                source: Any
                target: Any
                if name in ("k", "v"):
                    source, target = (page, kv_head, pl.ds(offset, size)), (slot, pl.ds(i * size, size))
                else:
                    scales, _ = stored.scale_slice(kv_head, offset)
                    source, target = (page, scales), (slot, stored.scale_part(i))
                plgpu.copy_gmem_to_smem(sources[name].at[source], targets[name].at[target], full.at[slot])

            @pl.when(jnp.logical_not(there))
            def _skip() -> None:  # what the tile holds there is masked
                plgpu.barrier_arrive(full.at[slot])

        return coming

    lax.fori_loop(first_tile, end_tile, copy_tile, entries(first_tile))
    return tiles + end_tile - first_tile


def drain(shape: Shape, items: jax.Array, tiles: jax.Array, with_queries: bool, q_free: Any, free: Any) -> None:
    """Waits until all copies have been used: no barrier is left in the middle of a phase."""
    if with_queries:

        @pl.loop(jnp.maximum(items - 2, 0), items)
        def _queries(i: jax.Array) -> None:
            plgpu.barrier_wait(q_free.at[lax.rem(i, jnp.int32(2))])

    @pl.loop(jnp.maximum(tiles - shape.stages, 0), tiles)
    def _tiles(i: jax.Array) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(shape.stages))])
