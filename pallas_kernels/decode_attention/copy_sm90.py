"""The warps of decode_attention that copy: they fill a ring of tiles, on and on across work items."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import ROWS, WARPS
from pallas_kernels.decode_attention.lanes_sm90 import arrive_with_copies, copy_rows
from pallas_kernels.decode_attention.shape_sm90 import Item, Shape, first_query, kv_head_of, tile_range
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.ring_sm90 import drain, free_slot

Parts = list[tuple[int, str]]


def parts_by_warp(shape: Shape, names: tuple[str, ...]) -> list[Parts]:
    """Which copies of a tile each warp issues: (part of the tile, its source). One warp alone couldn't keep up. A
    head's parts are counted on from those of the head before.

    By TMA a warp has consecutive pages of K or of V: those of a warpgroup, or half of them. By lanes it has all of
    some heads."""
    count = shape.k.parts * shape.heads_of_item
    every = [(i, name) for i in range(count) for name in names]
    if shape.by_lanes and count >= WARPS:
        return [[part for part in every if part[0] // shape.k.parts % WARPS == w] for w in range(WARPS)]
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
    """One warp's share of an item's copies, of its queries (these rows of a segment) and of keys and values, as room
    gets free.

    state: how many tiles and queries came before.
    """
    tiles, heads = state
    heads_of_work = [item.head + i for i in range(shape.heads_of_item)]
    pages_read = page_of(shape, item.low), page_of(shape, item.high - 1)
    first_tile, end_tile = tile_range(shape, item)
    copies = Copies(shape, sources, targets, full, parts, heads_of_work, item, *pages_read)
    first_pages = copies.entries(table_ref, first_tile)
    if query_rows:  # meanwhile
        pl.when(item.enters)(lambda: _copy_queries(shape, q_ref, query_rows, item, heads, q_raw, q_full, q_free))
        heads = heads + item.enters.astype(jnp.int32)

    def copy_tile(j: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        coming = copies.entries(table_ref, j + 1)  # read ahead: it takes as long as a copy
        slot = free_slot(tiles + j - first_tile, free)
        if shape.by_lanes:
            copies.by_lanes(j, slot, pages)
        else:
            copies.one_by_one(j, slot, pages)
        return coming

    lax.fori_loop(first_tile, end_tile, copy_tile, first_pages)
    return tiles + end_tile - first_tile, heads


def drain_item_rings(tiles: jax.Array, heads: jax.Array, q_free: Any, free: Any) -> None:
    """Waits until all copies of a warp have been used."""
    drain(heads, q_free)
    drain(tiles, free)


def _copy_queries(
    shape: Shape, q_ref: Any, rows: range, item: Item, heads: jax.Array, q_raw: Any, q_full: Any, q_free: Any
) -> None:
    slot = free_slot(heads, q_free)
    if shape.queries_at_once:
        for w in range(shape.config.computing):
            first = first_query(shape, item.row, item.head + w * shape.of_warpgroup)
            queries = q_ref.at[pl.ds(first, shape.of_warpgroup * shape.heads)]
            plgpu.copy_gmem_to_smem(queries, q_raw.at[slot, w], q_full.at[slot])
        return
    for n in range(shape.heads_of_item):
        head, (w, of_warpgroup) = item.head + n, divmod(n, shape.of_warpgroup)
        if shape.some_missing:
            head = jnp.minimum(head, shape.every_head - 1)
        first = first_query(shape, item.row, head)
        for i in rows:
            queries = pl.ds(first + i * shape.num_heads if i else first, shape.heads)
            target = q_raw.at[slot, w, pl.ds(of_warpgroup * shape.query_rows + i * shape.heads, shape.heads)]
            plgpu.copy_gmem_to_smem(q_ref.at[queries], target, q_full.at[slot])


def page_of(shape: Shape, token: jax.Array) -> jax.Array:
    return lax.div(token, jnp.int32(shape.page_size))  # `//` minds signs


@dataclass(frozen=True)
class Copies:
    """One warp's copies of an item's keys and values. Part i of a tile is the i % each-th of head i // each."""

    shape: Shape
    sources: dict[str, Any]
    targets: dict[str, Any]
    full: Any
    parts: Parts
    heads: list[jax.Array]  # of work
    item: Item
    first_page: jax.Array  # entries of the page table that the item reads
    last_page: jax.Array

    @property
    def numbers(self) -> list[int]:
        """The parts of a head's tile that this warp copies, each of a page."""
        return sorted({i % self.shape.k.parts for i, _ in self.parts})

    def stored(self, name: str) -> Storage:
        return self.shape.k if name.startswith("k") else self.shape.v

    def entries(self, table_ref: Any, j: jax.Array) -> tuple[jax.Array, ...]:
        """The pages of tile j that this warp copies; where there is none to read, another one."""
        wanted = (page_of(self.shape, j * self.shape.tile + i * self.shape.k.tokens) for i in self.numbers)
        return tuple(table_ref[self.item.row, jnp.clip(page, self.first_page, self.last_page)] for page in wanted)

    def place(self, j: jax.Array, part: int) -> tuple[jax.Array, Any]:
        """Whether a part of tile j has tokens to read, and where in its page they begin."""
        size, page_size = self.shape.k.tokens, self.shape.page_size
        token = j * self.shape.tile + part * size
        first, last = page_of(self.shape, token) >= self.first_page, page_of(self.shape, token) <= self.last_page
        there = jnp.logical_and(first, last)
        return there, lax.rem(token, jnp.int32(page_size)) if page_size > size else jnp.int32(0)

    def by_lanes(self, j: jax.Array, slot: jax.Array, pages: tuple[jax.Array, ...]) -> None:
        """Each lane copies 16 bytes at a time."""
        each = self.shape.k.parts
        for part, page in zip(self.numbers, pages, strict=True):
            there, offset = self.place(j, part)

            @pl.when(there)
            def _copy(part: int = part, page: jax.Array = page, offset: jax.Array = offset) -> None:
                for i in sorted({i for i, _ in self.parts if i % each == part}):
                    self._copy_by_lanes(i, page, offset, slot)

        arrive_with_copies(self.full.at[slot])

    def _copy_by_lanes(self, i: int, page: jax.Array, offset: Any, slot: jax.Array) -> None:
        """Part i's, of a head that there is."""
        shape, size, head = self.shape, self.shape.k.tokens, self.heads[i // self.shape.k.parts]

        def copy() -> None:
            token = kv_head_of(shape, head) * shape.page_size + offset
            for name in (name for part, name in self.parts if part == i):
                bytes_ = self.stored(name).token_bytes(name)
                copy_rows(
                    self.sources[name], self.targets[name], page, token * bytes_,
                    (slot * (ROWS * shape.config.computing) + i * size) * bytes_,
                    page_bytes=shape.kv_heads * shape.page_size * bytes_, size=size * bytes_,
                    row=bytes_ if name in ("k", "v") else None,
                )  # fmt: skip

        if shape.some_missing:
            pl.when(head < shape.every_head)(copy)
        else:
            copy()

    def one_by_one(self, j: jax.Array, slot: jax.Array, pages: tuple[jax.Array, ...]) -> None:
        """Each part by TMA."""
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
        kv_head = kv_head_of(self.shape, self.heads[warpgroup])
        source: Any
        target: Any
        if name in ("k", "v"):
            source, target = stored.value_slice(kv_head, offset), stored.value_part(part)
        else:
            source, target = stored.scale_slice(kv_head, offset)[0], part
        into = self.targets[name].at[slot, warpgroup, target]
        plgpu.copy_gmem_to_smem(self.sources[name].at[page, source], into, self.full.at[slot])
