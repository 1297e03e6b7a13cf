"""The warps of decode_attention that copy: they fill a ring of tiles, on and on across work items."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import ROWS
from pallas_kernels.decode_attention.lanes_sm90 import arrive_with_copies, copy_rows
from pallas_kernels.decode_attention.shape_sm90 import Item, Shape, first_query, kv_head_of, tile_range

Parts = list[tuple[int, str]]
WARPS = 4


def parts_by_warp(shape: Shape, names: tuple[str, ...]) -> list[Parts]:
    """Which copies of a tile each warp issues: (part of the tile, its source). One warp alone couldn't keep up. The
    second warpgroup's parts are counted on from the first's.

    By TMA a warp has consecutive pages of K or of V: those of a warpgroup, or half of them. By lanes it has all of a
    page, so that few numbers of pages are read."""
    count = shape.k.parts * shape.config.computing
    every = [(i, name) for i in range(count) for name in names]
    if shape.by_lanes and count >= WARPS:
        return [[part for part in every if part[0] % WARPS == w] for w in range(WARPS)]
    if shape.by_lanes or shape.k.parts == 1:
        return [every[w::WARPS] for w in range(WARPS) if every[w::WARPS]]
    starts = range(0, count, count // 2)
    return [
        [(i, name) for name in names if name[0] == of for i in range(start, start + count // 2)]
        for of in ("k", "v")
        for start in starts
    ]


def copy_item(
    shape: Shape,
    q_ref: Any,
    table_ref: Any,
    sources: dict[str, Any],
    with_queries: bool,
    parts: Parts,
    item: Item,
    state: tuple[jax.Array, jax.Array],
    *,
    q_raw: Any,
    q_full: Any,
    q_free: Any,
    full: Any,
    free: Any,
    **targets: Any,
) -> tuple[jax.Array, jax.Array]:
    """One warp's share of an item's copies, of its queries and of keys and values, as room gets free.

    state: how many tiles and queries came before.
    """
    tiles, heads = state
    stages, page_size, size, each = full.shape[0], shape.page_size, shape.k.tokens, shape.k.parts

    def page_of(token: jax.Array) -> jax.Array:
        return lax.div(token, jnp.int32(page_size))  # `//` minds signs

    kv_heads = [kv_head_of(shape, item.head + w) for w in range(shape.config.computing)]
    if with_queries:

        @pl.when(item.enters)
        def _queries() -> None:
            q_slot = lax.rem(heads, jnp.int32(2))

            @pl.when(heads >= 2)
            def _wait() -> None:
                plgpu.barrier_wait(q_free.at[q_slot])

            for w in range(shape.config.computing):
                queries = pl.ds(first_query(shape, item.row, item.head + w), shape.queries)
                target = q_raw.at[q_slot, w, pl.ds(0, shape.queries)]
                plgpu.copy_gmem_to_smem(q_ref.at[queries], target, q_full.at[q_slot])

        heads = heads + item.enters.astype(jnp.int32)
    first_page, last_page = page_of(item.low), page_of(item.high - 1)
    first_tile, end_tile = tile_range(item)
    numbers = sorted({i % each for i, _ in parts})

    def entries(j: jax.Array) -> tuple[jax.Array, ...]:
        """The pages of tile j that this warp copies; where there is none to read, another one."""
        wanted = (page_of(j * ROWS + i * size) for i in numbers)
        return tuple(table_ref[item.row, jnp.clip(page, first_page, last_page)] for page in wanted)

    def copy_tile(j: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        coming = entries(j + 1)  # read ahead: it takes as long as a copy
        number = tiles + j - first_tile
        slot = lax.rem(number, jnp.int32(stages))

        @pl.when(number >= stages)
        def _wait() -> None:
            plgpu.barrier_wait(free.at[slot])

        def copy(name: str, page: Any, i: int, offset: Any) -> None:
            """Part i."""
            stored = shape.k if name.startswith("k") else shape.v
            warpgroup, part = divmod(i, each)
            source: Any
            target: Any
            if name in ("k", "v"):
                source, target = stored.value_slice(kv_heads[warpgroup], offset), stored.value_part(part)
            else:
                source, target = stored.scale_slice(kv_heads[warpgroup], offset)[0], part
            into = targets[name].at[slot, warpgroup, target]
            plgpu.copy_gmem_to_smem(sources[name].at[page, source], into, full.at[slot])

        def place(part: int) -> tuple[jax.Array, Any]:
            """Whether a part has tokens to read, and where in its page they begin."""
            token = j * ROWS + part * size
            there = jnp.logical_and(page_of(token) >= first_page, page_of(token) <= last_page)
            return there, lax.rem(token, jnp.int32(page_size)) if page_size > size else jnp.int32(0)

        def by_lanes() -> None:
            for part in numbers:
                there, offset = place(part)

                @pl.when(there)
                def _copy(part: int = part, offset: jax.Array = offset) -> None:
                    for i, name in ((i, name) for i, name in parts if i % each == part):
                        stored = shape.k if name.startswith("k") else shape.v
                        bytes_ = stored.token_bytes(name)
                        token = kv_heads[i // each] * page_size + offset
                        copy_rows(
                            sources[name], targets[name], pages[numbers.index(part)], token * bytes_,
                            (slot * (ROWS * shape.config.computing) + i * size) * bytes_,
                            page_bytes=shape.kv_heads * page_size * bytes_, size=size * bytes_,
                            row=bytes_ if name in ("k", "v") else None,
                        )  # fmt: skip

        def one_by_one() -> None:
            for i, name in parts:
                there, offset = place(i % each)

                @pl.when(there)
                def _copy(i: int = i, name: str = name, offset: Any = offset) -> None:
                    copy(name, pages[numbers.index(i % each)], i, offset)

                @pl.when(jnp.logical_not(there))
                def _skip() -> None:  # what the tile holds there is masked
                    plgpu.barrier_arrive(full.at[slot])

        if shape.by_lanes:
            by_lanes()
            arrive_with_copies(full.at[slot])
        else:
            one_by_one()
        return coming

    lax.fori_loop(first_tile, end_tile, copy_tile, entries(first_tile))
    return tiles + end_tile - first_tile, heads


def drain(shape: Shape, tiles: jax.Array, heads: jax.Array, q_free: Any, free: Any) -> None:
    """Waits until all copies of a warp have been used: no barrier is left in the middle of a phase."""
    stages = free.shape[0]

    @pl.loop(jnp.maximum(heads - 2, 0), heads)
    def _queries(i: jax.Array) -> None:
        plgpu.barrier_wait(q_free.at[lax.rem(i, jnp.int32(2))])

    @pl.loop(jnp.maximum(tiles - stages, 0), tiles)
    def _tiles(i: jax.Array) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])
