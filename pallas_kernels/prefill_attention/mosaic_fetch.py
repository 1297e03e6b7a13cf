"""The warpgroups of the Hopper kernel of prefill_attention that feed the computing ones.

One issues all copies from global memory, in the order in which they are consumed, and runs ahead across tiles. Pages of
another format than the queries' go through others, which convert them on their way to wgmma's operands.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import KVFormat
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS
from pallas_kernels.prefill_attention.mosaic_convert import SIDE, layout_of, load_converted, width
from pallas_kernels.prefill_attention.mosaic_plan import Plan, Pool, Refs, Tile, for_each_tile


def fetch(plan: Plan, refs: Refs) -> None:
    """Copies the queries and KV blocks of every tile of this CTA."""
    config = plan.config

    def fetch_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.q_free))
        for w in range(config.warpgroups):
            rows = pl.ds(tile.row + w // config.heads * WARPGROUP_ROWS, WARPGROUP_ROWS)
            plgpu.copy_gmem_to_smem(refs.q.at[rows, tile.head + w % config.heads], refs.q_raw.at[w], refs.q_ready)

        @pl.loop(tile.first, tile.last)
        def _(j: jax.Array) -> None:
            _fetch_block(plan, refs, tile, j, blocks + j - tile.first)

    tiles, blocks = for_each_tile(plan, refs, fetch_tile)
    pl.when(tiles > 0)(lambda: plgpu.barrier_wait(refs.q_free))
    _drain(plan, blocks, [pool.free if pool.raw is None else pool.raw_free for pool in (refs.k, refs.v)])


def _drain(plan: Plan, blocks: jax.Array, barriers: Sequence[Any]) -> None:
    """A barrier must have been seen complete by all who wait on it before the CTA exits."""

    @pl.loop(jnp.maximum(blocks - plan.config.stages, 0), blocks)
    def _(n: jax.Array) -> None:
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[plan.slot(n)])


def _wait_until_free(plan: Plan, n: jax.Array, barrier: Any) -> None:
    pl.when(n >= plan.config.stages)(lambda: plgpu.barrier_wait(barrier.at[plan.slot(n)]))


def _seen(tile: Tile, first: jax.Array, columns: int, layout: Any) -> jax.Array:
    """bool [SIDE, columns]: whether tokens from `first` on, one a row, are among those that the tile's chunk sees."""
    token = first + plgpu.broadcasted_iota(jnp.int32, (SIDE, columns), 0, layout=layout)
    return (token >= tile.low) & (token < tile.keys)


def _fetch_block(plan: Plan, refs: Refs, tile: Tile, j: jax.Array, n: jax.Array) -> None:
    """Copies K and V of KV block j, the n-th of this CTA."""
    size, block, run, slot = plan.page_size, plan.config.block_kv, plan.run, plan.slot(n)
    kv_head = tile.head // (plan.num_heads // plan.num_kv_heads)
    # Entries beyond the visible pages name no page: fetch the nearest visible one instead. Entries are all read before
    # any copy is issued, so that their latencies overlap.
    entries = [jnp.clip(j * block // size + i, tile.low // size, (tile.keys - 1) // size) for i in range(plan.pages)]
    begin = lax.rem(j * block, jnp.int32(size))  # within a page that is larger than a block
    numbers = [refs.table[tile.chunk, entry] for entry in entries]

    def copy(pool: Pool, shared: Any, barrier: Any) -> None:
        for i, number in enumerate(numbers):
            source = pool.values.at[number, kv_head]
            source = source.at[pl.ds(begin, run)] if run < size else source
            plgpu.copy_gmem_to_smem(source, shared.at[slot, pl.ds(i * run, run)], barrier)

    for pool, fmt in ((refs.k, plan.k_format), (refs.v, plan.v_format)):
        if pool.raw is not None:
            _wait_until_free(plan, n, pool.raw_free)
            copy(pool, pool.raw, pool.raw_ready.at[slot])
            start, _ = plan.scale_start(fmt, tile.head, begin)
            for i, number in enumerate(numbers):
                for part in plan.scale_copies(fmt):
                    source = pool.scales.at[number, pl.ds(start + part.start, part.size)]
                    plgpu.copy_gmem_to_smem(source, pool.raw_scales.at[slot, i, part], pool.raw_ready.at[slot])
        elif pool is refs.k:
            _wait_until_free(plan, n, pool.free)
            copy(pool, pool.blocks, pool.ready.at[slot])
        else:
            _wait_until_free(plan, n, pool.free)
            boundary = (j * block < tile.low) | ((j + 1) * block > tile.keys)
            pl.when(jnp.logical_not(boundary))(partial(copy, pool, pool.blocks, pool.ready.at[slot]))
            pl.when(boundary)(partial(_fetch_boundary, plan, refs, tile, j, slot, partial(copy, pool)))


def _fetch_boundary(plan: Plan, refs: Refs, tile: Tile, j: jax.Array, slot: jax.Array, copy: Any) -> None:
    """V of a block with slots that nobody sees: whatever they hold (NaN times zero is NaN) becomes zero."""
    pool, block = refs.v, plan.config.block_kv
    copy(pool.blocks, refs.v_raw)
    plgpu.barrier_wait(refs.v_raw)
    for row in range(0, block, SIDE):
        seen = _seen(tile, j * block + row, SIDE, plgpu.Layout.WGMMA)
        for column in range(0, plan.head_dim, SIDE):
            part = pool.blocks.at[slot, pl.ds(row, SIDE), pl.ds(column, SIDE)]
            part[...] = jnp.where(seen, plgpu.load(part, layout=plgpu.Layout.WGMMA), jnp.zeros((), plan.dtype))
    plgpu.commit_smem()
    for _ in range(plan.pages):
        plgpu.barrier_arrive(pool.ready.at[slot])


def convert(plan: Plan, refs: Refs, pools: Sequence[tuple[Pool, KVFormat]]) -> None:
    """Converts K, V or both of every tile of this CTA; slots of V that nobody sees become zero."""

    def convert_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        del n

        @pl.loop(tile.first, tile.last)
        def _(j: jax.Array) -> None:
            n = blocks + j - tile.first
            for pool, fmt in pools:
                plgpu.barrier_wait(pool.raw_ready.at[plan.slot(n)])
                _wait_until_free(plan, n, pool.free)
                _convert_block(plan, tile, pool, fmt, j, plan.slot(n), clear=pool is refs.v)

    _, blocks = for_each_tile(plan, refs, convert_tile)
    _drain(plan, blocks, [pool.free for pool, _ in pools])


def _convert_block(
    plan: Plan, tile: Tile, pool: Pool, fmt: KVFormat, j: jax.Array, slot: jax.Array, clear: bool
) -> None:
    columns = width(plan)
    scales = None
    if pool.raw_scales is not None:
        _, shift = plan.scale_start(fmt, tile.head, 0)
        scales = pool.raw_scales.at[slot, :, pl.ds(shift, plan.run * fmt.groups(plan.head_dim))]
    for row in range(0, plan.config.block_kv, SIDE):
        seen = _seen(tile, j * plan.config.block_kv + row, columns, layout_of(plan))
        for column in range(0, plan.head_dim, columns):
            x = load_converted(pool.raw.at[slot], scales, fmt, plan, row, column)
            if clear:
                x = jnp.where(seen, x, jnp.zeros((), x.dtype))
            pool.blocks.at[slot, pl.ds(row, SIDE), pl.ds(column, columns)][...] = x.astype(plan.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(pool.ready.at[slot])
    plgpu.barrier_arrive(pool.raw_free.at[slot])
