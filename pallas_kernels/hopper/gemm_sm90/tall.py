"""Multiplies many rows by a matrix with scales on Hopper, in Pallas Mosaic GPU.

Persistent CTAs have two computing warpgroups and one that fetches. The fetching one issues all TMA copies, K step by K
step, in the order in which they are consumed. It runs ahead across tiles: the next tile's operands come in while the
last one's results go out. Each computing warpgroup accumulates its half of the tile in registers and scales it there.
It hands it out through shared memory, a chunk of 64 rows and 128 bytes at a time. Sums are added in the order of K, so
results are the same bits in every run.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gemm_sm90.product import sum_over_k
from pallas_kernels.hopper.gemm_sm90.tall_config import Config
from pallas_kernels.hopper.gemm_sm90.tall_plan import ROWS, Place, Plan, Refs, Tile, for_each_tile
from pallas_kernels.hopper.ring_sm90 import drain, free_slot

REGISTERS = 232, 40  # of each thread that computes and that fetches: the CTA's 64 Ki, moved to where they are needed


@partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def gemm(
    x: jax.Array,
    w: jax.Array,
    *,
    x_scale: jax.Array | None = None,
    w_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: jnp.dtype,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns x [M, K] times w [N, K] transposed: [M, N]; see the package's docstring."""
    (m, k), n = x.shape, w.shape[0]
    if m == 0:
        return jnp.zeros((0, n), out_dtype)
    given = {"x_scale": x_scale, "w_scale": w_scale, "bias": bias, "residual": residual}
    optional = {name: array for name, array in given.items() if array is not None}
    in_blocks = x_scale is not None and x_scale.ndim == 2
    plan = Plan(m, n, k, x.dtype, jnp.dtype(out_dtype), tuple(optional), config, in_blocks=in_blocks)
    plan = replace(plan, m=plan.padded_rows)
    x = _with_rows(x, plan.m)
    for name, rows in (("x_scale", max(plan.m, plan.copied_scales)), ("residual", plan.m)):
        if name in optional:
            optional[name] = _with_rows(optional[name], rows)
    if in_blocks:
        optional["x_scale"] = optional["x_scale"].T
    kernel = plgpu.kernel(
        partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.m, n), out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.ctas,),
        grid_names=("cta",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="gemm_tall",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(x, w, *optional.values())[:m]


def _with_rows(array: jax.Array, rows: int) -> jax.Array:
    """Returns the array with zeros as further rows; itself, if it has so many."""
    more = rows - array.shape[0]
    return jnp.pad(array, [(0, more)] + [(0, 0)] * (array.ndim - 1)) if more else array


def _kernel(plan: Plan, x: Any, w: Any, *arrays: Any, **scratch: Any) -> None:
    *optional, out = arrays
    refs = Refs(x=x, w=w, out=out, **dict(zip(plan.optional, optional)), **scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        compute(plan, refs, warpgroup)

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        fetch(plan, refs)


def fetch(plan: Plan, refs: Refs) -> None:
    """Copies the operands and vectors of every tile of this CTA."""
    steps = plan.steps

    def fetch_tile(tile: Tile, n: jax.Array) -> None:
        @pl.loop(0, steps)
        def _(s: jax.Array) -> None:
            slot = free_slot(n * steps + s, refs.free)
            at = pl.ds(s * plan.step, plan.step)
            x, w = refs.x.at[pl.ds(tile.row, plan.copied), at], refs.w.at[pl.ds(tile.column, plan.tile_n), at]
            plgpu.copy_gmem_to_smem(x, refs.x_s.at[slot, pl.ds(0, plan.copied)], refs.full.at[slot])
            plgpu.copy_gmem_to_smem(w, refs.w_s.at[slot], refs.full.at[slot])
            if plan.in_blocks:
                for scale, to, first, size in (
                    (refs.x_scale, refs.x_scale_s, tile.row, plan.copied_scales),
                    (refs.w_scale, refs.w_scale_s, tile.column, plan.tile_n),
                ):
                    source = scale.at[pl.ds(s, 1), pl.ds(first, size)]
                    plgpu.copy_gmem_to_smem(source, to.at[slot, :, pl.ds(0, size)], refs.full.at[slot])

        if plan.vectors:
            pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))
        for name, (begin, size) in plan.vectors.items():
            first, size = (tile.row, plan.copied_scales) if name == "x_scale" else (tile.column, size)
            source = getattr(refs, name).at[pl.ds(first, size)]
            plgpu.copy_gmem_to_smem(source, refs.vectors_s.at[pl.ds(begin, size)], refs.vectors_full)

    tiles = for_each_tile(plan, fetch_tile)
    if plan.vectors:
        pl.when(tiles > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))

    drain(tiles * steps, refs.free)


def compute(plan: Plan, refs: Refs, wg: jax.Array) -> None:
    """Computes a warpgroup's half of every tile of this CTA."""
    rows = pl.ds(wg * plan.rows, plan.rows)

    def compute_tile(tile: Tile, n: jax.Array) -> None:
        place = Place(wg, tile.row, rows.start, tile.column)
        if plan.adds_residual:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for c in range(plan.buffers):
                load_residual(plan, refs, place, c)

        sums = sum_over_k(plan, refs, n, rows, (plan.rows, plan.tile_n))
        finish(plan, refs, place, sums)

    tiles = for_each_tile(plan, compute_tile)
    if refs.turn is not None:
        pl.when((tiles > 0) & (wg == 0))(lambda: plgpu.barrier_wait(refs.turn.at[0]))
    plgpu.wait_smem_to_gmem(0)


def load_residual(plan: Plan, refs: Refs, place: Place, c: int) -> None:
    """Loads the c-th chunk's residual to where the chunk will go out from."""
    b = c % plan.buffers
    ready = refs.residual_full.at[place.wg * plan.buffers + b]
    plgpu.copy_gmem_to_smem(refs.residual.at[place.chunk(plan, c)], refs.out_s.at[place.wg, b], ready)


def finish(plan: Plan, refs: Refs, place: Place, sums: list[jax.Array]) -> None:
    """Scales, adds and stores what a warpgroup finishes of a tile."""
    behind = min(1, plan.buffers - 1)  # stores that may still be read while the residual of another chunk comes in
    if plan.vectors:
        plgpu.barrier_wait(refs.vectors_full)
    for c, (i, j) in enumerate(plan.chunks):
        buffer, shape = refs.out_s.at[place.wg, c % plan.buffers], (ROWS, plan.chunk)
        part = sums[i // ROWS][:, j : j + plan.chunk].astype(jnp.float32)

        def spread(name: str, begin: Any, axis: int, shape: tuple[int, int] = shape) -> jax.Array:
            vector = refs.vectors_s.at[pl.ds(plan.vectors[name][0] + begin, shape[axis])]
            value = plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
            return lax.broadcast_in_dim(value, shape, (axis,))

        if "x_scale" in plan.vectors:
            part = part * spread("x_scale", place.row_in_tile + i, 0)
        if "w_scale" in plan.vectors:
            part = part * spread("w_scale", j, 1)
        if "bias" in plan.optional:
            part = part + spread("bias", j, 1)
        if plan.adds_residual:
            plgpu.barrier_wait(refs.residual_full.at[place.wg * plan.buffers + c % plan.buffers])
            part = part + plgpu.load(buffer, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        else:
            plgpu.wait_smem_to_gmem(plan.buffers - 1, wait_read_only=True)
        buffer[...] = part.astype(plan.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, refs.out.at[place.chunk(plan, c)])
        if plan.adds_residual and c >= behind and c - behind + plan.buffers < len(plan.chunks):
            plgpu.wait_smem_to_gmem(behind, wait_read_only=True)
            load_residual(plan, refs, place, c - behind + plan.buffers)
    if plan.vectors:
        plgpu.barrier_arrive(refs.vectors_free)
