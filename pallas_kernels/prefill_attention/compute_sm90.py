"""Computes attention in the Hopper kernel of prefill_attention: its computing warpgroups."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.logits_sm90 import LOWEST
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS
from pallas_kernels.prefill_attention.copy_sm90 import clear_unseen
from pallas_kernels.prefill_attention.pack_sm90 import attend_pack
from pallas_kernels.prefill_attention.parts_sm90 import Sum, added, load_sum, store_sum, with_whole_peaks
from pallas_kernels.prefill_attention.plan_sm90 import Plan, Refs, Tile, for_each_tile, lowest_key, quotient
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


def compute(plan: Plan, refs: Refs, wg: jax.Array) -> None:
    """Attends a computing warpgroup's 64 rows of every tile."""
    config = plan.config
    if config.alternate:  # the first warpgroup has the first turn
        pl.when(wg == 1)(lambda: plgpu.barrier_arrive(refs.turn.at[0]))

    def compute_tile(tile: Tile, n: jax.Array, blocks: jax.Array) -> None:
        del n
        below = quotient(wg, config.heads) * config.queries  # queries of the tile that other warpgroups have
        plgpu.barrier_wait(refs.q_ready)
        stage_queries(plan, refs, wg)
        plgpu.barrier_arrive(refs.q_free)
        store = partial(_store, plan, refs, tile, wg, below)
        rows = _Rows(plan, refs, tile, wg, tile.position + below, blocks)

        @pl.when(tile.last > tile.first)
        def _() -> None:
            if config.part is None:
                store(rows.attend().normalized())
            else:
                _attend_parts(rows, store)

        @pl.when(tile.last == tile.first)
        def _() -> None:
            store(full((WARPGROUP_ROWS, plan.head_dim), 0, plgpu.Layout.WGMMA))

    for_each_tile(plan, refs, compute_tile, partial(attend_pack, plan, refs, wg))
    if config.alternate:
        pl.when(wg == 0)(lambda: plgpu.barrier_wait(refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def _attend_parts(rows: "_Rows", store: Callable[[jax.Array], None]) -> None:
    """Attends one part of the tile's keys after the other, and adds them up."""
    plan, refs, tile = rows.plan, rows.refs, rows.tile
    blocks = plan.blocks_of_part(jnp.int32(0))[1]
    first, end = lax.div(tile.first, blocks), lax.div(tile.last + (blocks - 1), blocks)
    area, keeps = (refs.sums, refs.weights, tile.area + rows.wg), plan.keeps_sums
    running: tuple[Any, Any, jax.Array] = (refs.kept, refs.kept_weights, rows.wg) if keeps else area

    def attend(part: jax.Array, _: Sum) -> Sum:
        own = rows.of_part(part)
        low, high = own.parts_of_rows()
        summed = with_whole_peaks(own.attend(), high > low)
        total = lax.cond(part > first, lambda: added(load_sum(*running, shared=keeps), summed), lambda: summed)
        more = part < end - 1
        if keeps:

            @pl.when(more)
            def _() -> None:
                store_sum(*running, total)
                plgpu.commit_smem()

        pl.when(tile.cut if keeps else tile.cut | more)(lambda: store_sum(*area, total))
        return total

    # The last total leaves the loop, so that the addresses of its rows are not held in registers meanwhile.
    layout = plgpu.Layout.WGMMA
    row = full((WARPGROUP_ROWS,), 0, layout.reduce(1))
    total = lax.fori_loop(first, end, attend, Sum(full((WARPGROUP_ROWS, plan.head_dim), 0, layout), row, row))
    pl.when(jnp.logical_not(tile.cut))(lambda: store(total.normalized()))


@dataclass(frozen=True)
class _Rows:
    """Holds a warpgroup's 64 rows of a tile, whose queries stand at `position` of the sequence and after. `blocks` KV
    blocks came before. The tile has the KV blocks of `part`, or all (None)."""

    plan: Plan
    refs: Refs
    tile: Tile
    wg: jax.Array
    position: jax.Array
    blocks: jax.Array
    part: jax.Array | None = None

    def of_part(self, part: jax.Array) -> "_Rows":
        """Returns the same rows with the keys of one part."""
        begin, end = self.plan.blocks_of_part(part)
        first, last = jnp.maximum(self.tile.first, begin), jnp.minimum(self.tile.last, end)
        tile, blocks = self.tile._replace(first=first, last=last), self.blocks + first - self.tile.first
        return replace(self, tile=tile, blocks=blocks, part=part)

    def parts_of_rows(self) -> tuple[jax.Array, jax.Array]:
        """Returns the first and the last part i32[64] in which each row sees a key."""
        assert self.plan.config.part is not None
        layout = plgpu.Layout.WGMMA.reduce(1)
        row = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=layout)
        position = self.position + (row & (self.plan.config.queries - 1))
        first, last = (quotient(key, self.plan.config.part) for key in (lowest_key(self.plan, position), position))
        return first, last

    @property
    def scores_acc(self) -> Any:
        return plgpu.ACC((WARPGROUP_ROWS, self.plan.config.block_kv), jnp.float32)

    @property
    def out_acc(self) -> Any:
        return plgpu.ACC((WARPGROUP_ROWS, self.plan.head_dim), jnp.float32)

    def attend(self) -> Sum:
        """Returns the sums over the tile's blocks. A row's sink joins the first part in which it sees a key."""
        plan, tile, block = self.plan, self.tile, self.plan.config.block_kv
        start = first_peak(plan, self.refs, self._heads)
        if self.part is not None and self.refs.sinks is not None:
            start = jnp.where(self.parts_of_rows()[0] == self.part, start, LOWEST)
        acc = full((WARPGROUP_ROWS, plan.head_dim), 0, plgpu.Layout.WGMMA)
        p, peak, decay = self._softmax(self._scores(tile.first), tile.first, start, masked=True)
        carry = (acc, peak, first_total(self.refs, p, decay), p.astype(plan.dtype))

        # Blocks that every row sees in full need no mask.
        masked, unmasked = partial(self._step, masked=True), partial(self._step, masked=False)
        begin = tile.first + 1
        full_end = jnp.clip(quotient(self.position + 1, block), begin, tile.last)
        if plan.window is not None:
            visible = jnp.maximum(self.position + plan.config.queries - plan.window, 0)  # to the last row
            full_begin = jnp.clip(quotient(visible + block - 1, block), begin, full_end)
            carry = lax.fori_loop(begin, full_begin, masked, carry)
            begin = full_begin
        carry = lax.fori_loop(begin, full_end, unmasked, carry)
        acc, peak, total, p = lax.fori_loop(full_end, tile.last, masked, carry)
        return Sum(self._product(tile.last - 1, acc, p, last=True), peak, total)

    def _heads(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the warpgroup's first query head, and which one from it on each row has."""
        return head_of(self.plan, self.tile, self.wg), quotient(row, self.plan.config.queries)

    def _step(self, j: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        """Computes P V of block j - 1, and under it the scores and the softmax of block j."""
        refs, slot = self.refs, self._slot
        acc, peak, total, p = carry

        def weigh(scores: jax.Array) -> tuple[jax.Array, ...]:
            new_p, new_peak, decay = self._softmax(scores, j, peak, masked)
            return new_p, new_peak, total * decay + new_p.sum(axis=1), decay

        def overlapped(scores_ref: Any, acc_ref: Any) -> tuple[jax.Array, ...]:
            acc_ref[...] = acc
            plgpu.barrier_wait(refs.k.ready.at[slot(j)])
            self._take_turn()
            plgpu.wgmma(scores_ref, refs.q_s.at[self.wg], refs.k.blocks.at[slot(j)].transpose((1, 0)))
            plgpu.barrier_wait(refs.v.ready.at[slot(j - 1)])
            plgpu.wgmma(acc_ref, p, refs.v.blocks.at[slot(j - 1)])
            self._pass_turn()
            # The barriers keep LLVM from reading accumulators before the wait: it doesn't know that they change late.
            scores = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            plgpu.barrier_arrive(refs.k.free.at[slot(j)])
            weighed = weigh(scores)
            return lax.optimization_barrier(acc_ref[...]), *weighed

        acc, new_p, new_peak, new_total, decay = pl.run_scoped(overlapped, self.scores_acc, self.out_acc)
        plgpu.barrier_arrive(refs.v.free.at[slot(j - 1)])
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        return acc, new_peak, new_total, new_p.astype(self.plan.dtype)

    def _scores(self, j: jax.Array) -> jax.Array:
        """Computes Q K^T of block j, alone."""
        refs, slot = self.refs, self._slot(j)

        def product(acc: Any) -> jax.Array:
            plgpu.barrier_wait(refs.k.ready.at[slot])
            self._take_turn()
            plgpu.wgmma(acc, refs.q_s.at[self.wg], refs.k.blocks.at[slot].transpose((1, 0)))
            self._pass_turn()
            return lax.optimization_barrier(acc[...])

        scores = pl.run_scoped(product, self.scores_acc)
        plgpu.barrier_arrive(refs.k.free.at[slot])
        return scores

    def _product(self, j: jax.Array, acc: jax.Array, p: jax.Array, last: bool = False) -> jax.Array:
        """Computes acc + P V of block j, alone."""
        refs, slot = self.refs, self._slot(j)
        plgpu.barrier_wait(refs.v.ready.at[slot])
        if last and self.plan.clears_late:
            unseen = (j + 1) * self.plan.config.block_kv > self.tile.keys
            pl.when(unseen)(lambda: clear_unseen(self.plan, refs, self.tile, j, slot))

        def product(acc_ref: Any) -> jax.Array:
            acc_ref[...] = acc
            self._take_turn()
            plgpu.wgmma(acc_ref, p, refs.v.blocks.at[slot])
            self._pass_turn()
            return lax.optimization_barrier(acc_ref[...])

        out = pl.run_scoped(product, self.out_acc)
        plgpu.barrier_arrive(refs.v.free.at[slot])
        return out

    def _softmax(
        self, scores: jax.Array, j: jax.Array, peak: jax.Array, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns P of block j (f32), the rows' new peak (in units of log2), and what earlier sums shrink by."""
        shape, scores = scores.shape, bounded(self.plan, scores)
        if masked:
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            query = row & (self.plan.config.queries - 1) if self.plan.config.stack > 1 else row
            distance = query - column + (self.position - j * shape[1])  # query's position - key's
            seen = distance >= 0
            if self.plan.window is not None:
                seen = seen & (distance < self.plan.window)
            scores = jnp.where(seen, scores, -jnp.inf)
        return exponentials(self.plan, scores, peak)

    def _slot(self, j: jax.Array) -> jax.Array:
        return self.plan.slot(self.blocks + j - self.tile.first)

    def _take_turn(self) -> None:
        if self.plan.config.alternate:
            plgpu.barrier_wait(self.refs.turn.at[self.wg])

    def _pass_turn(self) -> None:
        if self.plan.config.alternate:
            plgpu.barrier_arrive(self.refs.turn.at[1 - self.wg])


def head_of(plan: Plan, tile: Tile, wg: jax.Array) -> jax.Array:
    """Returns the first query head of a computing warpgroup."""
    return tile.head + lax.rem(wg, jnp.int32(plan.config.heads)) * plan.config.stack


def _store(plan: Plan, refs: Refs, tile: Tile, wg: jax.Array, below: jax.Array, out: jax.Array) -> None:
    """Writes the warpgroup's rows of the tile, and none of the next chunk's."""
    head = head_of(plan, tile, wg)
    stage_rows(plan, refs, wg, out)
    each = plan.config.queries
    write_rows(plan, refs, wg, 0, each, tile.row + below, jnp.clip(tile.rows - below, 0, each), head)
