"""The computing warpgroups of the Hopper kernel of prefill_attention."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS
from pallas_kernels.prefill_attention.mosaic_plan import Plan, Refs, Tile, for_each_tile

LOWEST = -1e30  # finite: a row that has seen no key yet keeps its sum without NaN


def compute(plan: Plan, refs: Refs, wg: jax.Array) -> None:
    """A computing warpgroup: attention of its 64 rows of every tile."""
    config = plan.config
    if config.alternate:  # the first warpgroup has the first turn
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))

    def compute_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        below = wg // config.heads * WARPGROUP_ROWS  # rows of the tile that other warpgroups have
        plgpu.barrier_wait(refs.q_ready)
        _copy(refs.q_raw.at[wg], refs.q_s.at[wg])
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.q_free)
        store = partial(_store, plan, refs, tile, wg, below)

        @pl.when(tile.last > tile.first)
        def _() -> None:
            acc, total = _attend(plan, refs, tile, wg, refs.q_s.at[wg], tile.position + below, blocks)
            store(acc * lax.broadcast_in_dim(1 / total, acc.shape, [0]))

        @pl.when(tile.last == tile.first)
        def _() -> None:
            store(plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, plan.head_dim), jnp.float32), plgpu.Layout.WGMMA))

    for_each_tile(plan, refs, compute_tile)
    if config.alternate:
        pl.when(wg == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _attend(
    plan: Plan, refs: Refs, tile: Tile, wg: jax.Array, q: Any, position: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Unnormalized P V [64, D] and the row sums [64] of the rows at `position` and after, over blocks first..last."""
    config, block = plan.config, plan.config.block_kv
    shape, out_shape = (WARPGROUP_ROWS, block), (WARPGROUP_ROWS, plan.head_dim)
    to_log2 = plan.scale * math.log2(math.e)

    def slot(j: jax.Array) -> jax.Array:
        return plan.slot(blocks + j - tile.first)

    def take_turn() -> None:
        if config.alternate:
            plgpu.barrier_wait(refs.turn.at[wg])

    def pass_turn() -> None:
        if config.alternate:
            plgpu.barrier_arrive(refs.turn.at[1 - wg])

    def softmax(
        scores: jax.Array, j: jax.Array, peak: jax.Array, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """P of block j (f32), the rows' new peak (in units of log2), and what earlier sums shrink by."""
        if masked:
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            distance = row - column + (position - j * block)  # query's position - key's
            seen = distance >= 0
            if plan.window is not None:
                seen = seen & (distance < plan.window)
            scores = jnp.where(seen, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=1) * to_log2)
        p = jnp.exp2(scores * to_log2 - lax.broadcast_in_dim(new_peak, shape, [0]))
        return p, new_peak, jnp.exp2(peak - new_peak)

    def first_scores(j: jax.Array) -> jax.Array:
        def product(acc: Any) -> jax.Array:
            plgpu.barrier_wait(refs.k.ready.at[slot(j)])
            take_turn()
            plgpu.wgmma(acc, q, refs.k.blocks.at[slot(j)].transpose((1, 0)))
            pass_turn()
            return lax.optimization_barrier(acc[...])

        scores = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
        plgpu.barrier_arrive(refs.k.free.at[slot(j)])
        return scores

    def step(j: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        """P V of block j - 1, under which the scores and the softmax of block j are computed."""
        acc, peak, total, p = carry

        def products(scores_ref: Any, acc_ref: Any) -> tuple[jax.Array, ...]:
            acc_ref[...] = acc
            plgpu.barrier_wait(refs.k.ready.at[slot(j)])
            take_turn()
            plgpu.wgmma(scores_ref, q, refs.k.blocks.at[slot(j)].transpose((1, 0)))
            plgpu.barrier_wait(refs.v.ready.at[slot(j - 1)])
            plgpu.wgmma(acc_ref, p, refs.v.blocks.at[slot(j - 1)])
            pass_turn()
            # The barriers keep LLVM from reading accumulators before the wait: it doesn't know that they change late.
            scores = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            plgpu.barrier_arrive(refs.k.free.at[slot(j)])
            new_p, new_peak, decay = softmax(scores, j, peak, masked)
            new_total = total * decay + new_p.sum(axis=1)
            return lax.optimization_barrier(acc_ref[...]), new_peak, new_total, new_p, decay

        if config.interpretable:
            scores = first_scores(j)
            new_acc = last_product(j - 1, acc, p)
            new_p, new_peak, decay = softmax(scores, j, peak, masked)
            new_total = total * decay + new_p.sum(axis=1)
        else:
            accs = plgpu.ACC(shape, jnp.float32), plgpu.ACC(out_shape, jnp.float32)
            new_acc, new_peak, new_total, new_p, decay = pl.run_scoped(products, *accs)
            plgpu.barrier_arrive(refs.v.free.at[slot(j - 1)])
        new_acc = new_acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        return new_acc, new_peak, new_total, new_p.astype(plan.dtype)

    def last_product(j: jax.Array, acc: jax.Array, p: jax.Array) -> jax.Array:
        plgpu.barrier_wait(refs.v.ready.at[slot(j)])
        if config.interpretable:
            refs.p_s[wg] = p
            plgpu.commit_smem()

        def product(acc_ref: Any) -> jax.Array:
            if not config.interpretable:
                acc_ref[...] = acc
            take_turn()
            plgpu.wgmma(acc_ref, refs.p_s.at[wg] if config.interpretable else p, refs.v.blocks.at[slot(j)])
            pass_turn()
            return lax.optimization_barrier(acc_ref[...])

        out = pl.run_scoped(product, plgpu.ACC(out_shape, jnp.float32))
        plgpu.barrier_arrive(refs.v.free.at[slot(j)])
        return acc + out if config.interpretable else out

    def full(size: tuple[int, ...], value: float, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full(size, value, jnp.float32), layout)

    lowest = full(shape[:1], LOWEST, plgpu.Layout.WGMMA.reduce(1))
    acc = full((WARPGROUP_ROWS, plan.head_dim), 0, plgpu.Layout.WGMMA)
    p, peak, _ = softmax(first_scores(tile.first), tile.first, lowest, True)
    carry = (acc, peak, p.sum(axis=1), p.astype(plan.dtype))

    # Blocks that every row sees in full need no mask.
    begin, end = tile.first + 1, tile.last
    full_end = jnp.clip((position + 1) // block, begin, end)
    if plan.window is not None:
        full_begin = (position + WARPGROUP_ROWS - plan.window + block - 1) // block
        full_begin = jnp.clip(full_begin, begin, full_end)
        carry = lax.fori_loop(begin, full_begin, partial(step, masked=True), carry)
        begin = full_begin
    carry = lax.fori_loop(begin, full_end, partial(step, masked=False), carry)
    acc, _, total, p = lax.fori_loop(full_end, end, partial(step, masked=True), carry)
    return last_product(tile.last - 1, acc, p), total


def _copy(source: Any, target: Any) -> None:
    """Rows of shared memory from plain to swizzled or back, 16 bytes a thread at a time."""
    layout = plgpu.Layout.SMEM_GMEM_COPY(source.shape, source.dtype, 128)
    target[...] = plgpu.load(source, layout=layout)


def _store(plan: Plan, refs: Refs, tile: Tile, wg: jax.Array, below: jax.Array, out: jax.Array) -> None:
    """Writes the warpgroup's rows of the tile, and none of the next chunk's."""
    head = tile.head + lax.rem(wg, jnp.int32(plan.config.heads))
    row, rows = tile.row + below, jnp.clip(tile.rows - below, 0, WARPGROUP_ROWS)
    refs.q_s[wg] = out.astype(plan.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the rows of the tile before
    _copy(refs.q_s.at[wg], refs.out_s.at[wg])
    plgpu.commit_smem()

    @pl.when(rows == WARPGROUP_ROWS)
    def _() -> None:
        plgpu.copy_smem_to_gmem(refs.out_s.at[wg], refs.out.at[pl.ds(row, WARPGROUP_ROWS), head])

    @pl.when(rows < WARPGROUP_ROWS)
    def _() -> None:
        @pl.loop(0, rows)
        def _(i: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(refs.out_s.at[wg, i], refs.out.at[row + i, head])
