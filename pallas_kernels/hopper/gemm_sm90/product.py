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
    scales, in float32. Tensor cores keep fewer bits of longer sums."""
    steps, stages, piece = plan.steps, refs.full.shape[0], (UNIT, shape[1])

    def spread(vector: Any, axis: int) -> jax.Array:
        value = plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(value, piece, (axis,))

    def step(s: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        slot, totals = slot_of(tile * steps + s, stages), list(sums)
        plgpu.barrier_wait(refs.full.at[slot])
        for block in range(plan.step // BLOCK):
            columns = pl.ds(block * BLOCK, BLOCK)
            of_w = spread(refs.w_scale_s.at[slot, block, pl.ds(0, shape[1])], 1)
            for i, total in enumerate(totals):
                own = pl.ds(rows.start + i * UNIT, UNIT)

                def multiply(acc: Any, own: Any = own, columns: Any = columns) -> jax.Array:
                    x, w = refs.x_s.at[slot, own, columns], refs.w_s.at[slot, slice(None), columns]
                    plgpu.wgmma(acc, x, w.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    return lax.optimization_barrier(acc[...])

                products = pl.run_scoped(multiply, plgpu.ACC(piece, jnp.float32))
                scale = spread(refs.x_scale_s.at[slot, block, own], 0) * of_w
                totals[i] = total + products * scale
        plgpu.barrier_arrive(refs.free.at[slot])
        return totals

    zeros = plgpu.layout_cast(jnp.zeros(piece, jnp.float32), plgpu.Layout.WGMMA)
    return lax.fori_loop(0, steps, step, [zeros] * (shape[0] // UNIT))
