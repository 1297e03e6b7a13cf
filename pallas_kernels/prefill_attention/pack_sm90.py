"""Packs short chunks that share a computing warpgroup of the Hopper kernel of prefill_attention.

A chunk of 8 tokens leaves 56 of a wgmma's 64 rows idle, and 120 of a block's 128 keys. So several share both, each with
rows and keys of its own, and see their own keys alone. A chunk's values must not reach the others, not even through 0 *
NaN. So values that are not finite become zero, and the scores of their keys NaN. Only rows that see them take NaN up.
Sums over keys are the same wherever a chunk lies, since what is added before and after is zero.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS
from pallas_kernels.prefill_attention.plan_sm90 import Pack, Plan, Refs
from pallas_kernels.prefill_attention.rows_sm90 import (
    bounded,
    exponentials,
    first_peak,
    first_total,
    full,
    stage_queries,
    stage_rows,
    write_rows,
)
from pallas_kernels.prefill_attention.work import POSITION, ROW, ROWS

SIDE = 64  # tokens and columns of V that are in registers at once


def attend_pack(plan: Plan, refs: Refs, wg: jax.Array, pack: Pack, n: jax.Array, blocks: jax.Array) -> None:
    """Attends one head of packed chunks, over the wg-th of the KV blocks that come after `blocks`."""
    del n
    positions = [refs.tiles[pack.tile(i), POSITION] for i in range(max(plan.packings))]  # before anything is waited for
    plgpu.barrier_wait(refs.boxes_ready)
    stage_queries(plan, refs, wg)
    plgpu.barrier_arrive(refs.q_free)

    # A block is free when all warpgroups have released it, those too that have no use for it. In this order a single
    # stage is enough, and the next pack's blocks come while this one's rows leave.
    k, v = (refs.k.ready, refs.k.free), (refs.v.ready, refs.v.free)
    slot, later = plan.slot(blocks + wg), (wg + 1, plan.config.warpgroups)
    _pass_by(plan, blocks, (0, wg), (k, v))
    plgpu.barrier_wait(refs.k.ready.at[slot])
    plgpu.barrier_wait(refs.v.ready.at[slot])
    scores = _scores(plan, refs, wg, slot)
    plgpu.barrier_arrive(refs.k.free.at[slot])
    _pass_by(plan, blocks, later, (k,))
    plgpu.commit_smem()  # all warps have seen V as it was
    _clean(plan, refs, slot)
    scores = jnp.where(_seen(plan, pack, positions), bounded(plan, scores), -jnp.inf)
    p, _peak, decay = exponentials(plan, scores, first_peak(plan, refs, partial(_heads, plan, pack, wg)))
    out = _product(plan, refs, wg, slot, p.astype(plan.dtype))
    plgpu.barrier_arrive(refs.v.free.at[slot])
    _pass_by(plan, blocks, later, (v,))
    stage_rows(plan, refs, wg, out * lax.broadcast_in_dim(1 / first_total(refs, p, decay), out.shape, [0]))

    @pl.loop(0, pack.chunks)
    def _(i: jax.Array) -> None:
        tile = pack.tile(i)
        row = plan.first_row + refs.tiles[tile, ROW]
        head = pack.head + wg * plan.config.stack
        write_rows(plan, refs, wg, i * pack.rows, pack.queries(plan), row, refs.tiles[tile, ROWS], head)


def _pass_by(plan: Plan, blocks: jax.Array, span: tuple[Any, Any], barriers: Sequence[tuple[Any, Any]]) -> None:
    """Waits for blocks of other warpgroups and releases them: barriers (ready, free)."""

    @pl.loop(*span)
    def _(w: jax.Array) -> None:
        slot = plan.slot(blocks + w)
        for ready, free in barriers:
            plgpu.barrier_wait(ready.at[slot])
            plgpu.barrier_arrive(free.at[slot])


def _scores(plan: Plan, refs: Refs, wg: jax.Array, slot: jax.Array) -> jax.Array:
    """Computes Q K^T [64, T], NaN for keys whose value is not finite: 0 V^T is part of the sum."""
    block = plan.config.block_kv
    zeros = full((WARPGROUP_ROWS, plan.head_dim), 0, plgpu.Layout.WGMMA).astype(plan.dtype)
    # As constants they make ptxas run short of registers, and wait for each wgmma of the kernel before the next.
    zeros = lax.optimization_barrier(zeros)

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, refs.q_s.at[wg], refs.k.blocks.at[slot].transpose((1, 0)))
        plgpu.wgmma(acc, zeros, refs.v.blocks.at[slot].transpose((1, 0)))
        return lax.optimization_barrier(acc[...])

    return pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, block), jnp.float32))


def _clean(plan: Plan, refs: Refs, slot: jax.Array) -> None:
    """Makes zeros of what is not finite in V."""
    layout = plgpu.Layout.SMEM_GMEM_COPY((SIDE, SIDE), plan.dtype, 128)
    for row in range(0, plan.config.block_kv, SIDE):
        for column in range(0, plan.head_dim, SIDE):
            part = refs.v.blocks.at[slot, pl.ds(row, SIDE), pl.ds(column, SIDE)]
            x = plgpu.load(part, layout=layout)
            part[...] = jnp.where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x, jnp.zeros((), plan.dtype))
    plgpu.commit_smem()


def _seen(plan: Plan, pack: Pack, positions: Sequence[jax.Array]) -> jax.Array:
    """Returns bool [64, T]: whether a row's query sees a column's key; each slot's first query stands at its
    position."""
    rows, columns = WARPGROUP_ROWS, plan.config.block_kv
    row = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=plgpu.Layout.WGMMA.reduce(0))
    query, key = row & (pack.queries(plan) - 1), column & (pack.columns - 1)  # within their slots
    begin, position = row - (row & (pack.rows - 1)), query
    for i, first in enumerate(positions):
        position += jnp.where(begin == i * pack.rows, first, 0)

    def spread(x: jax.Array, dim: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (rows, columns), [dim])

    same = spread(begin * (columns // rows), 0) == spread(column - key, 1)
    distance = spread(position, 0) - spread(key, 1)
    seen = same & (distance >= 0)
    return seen if plan.window is None else seen & (distance < plan.window)


def _heads(plan: Plan, pack: Pack, wg: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a warpgroup's first query head, and which one from it on each row has within its slot."""
    return pack.head + wg * plan.config.stack, lax.div(row & (pack.rows - 1), pack.queries(plan))


def _product(plan: Plan, refs: Refs, wg: jax.Array, slot: jax.Array, p: jax.Array) -> jax.Array:
    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, p, refs.v.blocks.at[slot])
        return lax.optimization_barrier(acc[...])

    return pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, plan.head_dim), jnp.float32))
