"""Multiplies weight_only_matmul's ring on sm_90 by wgmma: codes become its left operand in registers.

The weight's rows are the 64-row side of wgmma and the few rows of x its narrow side. Few rows of x leave room beside
them. With fold = 2, 32 rows of the weight in two parts of K are the 64 rows of wgmma. Each part meets its own columns
of x. So tiles are fine enough to balance over all SMs with no sums to exchange between them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gemm_sm90.skinny_plan import store_rows
from pallas_kernels.hopper.ring_sm90 import slot_of
from pallas_kernels.hopper.row_pieces_sm90 import silu_mul
from pallas_kernels.weight_only_matmul.operand_sm90 import COLUMNS, ROWS, operand
from pallas_kernels.weight_only_matmul.plan_sm90 import Item, Plan


def compute_item(
    plan: Plan,
    names: tuple[str, ...],
    warpgroup: jax.Array,
    i: jax.Array,
    item: Item,
    out: Any,
    scratch: Any,
) -> None:
    """Computes a warpgroup's rows of a tile."""
    config, steps, full, free = plan.config, plan.steps, scratch["full"], scratch["free"]
    stages, vectors = full.shape[0], plan.vectors(names)
    if vectors:
        plgpu.barrier_wait(scratch["vectors_full"])

    def multiply(acc: Any, slot: jax.Array, j: int, r: int) -> None:
        refs: dict[str, Any] = {
            name: scratch[f"{name}_s"] for name in ("w", "scales", "zeros", "table") if name in names
        }
        for name in ("w", *(() if vectors else ("scales", "zeros"))):
            if name in refs:
                refs[name] = refs[name].at[slot]
        a = operand(plan.tile, refs, j, r, config.row_tiles)
        plgpu.wgmma(acc, a, scratch["x_s"].at[slot, :, pl.ds(j * COLUMNS, COLUMNS)].transpose((1, 0)))

    def accumulate(*accs: Any) -> list[jax.Array]:
        @pl.loop(0, steps)
        def _step(s: jax.Array) -> None:
            slot = slot_of(i * steps + s, stages)
            plgpu.barrier_wait(full.at[slot])
            for j in range(plan.step // COLUMNS):
                for r, acc in enumerate(accs):
                    multiply(acc, slot, j, r)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot])

        return [lax.optimization_barrier(acc[...]) for acc in accs]

    accumulators = [plgpu.ACC((ROWS, plan.columns), jnp.float32)] * config.row_tiles
    sums = pl.run_scoped(accumulate, *accumulators)
    if plan.gated:
        sums = [silu_mul(*sums)]
    for r, part in enumerate(sums):
        store(plan, warpgroup, item, part, r, out, scratch, bool(vectors))
    if vectors:
        plgpu.barrier_arrive(scratch["vectors_free"])


def store(
    plan: Plan, warpgroup: jax.Array, item: Item, acc: jax.Array, r: int, out: Any, scratch: Any,
    by_row: bool,
) -> None:  # fmt: skip
    """Scales 64 rows of sums [64, columns], adds the parts of a folded tile, and copies them out transposed."""
    config, fold = plan.config, plan.config.fold
    kept = ROWS // fold
    first = warpgroup * (config.row_tiles // plan.halves) * kept + r * kept
    out_s = scratch["out_s"].at[warpgroup]
    if fold == 1:
        layout = plgpu.Layout.WGMMA
        if by_row:
            scale = plgpu.load(scratch["scales_s"].at[pl.ds(first, ROWS)], layout=layout.reduce(1), optimized=False)
            acc = acc * lax.broadcast_in_dim(scale, acc.shape, (0,))
        if plan.weights:
            acc = jnp.where(item.group < plan.weights, acc, 0)
        result = plgpu.layout_cast(acc.astype(plan.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s.transpose((1, 0))[...] = result
    else:
        parts = scratch["parts_s"].at[warpgroup]
        transposed = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
        parts.at[pl.ds(0, plan.columns)].transpose((1, 0))[...] = transposed
        plgpu.commit_smem()
        by_token = plgpu.Layout.TILED(
            plgpu.Tiling(((8, kept), (2, kept), (kept // 16,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
        )
        total = None
        for f in range(fold):
            place = parts.at[pl.ds(f * config.tokens, config.tokens), pl.ds(f * kept, kept)]
            part = plgpu.load(place, layout=by_token, optimized=False)
            total = part if total is None else total + part
        assert total is not None
        if by_row:
            scale = plgpu.load(scratch["scales_s"].at[pl.ds(first, kept)], layout=by_token.reduce(0), optimized=False)
            total = total * plgpu.layout_cast(lax.broadcast_in_dim(scale, total.shape, (1,)), by_token)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = total.astype(plan.out_dtype)
    plgpu.commit_smem()
    column = item.column + first
    if not plan.weights:
        plgpu.copy_smem_to_gmem(out_s, out.at[item.split, pl.ds(item.token, config.tokens), pl.ds(column, kept)])
        return

    @pl.when(column < plan.n)
    def _own() -> None:
        store_rows(out_s, out.at[0], item.token, column, item.first, item.last)
