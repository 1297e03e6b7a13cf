"""Copies pages in decode_attention's copying warps: they fill a ring of tiles, on and on across work items."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import ROWS
from pallas_kernels.decode_attention.lanes_sm90 import arrive_with_copies, copy_rows
from pallas_kernels.decode_attention.shape_sm90 import Item, Shape, first_query, kv_head_of, tile_range
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.hopper.ring_sm90 import drain, free_slot

Parts = list[tuple[int, str]]
WARPS = 4


def parts_by_warp(shape: Shape, names: tuple[str, ...]) -> list[Parts]:
    """Returns which copies of a tile each warp issues: (part of the tile, its source). One warp alone couldn't keep up.
    The second warpgroup's parts are counted on from the first's. By TMA a warp has consecutive pages of K or of V:
    those of a warpgroup, or half of them. By lanes it has all of a page, so that few numbers of pages are read."""
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
    first_row: jax.Array,
    sources: dict[str, Any],
    query_rows: range,
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
    """Copies one warp's share of an item as room gets free: its queries (these rows of a segment), keys and values. The
    layer's pages begin at first_row of the pools. state: how many tiles and queries came before."""
    tiles, heads = state
    kv_heads = [kv_head_of(shape, item.head + w) for w in range(shape.config.computing)]
    if query_rows:
        pl.when(item.enters)(lambda: _copy_queries(shape, q_ref, query_rows, item, heads, q_raw, q_full, q_free))
        heads = heads + item.enters.astype(jnp.int32)
    pages_read = page_of(shape, item.low), page_of(shape, item.high - 1)
    first_tile, end_tile = tile_range(item)
    copies = Copies(shape, sources, targets, full, parts, kv_heads, item, *pages_read, first_row)

    def copy_tile(j: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        coming = copies.entries(table_ref, j + 1)  # read ahead: it takes as long as a copy
        slot = free_slot(tiles + j - first_tile, free)
        if shape.by_lanes:
            copies.by_lanes(j, slot, pages)
        else:
            copies.one_by_one(j, slot, pages)
        return coming

    lax.fori_loop(first_tile, end_tile, copy_tile, copies.entries(table_ref, first_tile))
    return tiles + end_tile - first_tile, heads


def drain_item_rings(tiles: jax.Array, heads: jax.Array, q_free: Any, free: Any) -> None:
    """Waits until all copies of a warp have been used."""
    drain(heads, q_free)
    drain(tiles, free)


def _copy_queries(
    shape: Shape, q_ref: Any, rows: range, item: Item, heads: jax.Array, q_raw: Any, q_full: Any, q_free: Any
) -> None:
    slot = free_slot(heads, q_free)
    for w in range(shape.config.computing):
        first = first_query(shape, item.row, item.head + w)
        for i in rows:
            queries = pl.ds(first + i * shape.num_heads if i else first, shape.heads)
            target = q_raw.at[slot, w, pl.ds(i * shape.heads, shape.heads)]
            plgpu.copy_gmem_to_smem(q_ref.at[queries], target, q_full.at[slot])


def page_of(shape: Shape, token: jax.Array) -> jax.Array:
    return lax.div(token, jnp.int32(shape.page_size))  # `//` minds signs


@dataclass(frozen=True)
class Copies:
    """Issues one warp's copies of an item's keys and values. Part i of a tile is the i % each-th of warpgroup i //
    each."""

    shape: Shape
    sources: dict[str, Any]
    targets: dict[str, Any]
    full: Any
    parts: Parts
    kv_heads: list[jax.Array]
    item: Item
    first_page: jax.Array  # entries of the page table that the item reads
    last_page: jax.Array
    first_row: jax.Array  # of the pools, where the layer's pages begin

    @property
    def numbers(self) -> list[int]:
        """Lists the parts of a warpgroup's tile that this warp copies, each of a page."""
        return sorted({i % self.shape.k.parts for i, _ in self.parts})

    def stored(self, name: str) -> Storage:
        return self.shape.k if name.startswith("k") else self.shape.v

    def entries(self, table_ref: Any, j: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the pools' rows of the pages of tile j that this warp copies; where there is none to read, another
        one."""
        wanted = (page_of(self.shape, j * ROWS + i * self.shape.k.tokens) for i in self.numbers)
        pages = [table_ref[self.item.row, jnp.clip(page, self.first_page, self.last_page)] for page in wanted]
        return tuple(self.first_row + jnp.clip(page, 0, self.shape.num_pages - 1) for page in pages)

    def place(self, j: jax.Array, part: int) -> tuple[jax.Array, Any]:
        """Returns whether a part of tile j has tokens to read, and where in its page they begin."""
        size, page_size = self.shape.k.tokens, self.shape.page_size
        token = j * ROWS + part * size
        first, last = page_of(self.shape, token) >= self.first_page, page_of(self.shape, token) <= self.last_page
        there = jnp.logical_and(first, last)
        return there, lax.rem(token, jnp.int32(page_size)) if page_size > size else jnp.int32(0)

    def by_lanes(self, j: jax.Array, slot: jax.Array, pages: tuple[jax.Array, ...]) -> None:
        """Copies 16 bytes at a time with each lane."""
        shape, size, each = self.shape, self.shape.k.tokens, self.shape.k.parts
        for part, page in zip(self.numbers, pages, strict=True):
            there, offset = self.place(j, part)

            @pl.when(there)
            def _copy(part: int = part, page: jax.Array = page, offset: jax.Array = offset) -> None:
                for i, name in ((i, name) for i, name in self.parts if i % each == part):
                    bytes_ = self.stored(name).token_bytes(name)
                    token = self.kv_heads[i // each] * shape.page_size + offset
                    copy_rows(
                        self.sources[name], self.targets[name], page, token * bytes_,
                        (slot * (ROWS * shape.config.computing) + i * size) * bytes_,
                        page_bytes=shape.kv_heads * shape.page_size * bytes_, size=size * bytes_,
                        row=bytes_ if name in ("k", "v") else None,
                    )  # fmt: skip

        arrive_with_copies(self.full.at[slot])

    def one_by_one(self, j: jax.Array, slot: jax.Array, pages: tuple[jax.Array, ...]) -> None:
        """Copies each part by TMA."""
        for i, name in self.parts:
            part = i % self.shape.k.parts
            there, offset = self.place(j, part)
            page = pages[self.numbers.index(part)]

            @pl.when(there)
            def _copy(i: int = i, name: str = name, page: jax.Array = page, offset: Any = offset) -> None:
                self._copy_part(i, name, page, slot, offset)

            @pl.when(jnp.logical_not(there))
            def _skip() -> None:  # what the tile holds there is masked
                plgpu.barrier_arrive(self.full.at[slot])

    def _copy_part(self, i: int, name: str, page: jax.Array, slot: jax.Array, offset: Any) -> None:
        stored, (warpgroup, part) = self.stored(name), divmod(i, self.shape.k.parts)
        source: Any
        target: Any
        if name in ("k", "v"):
            source, target = stored.value_slice(self.kv_heads[warpgroup], offset), stored.value_part(part)
        else:
            source, target = stored.scale_slice(self.kv_heads[warpgroup], offset)[0], part
            page = page - self.first_row if stored.padded else page
        into = self.targets[name].at[slot, warpgroup, target]
        plgpu.copy_gmem_to_smem(self.sources[name].at[page, source], into, self.full.at[slot])
