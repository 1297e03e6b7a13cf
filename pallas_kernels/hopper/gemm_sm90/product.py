"""Holds what the Hopper matmuls of few and of many rows share: sizes, and the sum over K of a tile."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.ring_sm90 import slot_of


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of x [M, K] times w [.., K] transposed, and the result's N columns."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype

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


def sum_over_k(plan: Sizes, refs: Any, tile: jax.Array, rows: Any, shape: tuple[int, int]) -> jax.Array:
    """Multiplies a warpgroup's `rows` of x by all of w's, in shared memory, of a CTA's n-th `tile`: sums of `shape`.
    Adds in the order of K, in registers. Each stage is given back once the product after its own was issued."""
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
    return sums
