"""Gate and up projection of int8 rows, SiLU, and int8 codes of the result with a scale for every group of columns, for
Hopper, in Pallas Mosaic GPU.

A tile is skinny.py's gated one whose results are a whole group of each of 64 rows. So the group's largest magnitude is
in the registers of four threads of a row, and nothing waits for another tile: neither gate and up nor their product
are ever written, and no pass reads them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm_sm90 import skinny_plan
from pallas_kernels.gemm_sm90.product import sum_over_k
from pallas_kernels.gemm_sm90.skinny import COLUMN, ROW, copy_operand
from pallas_kernels.gemm_sm90.skinny_config import UNIT, Config
from pallas_kernels.gemm_sm90.skinny_plan import Refs, begin_of, tiles_of
from pallas_kernels.row_pieces_sm90 import codes, scale_of, silu_mul, widen

HALVES = 2


@partial(jax.jit, static_argnames=("group", "dtype", "config", "interpret"))
def gemm(
    x: jax.Array,
    w: jax.Array,
    *,
    x_scale: jax.Array,
    w_scale: jax.Array,
    group: int,
    dtype: jnp.dtype,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x int8[M, K], w int8[2F, K], x_scale f32[M], w_scale f32[2F] -> codes int8[M, F] and scales f32[M, F / group].

    The bits are those of skinny.gemm's result in `dtype`, of 16 bits, of its silu_mul_quant in that dtype, and of this
    one's quantize_rows by groups. `config`, which may only choose the ring, has 64 rows and a group of both halves.
    """
    (m, k), n = x.shape, w.shape[0] // HALVES
    if m == 0:
        return jnp.zeros((0, n), jnp.int8), jnp.zeros((0, n // group), jnp.float32)
    assert (config.rows, config.columns) == (UNIT, HALVES * group), "a tile is a group of 64 rows"
    if m > 8 and m % 8:  # TMA cuts x into groups of 8 rows
        x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    plan = Plan(m, n, k, x.dtype, x.dtype, {}, config, gated=True)
    kernel = plgpu.kernel(
        partial(_kernel, plan, dtype),
        out_type=(
            jax.ShapeDtypeStruct((m, n), x.dtype),
            # 64 scales leave as one run of bytes, which is not cut at a row's end: so all of them have a place.
            jax.ShapeDtypeStruct((n // group, pl.cdiv(m, UNIT) * UNIT), jnp.float32),
        ),
        scratch_types=plan.scratch(),
        grid=(plan.workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=True,  # SiLU's exponential, good to 2^-21
        ),
        interpret=interpret,
        kernel_name="gemm_gated_codes",
    )
    values, scales = kernel(x, w, x_scale, w_scale)
    return values, scales[:, :m].T


class Scales(NamedTuple):
    """Of groups, in global and shared memory."""

    target: Any  # [F / group, M and up to 63 more]
    source: Any  # [rows]


@dataclass(frozen=True)
class Plan(skinny_plan.Plan):
    """Static sizes."""

    def scratch(self) -> dict[str, Any]:
        return super().scratch() | {
            "x_scale_s": plgpu.SMEM((UNIT,), jnp.float32),
            "w_scale_s": plgpu.SMEM((HALVES, self.columns), jnp.float32),
            "of_groups_s": plgpu.SMEM((UNIT,), jnp.float32),
            "vectors_full": plgpu.Barrier(num_arrivals=1 + HALVES),
            "vectors_free": plgpu.Barrier(),
        }


def _kernel(
    plan: Plan,
    dtype: jnp.dtype,
    x: Any,
    w: Any,
    x_scale: Any,
    w_scale: Any,
    out: Any,
    of_groups: Any,
    *,
    of_groups_s: Any,
    **scratch: Any,
) -> None:
    refs = Refs(x=x, w=w, x_scale=x_scale, w_scale=w_scale, out=out, **scratch)
    scales = Scales(of_groups, of_groups_s)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _() -> None:
        compute(plan, refs, scales, dtype)

    @pl.when(warpgroup == 1)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(lambda: copy_operand(plan, refs, refs.w, refs.w_s, plan.columns, HALVES))
            pl.when(warp == 1)(lambda: copy_operand(plan, refs, refs.x, refs.x_s, plan.copied))
            pl.when(warp == 2)(lambda: copy_scales(plan, refs))


def copy_scales(plan: Plan, refs: Refs) -> None:
    """The warp that copies scales of rows and of both halves' columns."""

    @pl.loop(0, tiles_of(plan))
    def _(i: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))
        row, column = begin_of(plan, i)
        plgpu.copy_gmem_to_smem(refs.x_scale.at[pl.ds(row, UNIT)], refs.x_scale_s, refs.vectors_full)
        for half in range(HALVES):
            source = refs.w_scale.at[pl.ds(column + half * plan.n, plan.columns)]
            plgpu.copy_gmem_to_smem(source, refs.w_scale_s.at[half], refs.vectors_full)

    plgpu.barrier_wait(refs.vectors_free)


def compute(plan: Plan, refs: Refs, scales: Scales, dtype: jnp.dtype) -> None:
    """The computing warpgroup: every tile of this CTA."""

    @pl.loop(0, tiles_of(plan))
    def _(i: jax.Array) -> None:
        sums = sum_over_k(plan, refs, i, slice(None), (UNIT, HALVES * plan.columns))
        finish(plan, refs, scales, dtype, *begin_of(plan, i), sums)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def finish(
    plan: Plan, refs: Refs, scales: Scales, dtype: jnp.dtype, row: jax.Array, column: jax.Array, sums: jax.Array
) -> None:
    """Scales the sums of gate and up of the tile at `row` and `column`, rounds where one operation after the other
    would, and stores codes and their scales."""
    shape, out_s = (UNIT, plan.columns), refs.out_s.at[0]

    def spread(vector: Any, layout: Any, axis: int) -> jax.Array:
        return lax.broadcast_in_dim(plgpu.load(vector, layout=layout, optimized=False), shape, (axis,))

    plgpu.barrier_wait(refs.vectors_full)
    rounded = []
    for half in range(HALVES):
        total = sums[:, half * plan.columns : (half + 1) * plan.columns].astype(jnp.float32)
        total = total * spread(refs.x_scale_s, ROW, 0) * spread(refs.w_scale_s.at[half], COLUMN, 1)
        rounded.append(widen(total.astype(dtype)))
    plgpu.barrier_arrive(refs.vectors_free)
    values = widen(silu_mul(*rounded).astype(dtype))
    scale = scale_of(jnp.max(jnp.abs(values), axis=1), "int8")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # for the tile before
    out_s[...] = codes(values, lax.broadcast_in_dim(1.0 / scale, shape, (0,)), "int8")
    scales.source[...] = scale
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s, refs.out.at[pl.ds(row, UNIT), pl.ds(column, plan.columns)])
    plgpu.copy_smem_to_gmem(scales.source, scales.target.at[column // plan.columns, pl.ds(row, UNIT)])
