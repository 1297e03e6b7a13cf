"""Holds what the Hopper matmuls of few and of many rows share: sizes, and the sum over K of a tile."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.weight_formats import BLOCK
from pallas_kernels.hopper.ring_sm90 import slot_of

UNIT = 64  # rows of one wgmma


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of x [M, K] times w [.., K] transposed, and the result's N columns."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    in_blocks: bool = field(default=False, kw_only=True)  # every BLOCK columns of K have scales of their own

    @property
    def accumulator(self) -> Any:
        return jnp.int32 if self.dtype == jnp.int8 else jnp.float32

    @property
    def widest(self) -> int:
        """Bounds the bytes along K of a stage."""
        return 128

    @property
    def step(self) -> int:
        """Counts the elements of K that a stage holds. They are fewer bytes than `widest` where rows of K are no
        multiple of 128."""
        size = self.dtype.itemsize
        return next(width // size for width in (self.widest, 64, 32) if self.k * size % min(width, 128) == 0)

    @property
    def steps(self) -> int:
        """Counts the steps over K of a tile. What is past the end of K reads as zeros."""
        return pl.cdiv(self.k, self.step)


def sum_over_k(plan: Sizes, refs: Any, tile: jax.Array, rows: Any, shape: tuple[int, int]) -> list[jax.Array]:
    """Multiplies a warpgroup's `rows` of x by all of w's, in shared memory, of a CTA's n-th `tile`: sums of `shape`, 64
    rows at a time. Adds in the order of K, in registers. Each stage is given back once the product after its own was
    issued."""
    if plan.in_blocks:
        return _sum_blocks(plan, refs, tile, rows, shape)
    steps, stages = plan.steps, refs.full.shape[0]

    def accumulate(acc: Any) -> jax.Array:
        @pl.loop(0, steps)
        def _(s: jax.Array) -> None:
            slot = slot_of(tile * steps + s, stages)
            plgpu.barrier_wait(refs.full.at[slot])
            plgpu.wgmma(acc, refs.x_s.at[slot, rows], refs.w_s.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)
            pl.when(s > 0)(lambda: plgpu.barrier_arrive(refs.free.at[slot_of(tile * steps + s - 1, stages)]))

        return lax.optimization_barrier(acc[...])  # LLVM doesn't know that accumulators change until the wait

    sums = pl.run_scoped(accumulate, plgpu.ACC(shape, plan.accumulator))
    plgpu.barrier_arrive(refs.free.at[slot_of(tile * steps + steps - 1, stages)])
    return [sums[i : i + UNIT] for i in range(0, shape[0], UNIT)]


def _sum_blocks(plan: Sizes, refs: Any, tile: jax.Array, rows: Any, shape: tuple[int, int]) -> list[jax.Array]:
    """Does the same with a scale for each row and each column of a block of K: adds each block's products times both
    scales, in float32. Tensor cores keep fewer bits of longer sums. All products of a stage are issued before any is
    waited for. Two warpgroups take turns to issue, so that one scales while the other's products run."""
    steps, stages, piece = plan.steps, refs.full.shape[0], (UNIT, shape[1])
    count, blocks, warpgroup = shape[0] // UNIT, plan.step // BLOCK, lax.axis_index("warpgroup")
    parts = [(block, i) for block in range(blocks) for i in range(count)]

    def load(vector: Any, axis: int) -> jax.Array:
        return plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def step(s: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        number, totals = tile * steps + s, list(sums)
        slot = slot_of(number, stages)
        plgpu.barrier_wait(refs.full.at[slot])

        def multiply(*accumulators: Any) -> Any:
            if refs.turn is not None:
                pl.when((number > 0) | (warpgroup > 0))(lambda: plgpu.barrier_wait(refs.turn.at[warpgroup]))
            for (block, i), acc in zip(parts, accumulators, strict=True):
                columns = pl.ds(block * BLOCK, BLOCK)
                x = refs.x_s.at[slot, pl.ds(rows.start + i * UNIT, UNIT), columns]
                plgpu.wgmma(acc, x, refs.w_s.at[slot, slice(None), columns].transpose((1, 0)))
            if refs.turn is not None:
                plgpu.barrier_arrive(refs.turn.at[1 - warpgroup])
            of_w = [load(refs.w_scale_s.at[slot, block, pl.ds(0, shape[1])], 1) for block in range(blocks)]
            of_x = [load(refs.x_scale_s.at[slot, block, pl.ds(rows.start + i * UNIT, UNIT)], 0) for block, i in parts]
            scales = lax.optimization_barrier((of_w, of_x))  # loaded while products run
            plgpu.wgmma_wait(0)
            return scales, lax.optimization_barrier([acc[...] for acc in accumulators])

        (of_w, of_x), products = pl.run_scoped(multiply, *[plgpu.ACC(piece, jnp.float32) for _ in parts])
        plgpu.barrier_arrive(refs.free.at[slot])
        for (block, i), own, product in zip(parts, of_x, products, strict=True):
            scale = lax.broadcast_in_dim(own, piece, (0,)) * lax.broadcast_in_dim(of_w[block], piece, (1,))
            totals[i] = totals[i] + product * scale
        return totals

    zeros = plgpu.layout_cast(jnp.zeros(piece, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, steps, step, [zeros] * count)
