"""Feeds the computing warpgroups of the Hopper kernel of prefill_attention. One warpgroup issues all copies from global
memory, in the order in which they are consumed, and runs ahead across tiles. Pages of another format than the queries'
go through others, which convert them on their way to wgmma's operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.kv_formats import KVFormat
from pallas_kernels.hopper.ring_sm90 import drain
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS
from pallas_kernels.prefill_attention.convert_sm90 import SIDE, layout_of, load_converted
from pallas_kernels.prefill_attention.plan_sm90 import (
    BOX,
    Pack,
    Plan,
    Pool,
    Refs,
    Tile,
    for_each_tile,
    lowest_key,
    quotient,
)
from pallas_kernels.prefill_attention.work import CHUNK, KEYS, POSITION, ROW, ROWS


def fetch(plan: Plan, refs: Refs) -> None:
    """Copies the queries and KV blocks of every tile of this CTA."""
    config = plan.config

    def fetch_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.q_free))
        for w in range(config.warpgroups):
            row, head = tile.row + w // config.heads * config.queries, tile.head + w % config.heads * config.stack
            for i in range(config.stack):
                target = refs.q_raw.at[w, pl.ds(i * config.queries, config.queries)]
                plgpu.copy_gmem_to_smem(refs.q.at[pl.ds(row, config.queries), head + i], target, refs.q_ready)

        def fetch_block(j: jax.Array, numbers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following = _numbers(plan, refs, tile, j + 1)  # which takes as long to read as this block's copies to issue
            _fetch_block(plan, refs, tile, j, blocks + j - tile.first, numbers)
            return following

        lax.fori_loop(tile.first, tile.last, fetch_block, _numbers(plan, refs, tile, tile.first))

    tiles, blocks = for_each_tile(plan, refs, fetch_tile, partial(_fetch_pack, plan, refs))
    pl.when(tiles > 0)(lambda: plgpu.barrier_wait(refs.q_free))
    drain(blocks, *(pool.free if pool.raw is None else pool.raw_free for pool in (refs.k, refs.v)))


def _wait_until_free(plan: Plan, n: jax.Array, barrier: Any) -> None:
    pl.when(n >= plan.config.stages)(lambda: plgpu.barrier_wait(barrier.at[plan.slot(n)]))


def _seen(tile: Tile, begin: jax.Array, first: int, layout: Any) -> jax.Array:
    """Returns bool [SIDE, SIDE]: whether tokens from begin + first on, one a row, are seen by the tile's chunk."""
    token = begin + first + plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), 0, layout=layout)
    return (token >= tile.low) & (token < tile.keys)


def _at_boundary(plan: Plan, tile: Tile, j: jax.Array) -> jax.Array:
    """Returns whether KV block j has tokens that the tile's chunk does not see."""
    block = plan.config.block_kv
    return (j * block < tile.low) | ((j + 1) * block > tile.keys)


def _numbers(plan: Plan, refs: Refs, tile: Tile, j: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the page table's entries of KV block j. Those beyond the visible pages name no page, so the nearest
    visible one takes their place. All are read before any copy is issued, so that their latencies overlap."""
    block, chunk = plan.config.block_kv, jnp.minimum(tile.chunk, refs.table.shape[0] - 1)  # of unused rows, any
    first, lowest, highest = (quotient(token, plan.page_size) for token in (j * block, tile.low, tile.keys - 1))
    return tuple(refs.table[chunk, jnp.clip(first + i, lowest, highest)] for i in range(plan.pages))


def _fetch_block(
    plan: Plan, refs: Refs, tile: Tile, j: jax.Array, n: jax.Array, numbers: tuple[jax.Array, ...]
) -> None:
    """Copies K and V of KV block j, the n-th of this CTA, from the pages that the table names."""
    block, slot = plan.config.block_kv, plan.slot(n)
    begin = lax.rem(j * block, jnp.int32(plan.page_size))  # within a page that is larger than a block
    pages = _Pages.of(plan, refs, numbers, begin, tile.head)
    pages.copy(plan, refs.k, plan.k_format, n)
    if refs.v.raw is not None:
        pages.copy(plan, refs.v, plan.v_format, n)
    else:
        _wait_until_free(plan, n, refs.v.free)
        boundary = _at_boundary(plan, tile, j)
        copy = partial(pages.copy_values, plan, refs.v)
        if plan.clears_late:
            copy(refs.v.blocks.at[slot], refs.v.ready.at[slot])
            return
        pl.when(jnp.logical_not(boundary))(partial(copy, refs.v.blocks.at[slot], refs.v.ready.at[slot]))
        pl.when(boundary)(partial(_fetch_boundary, plan, refs, tile, j, slot, copy))


@dataclass(frozen=True)
class _Pages:
    """Finds the pages of a KV block, one after the other, from token `begin` of theirs on, for a query head."""

    numbers: Sequence[jax.Array]  # in [0, N)
    first_row: jax.Array  # of the pools, where the layer's pages begin
    begin: jax.Array
    head: jax.Array

    @classmethod
    def of(cls, plan: Plan, refs: Refs, entries: Sequence[jax.Array], begin: jax.Array, head: jax.Array) -> "_Pages":
        """Returns the pages of some entries of the page table. One outside of [0, N) becomes the nearest."""
        numbers = [jnp.clip(entry, 0, plan.num_pages - 1) for entry in entries]
        return cls(numbers, refs.layer[0] * plan.num_pages, begin, head)

    def copy(self, plan: Plan, pool: Pool, fmt: KVFormat, n: jax.Array) -> None:
        """Copies them as stored, scales included, once the n-th block's place is free."""
        slot = plan.slot(n)
        if pool.raw is None:
            _wait_until_free(plan, n, pool.free)
            self.copy_values(plan, pool, pool.blocks.at[slot], pool.ready.at[slot])
            return
        _wait_until_free(plan, n, pool.raw_free)
        self.copy_values(plan, pool, pool.raw.at[slot], pool.raw_ready.at[slot])
        start, _ = plan.scale_start(fmt, self.head, self.begin)
        for i, number in enumerate(self.numbers):
            row = number if plan.pads(fmt) else self.first_row + number
            for part in plan.scale_copies(fmt):
                source = pool.scales.at[row, pl.ds(start + part.start, part.size)]
                plgpu.copy_gmem_to_smem(source, pool.raw_scales.at[slot, i, part], pool.raw_ready.at[slot])

    def copy_values(self, plan: Plan, pool: Pool, shared: Any, barrier: Any) -> None:
        run, kv_head = plan.run, plan.kv_head(self.head)
        for i, number in enumerate(self.numbers):
            source = pool.values.at[self.first_row + number, kv_head]
            source = source.at[pl.ds(self.begin, run)] if run < plan.page_size else source
            plgpu.copy_gmem_to_smem(source, shared.at[pl.ds(i * run, run)], barrier)


def _fetch_pack(plan: Plan, refs: Refs, pack: Pack, n: jax.Array, blocks: jax.Array) -> None:
    """Copies the queries of packed chunks, and a KV block for each warpgroup."""
    groups, box = plan.config.warpgroups, BOX // plan.config.stack
    begins = []
    for at in range(0, WARPGROUP_ROWS, box):
        tile, offset = pack.tile_at(at, WARPGROUP_ROWS), at & (pack.rows - 1)
        offset, head = offset & (pack.queries(plan) - 1), lax.div(offset, pack.queries(plan))
        # What lies past a chunk's rows is not used: any rows do, as long as there are some.
        offset = jnp.where(offset < refs.tiles[tile, ROWS], offset, 0)
        begins.append((plan.first_row + refs.tiles[tile, ROW] + offset, head))
    pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.q_free))

    @pl.loop(0, groups)
    def fetch_queries(w: jax.Array) -> None:
        for i, (begin, head) in enumerate(begins):
            source = refs.q.at[pl.ds(begin, box), pack.head + w * plan.config.stack + head]
            plgpu.copy_gmem_to_smem(source, refs.q_raw.at[w, pl.ds(i * box, box)], refs.boxes_ready)

    numbers = []
    for at in range(0, plan.config.block_kv, plan.run):
        tile, offset = pack.tile_at(at, plan.config.block_kv), at & (pack.columns - 1)
        low, keys = lowest_key(plan, refs.tiles[tile, POSITION]), refs.tiles[tile, KEYS]
        entry = jnp.clip(*(quotient(token, plan.page_size) for token in (offset, low, keys - 1)))
        numbers.append(refs.table[refs.tiles[tile, CHUNK], entry])

    every = _Pages.of(plan, refs, numbers, jnp.int32(0), pack.head)

    @pl.loop(0, groups)
    def fetch_pages(w: jax.Array) -> None:
        pages = replace(every, head=pack.head + w * plan.config.stack)
        pages.copy(plan, refs.k, plan.k_format, blocks + w)
        pages.copy(plan, refs.v, plan.v_format, blocks + w)


def _fetch_boundary(plan: Plan, refs: Refs, tile: Tile, j: jax.Array, slot: jax.Array, copy: Any) -> None:
    """Fetches V of a block with slots that no query sees: whatever they hold becomes zero, as NaN times zero is NaN."""
    pool = refs.v
    copy(pool.blocks.at[slot], refs.v_raw)
    plgpu.barrier_wait(refs.v_raw)
    clear_unseen(plan, refs, tile, j, slot)
    for _ in range(plan.pages):
        plgpu.barrier_arrive(pool.ready.at[slot])


def clear_unseen(plan: Plan, refs: Refs, tile: Tile, j: jax.Array, slot: jax.Array) -> None:
    """Makes zeros of the values of V in block j that no query sees."""
    pool, block = refs.v, plan.config.block_kv
    for row in range(0, block, SIDE):
        seen = _seen(tile, j * block, row, plgpu.Layout.WGMMA)
        for column in range(0, plan.head_dim, SIDE):
            part = pool.blocks.at[slot, pl.ds(row, SIDE), pl.ds(column, SIDE)]
            part[...] = jnp.where(seen, plgpu.load(part, layout=plgpu.Layout.WGMMA), jnp.zeros((), plan.dtype))
    plgpu.commit_smem()


def convert(plan: Plan, refs: Refs, pools: Sequence[tuple[Pool, KVFormat]]) -> None:
    """Converts the pools' blocks of every tile of this CTA; slots of V that no query sees become zero."""

    def convert_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        del n

        @pl.loop(tile.first, tile.last)
        def _(j: jax.Array) -> None:
            boundary = _at_boundary(plan, tile, j)
            for pool, fmt in pools:
                convert_block = partial(_convert_block, plan, tile.head, pool, fmt, blocks + j - tile.first)
                if pool is refs.k:
                    convert_block()
                    continue
                pl.when(jnp.logical_not(boundary))(convert_block)
                pl.when(boundary)(partial(convert_block, partial(_seen, tile, j * plan.config.block_kv)))

    def convert_pack(pack: Pack, n: jax.Array, blocks: jax.Array) -> None:
        del n

        @pl.loop(0, plan.config.warpgroups)
        def _(w: jax.Array) -> None:
            for pool, fmt in pools:
                _convert_block(plan, pack.head + w * plan.config.stack, pool, fmt, blocks + w)

    _, blocks = for_each_tile(plan, refs, convert_tile, convert_pack)
    drain(blocks, *(pool.free for pool, _ in pools))


def _convert_block(
    plan: Plan,
    head: jax.Array,
    pool: Pool,
    fmt: KVFormat,
    n: jax.Array,
    seen: Callable[..., jax.Array] | None = None,
) -> None:
    """Converts the n-th KV block of this CTA. Where `seen`, of [first token of it, layout], says that no query sees a
    token, it becomes zero."""
    slot = plan.slot(n)
    plgpu.barrier_wait(pool.raw_ready.at[slot])
    _wait_until_free(plan, n, pool.free)
    scales = None
    if pool.raw_scales is not None:
        _, shift = plan.scale_start(fmt, head, 0)
        scales = pool.raw_scales.at[slot, :, pl.ds(shift, plan.run * fmt.numbers(plan.head_dim))]
    for row in range(0, plan.config.block_kv, SIDE):
        kept = None if seen is None else seen(row, layout_of(plan))
        for column in range(0, plan.head_dim, SIDE):
            x = load_converted(pool.raw.at[slot], scales, fmt, plan, row, column)
            if kept is not None:
                x = jnp.where(kept, x, jnp.zeros((), x.dtype))
            pool.blocks.at[slot, pl.ds(row, SIDE), pl.ds(column, SIDE)][...] = x.astype(plan.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(pool.ready.at[slot])
    plgpu.barrier_arrive(pool.raw_free.at[slot])
