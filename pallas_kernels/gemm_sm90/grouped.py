"""Matrix product of int8 rows that have a scale for every group of columns, for Hopper, in Pallas Mosaic GPU.

The tiles, ring and epilogue are those of skinny.py. What differs is the sum: products of a group are added in s32,
exactly, then converted, scaled and added to float32 sums, group by group in the order of K, whatever the tile is. So a
row has the same bits for any number of rows. Scales come into the ring beside the columns that they are of.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm_sm90 import skinny, skinny_plan
from pallas_kernels.gemm_sm90.skinny import ROW, copy_operand, copy_vectors
from pallas_kernels.gemm_sm90.skinny_config import UNIT, Config
from pallas_kernels.gemm_sm90.skinny_plan import Refs, begin_of, tiles_of
from pallas_kernels.ring_sm90 import drain, free_slot, slot_of


@partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def gemm(
    x: jax.Array,
    w: jax.Array,
    *,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x int8[M, K], w int8[N, K], x_scale f32[M, G], w_scale f32[N] -> [M, N] of `out_dtype`.

    The sum over groups of f32(products of K / G columns) * x_scale, times w_scale, plus bias f32[N] and residual
    [M, N] of `out_dtype`. K / G is 32, 64 or 128; a warpgroup has 64 rows of `config`'s one or two times 64.
    """
    (m, k), n, groups = x.shape, w.shape[0], x_scale.shape[1]
    if m == 0:
        return jnp.zeros((0, n), out_dtype)
    assert config.rows <= 2 * UNIT, "a warpgroup has 64 rows, and two compute"
    if m > 8 and m % 8:  # TMA cuts x into groups of 8 rows
        x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    given: dict[str, Any] = {"w_scale": w_scale, "bias": bias, "residual": residual}
    given = {name: array for name, array in given.items() if array is not None}
    dtypes = {name: array.dtype for name, array in given.items()}
    plan = Plan(m, n, k, x.dtype, jnp.dtype(out_dtype), dtypes, config, group=k // groups)
    kernel = plgpu.kernel(
        partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.workers,),
        grid_names=("worker",),
        num_threads=plan.computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="gemm_grouped",
    )
    return kernel(x, w, pad_rows(x_scale).T, *given.values())


def pad_rows(scales: jax.Array) -> jax.Array:
    """Scales f32[M, G] with as many rows as make a row of their transpose whole pieces of 16 bytes, as TMA wants."""
    return jnp.pad(scales, ((0, -len(scales) % 4), (0, 0)))


class Scales(NamedTuple):
    """Of groups, in global and shared memory."""

    source: Any  # [G, M and up to 3 more]
    target: Any  # [stages, groups of a stage, rows]


@dataclass(frozen=True)
class Plan(skinny_plan.Plan):
    """Static sizes; `group` columns share a scale."""

    group: int = 0

    @property
    def step(self) -> int:
        """A stage holds whole groups: one where a group is narrower than the widest swizzle, which it may not cut."""
        return super().step if self.group == 128 else self.group

    @property
    def in_step(self) -> int:
        """Groups of a stage."""
        return self.step // self.group

    @property
    def beside(self) -> int:
        """Bytes of a stage beside its operands: of scales."""
        return 4 * self.in_step * self.config.rows

    def scratch(self) -> dict[str, Any]:
        scratch = super().scratch()
        stages, rows = scratch["x_s"].shape[:2]
        scratch["of_groups_s"] = plgpu.SMEM((stages, self.in_step, rows), jnp.float32)
        scratch["full"] = plgpu.Barrier(num_arrivals=3, num_barriers=stages)
        return scratch


def _kernel(plan: Plan, x: Any, w: Any, of_groups: Any, *arrays: Any, of_groups_s: Any, **scratch: Any) -> None:
    *extra, out = arrays
    refs = Refs(x=x, w=w, out=out, **dict(zip(plan.extra, extra)), **scratch)
    scales = Scales(of_groups, of_groups_s)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < plan.computing)
    def _() -> None:
        compute(plan, refs, scales, warpgroup)

    @pl.when(warpgroup == plan.computing)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(lambda: copy_operand(plan, refs, refs.w, refs.w_s, plan.columns))
            pl.when(warp == 1)(lambda: copy_operand(plan, refs, refs.x, refs.x_s, plan.copied))
            pl.when(warp == 2)(lambda: copy_vectors(plan, refs))
            pl.when(warp == 3)(lambda: copy_scales(plan, refs, scales))


def copy_scales(plan: Plan, refs: Refs, scales: Scales) -> None:
    """The warp that copies scales of groups, step by step, on and on across tiles."""
    steps, tiles = plan.steps, tiles_of(plan)

    @pl.loop(0, tiles)
    def _(i: jax.Array) -> None:
        row, _column = begin_of(plan, i)

        @pl.loop(0, steps)
        def _(s: jax.Array) -> None:
            slot = free_slot(i * steps + s, refs.free)
            at = pl.ds(s * plan.in_step, plan.in_step), pl.ds(row, plan.config.rows)
            plgpu.copy_gmem_to_smem(scales.source.at[at], scales.target.at[slot], refs.full.at[slot])

    drain(tiles * steps, refs.free)


def compute(plan: Plan, refs: Refs, scales: Scales, warpgroup: jax.Array) -> None:
    """A computing warpgroup: its 64 rows of every tile of this CTA."""
    steps, stages, shape = plan.steps, refs.full.shape[0], (UNIT, plan.columns)
    rows = pl.ds(warpgroup * UNIT, UNIT)

    def products(slot: jax.Array, columns: Any) -> jax.Array:
        """Of one group, in s32."""

        def accumulate(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, refs.x_s.at[slot, rows, columns], refs.w_s.at[slot, :, columns].transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return lax.optimization_barrier(acc[...])  # else what is done with the sums may move before the wait

        return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.int32))

    @pl.loop(0, tiles_of(plan))
    def _(i: jax.Array) -> None:
        row, column = begin_of(plan, i)
        skinny.fetch_residual(plan, refs, warpgroup, row + rows.start, column)

        def add(s: jax.Array, total: jax.Array) -> jax.Array:
            slot = slot_of(i * steps + s, stages)
            plgpu.barrier_wait(refs.full.at[slot])
            for g in range(plan.in_step):
                scale = plgpu.load(scales.target.at[slot, g, rows], layout=ROW, optimized=False)
                found = products(slot, pl.ds(g * plan.group, plan.group)).astype(jnp.float32)
                total = total + found * lax.broadcast_in_dim(scale, shape, (0,))
            plgpu.barrier_arrive(refs.free.at[slot])
            return total

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        skinny.finish(plan, refs, warpgroup, row, column, lax.fori_loop(0, steps, add, zeros))

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
