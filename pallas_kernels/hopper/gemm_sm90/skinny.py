"""Multiplies few rows by a matrix with scales on Hopper, in Pallas Mosaic GPU: bound by the bytes of the weights.

A tile is up to 256 rows of x by a slab of w's rows, whose width is any multiple of 16. So slabs divide evenly among the
SMs. For most shapes one wave of tiles, each over all of K, is the whole matmul, with nothing to merge. Rows of x are
the 64-row operand of wgmma. Rows that don't exist are neither copied nor stored. Two warps of one warpgroup copy x and
w into a deep ring, on and on across tiles. One or two warpgroups multiply. An SM takes in 64 bytes a clock at most, x's
included. Where that is the limit, tiles are chosen nearly square.

With `gated`, w holds gate's rows and then as many of up's. A tile has the same ones of both, so that SiLU(gate) * up is
made of sums in registers. Half of the results are never written, and nothing reads them.

With `sizes`, rows are in groups with a weight each, one below the other in w. A tile is a block of rows by a slab of
the weight of a group that has rows in it. It multiplies all of the block's rows and stores those of its group. With
`blocks`, groups name their weights, and several may name the same one.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gemm_sm90.product import sum_over_k
from pallas_kernels.hopper.gemm_sm90.skinny_config import UNIT, Config
from pallas_kernels.hopper.gemm_sm90.skinny_plan import (
    Blocks,
    Place,
    Plan,
    Refs,
    place_of,
    store_rows,
    tiles_of,
)
from pallas_kernels.hopper.ring_sm90 import drain, free_slot
from pallas_kernels.hopper.row_pieces_sm90 import silu_mul
from pallas_kernels.row_groups import Pairs, Schedule, known_pairs, pairs_of

LAYOUT = plgpu.Layout.WGMMA
ROW, COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)
REGISTERS = 232, 40  # of each thread that computes and that copies, where two warpgroups compute


@partial(jax.jit, static_argnames=("out_dtype", "config", "gated", "blocks", "interpret"))
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
    gated: bool = False,
    sizes: jax.Array | None = None,
    schedule: Schedule | None = None,
    own: jax.Array | None = None,
    blocks: Blocks | None = None,
    block_scale: jax.Array | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns x [M, K] times w [N, K] transposed: [M, N]; see the package's docstring. bias may have 16 bits, too.
    gated: SiLU of the product with w's first half, times that with its second half: [M, N / 2]. Nothing is added.
    sizes i32[X]: the rows of group i meet block i of w [X N, K]. Rows after the last group are zero. schedule: of
    sizes, if it is made already. blocks, and own i32[X]: the rows of group i meet block own[i], times block_scale
    f32[blocks, cuts], if there is such a block."""
    groups = 0 if sizes is None else sizes.shape[0]
    (m, k), n = x.shape, w.shape[0] // (max(groups, 1) * (2 if gated else 1))
    if blocks is not None:
        k, n = w.shape[1], sum(blocks.cuts)
    if m == 0:
        return jnp.zeros((0, n), out_dtype)
    if m > 8 and m % 8:  # TMA cuts x into groups of 8 rows
        x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    in_blocks = x_scale is not None and x_scale.ndim == 2
    if x_scale is not None and in_blocks:  # TMA takes rows of 16 bytes
        x_scale = jnp.pad(x_scale.T, ((0, 0), (0, -m % 4)))
    optional = {"x_scale": x_scale, "w_scale": w_scale, "bias": bias, "residual": residual, "block_scale": block_scale}
    given = {name: array for name, array in optional.items() if array is not None}
    assert not (gated and {"bias", "residual"} & set(given)), "nothing is added to a gated product"
    assert not (gated and given and not groups), "a gated product is scaled in groups alone"
    assert not (groups and blocks is None and {"bias", "residual"} & set(given)), (
        "nothing is added to products of groups"
    )
    extra = {name: array.dtype for name, array in given.items()}
    plan = Plan(m, n, k, x.dtype, jnp.dtype(out_dtype), extra, config, gated, groups, blocks, in_blocks=in_blocks)
    pairs = None if sizes is None else known_pairs(schedule, config.rows) or pairs_of(sizes, m, config.rows, own)
    kernel = plgpu.kernel(
        partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.workers,),
        grid_names=("worker",),
        num_threads=plan.computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=gated,  # SiLU's exponential, good to 2^-21
        ),
        interpret=interpret,
        kernel_name="gemm_skinny" + ("_gated" if gated else "") + ("_ragged" if groups else ""),
    )
    return kernel(x, w, *given.values(), *(() if pairs is None else pairs.arrays()))


def _kernel(plan: Plan, x: Any, w: Any, *arrays: Any, **scratch: Any) -> None:
    *extra, out = arrays
    pairs = Pairs(*extra[len(plan.extra) :]) if plan.groups else None
    refs = Refs(x=x, w=w, out=out, pairs=pairs, **dict(zip(plan.extra, extra)), **scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < plan.computing)
    def _() -> None:
        if plan.computing > 1:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        compute(plan, refs, warpgroup)

    @pl.when(warpgroup == plan.computing)
    def _() -> None:
        if plan.computing > 1:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(lambda: copy_operand(plan, refs, refs.w, refs.w_s, plan.columns, plan.parts))
            pl.when(warp == 1)(lambda: copy_operand(plan, refs, refs.x, refs.x_s, plan.copied))
            if plan.vectors:
                pl.when(warp == 2)(lambda: copy_vectors(plan, refs))
            if plan.in_blocks:
                pl.when(warp == 3)(lambda: copy_scales(plan, refs))


def copy_operand(plan: Plan, refs: Refs, source: Any, target: Any, rows: int, parts: int = 1) -> None:
    """Copies x or w in one warp, step by step, on and on across tiles. w may come in parts, each of `rows` rows. Rows
    that gate's part has past its end are up's, and results of them are not stored."""
    steps, tiles = plan.steps, tiles_of(plan, refs)

    @pl.loop(0, tiles)
    def _(i: jax.Array) -> None:
        place = place_of(plan, refs, i)
        begin, first = (place.row, place.x_column) if source is refs.x else (place.w_row, None)

        @pl.loop(0, steps)
        def _(s: jax.Array) -> None:
            slot = free_slot(i * steps + s, refs.free)
            for part in range(parts):
                column = s * plan.step if first is None else first + s * plan.step
                at = pl.ds(begin + part * plan.n, rows), pl.ds(column, plan.step)
                to = target.at[slot, pl.ds(part * rows, rows)]
                plgpu.copy_gmem_to_smem(source.at[at], to, refs.full.at[slot])

    drain(tiles * steps, refs.free)


def copy_scales(plan: Plan, refs: Refs) -> None:
    """Copies the scales of each step's blocks in one warp."""
    steps, tiles = plan.steps, tiles_of(plan, refs)

    @pl.loop(0, tiles)
    def _(i: jax.Array) -> None:
        row, column = place_of(plan, refs, i)[:2]

        @pl.loop(0, steps)
        def _(s: jax.Array) -> None:
            slot = free_slot(i * steps + s, refs.free)
            for source, to, first in ((refs.x_scale, refs.x_scale_s, row), (refs.w_scale, refs.w_scale_s, column)):
                _, blocks, size = to.shape
                at = pl.ds(s * blocks, blocks), pl.ds(first, size)
                plgpu.copy_gmem_to_smem(source.at[at], to.at[slot], refs.full.at[slot])

    drain(tiles * steps, refs.free)


def copy_vectors(plan: Plan, refs: Refs) -> None:
    """Copies scales and bias in one warp."""
    tiles = tiles_of(plan, refs)

    @pl.loop(0, tiles)
    def _(i: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))
        place = place_of(plan, refs, i)
        for name in plan.vectors:
            source, target = getattr(refs, name), getattr(refs, f"{name}_s")
            if name == "x_scale":
                plgpu.copy_gmem_to_smem(source.at[pl.ds(place.row, plan.config.rows)], target, refs.vectors_full)
                continue
            for part in range(plan.parts):
                at = pl.ds(place.w_row + part * plan.n, plan.vector)
                to = target.at[pl.ds(part * plan.vector, plan.vector)]
                plgpu.copy_gmem_to_smem(source.at[at], to, refs.vectors_full)

    pl.when(tiles > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))


def compute(plan: Plan, refs: Refs, warpgroup: jax.Array) -> None:
    """Computes a warpgroup's rows of every tile of this CTA."""
    rows = pl.ds(warpgroup * plan.rows, plan.rows)

    @pl.loop(0, tiles_of(plan, refs))
    def _(i: jax.Array) -> None:
        place = place_of(plan, refs, i)
        fetch_residual(plan, refs, warpgroup, place.row + rows.start, place.column)
        sums = sum_over_k(plan, refs, i, rows, (plan.rows, plan.config.columns))
        finish(plan, refs, warpgroup, place, sums)

    plgpu.wait_smem_to_gmem(0)


def fetch_residual(plan: Plan, refs: Refs, warpgroup: jax.Array, row: Any, column: jax.Array) -> None:
    """Copies 64 rows of the residual to where the result that they are added to will be."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if refs.residual is not None:
        source = refs.residual.at[pl.ds(row, UNIT), pl.ds(column, plan.columns)]
        plgpu.copy_gmem_to_smem(source, refs.out_s.at[warpgroup], refs.residual_full.at[warpgroup])


def finish(plan: Plan, refs: Refs, warpgroup: jax.Array, place: Place, sums: list[jax.Array]) -> None:
    """Scales, adds and stores a warpgroup's sums of a tile, 64 rows at a time."""
    out_s, columns, (row, column) = refs.out_s.at[warpgroup], pl.ds(0, plan.columns), place[:2]
    if plan.vectors:
        plgpu.barrier_wait(refs.vectors_full)
    for first in range(0, plan.rows, UNIT):
        begin = warpgroup * plan.rows + first
        both = sums[first // UNIT].astype(jnp.float32)
        parts = [both[:, plan.columns * i : plan.columns * (i + 1)] for i in range(plan.parts)]

        def spread(vector: Any, layout: Any, axis: int, shape: Any = parts[0].shape) -> jax.Array:
            value = plgpu.load(vector, layout=layout, optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(value, shape, (axis,))

        if "x_scale" in plan.vectors:
            scale = spread(refs.x_scale_s.at[pl.ds(begin, UNIT)], ROW, 0)
            parts = [part * scale for part in parts]
        if "w_scale" in plan.vectors:
            scales = [refs.w_scale_s.at[pl.ds(i * plan.vector, plan.columns)] for i in range(plan.parts)]
            parts = [part * spread(scale, COLUMN, 1) for part, scale in zip(parts, scales)]
        total = silu_mul(*parts) if plan.gated else parts[0]
        if refs.bias is not None:
            total = total + spread(refs.bias_s.at[columns], COLUMN, 1)
        if plan.blocks is not None:
            valid = (place.block >= 0) & (place.block < plan.blocks.count)
            if refs.block_scale is not None:
                total = total * refs.block_scale[jnp.where(valid, place.block, 0), place.cut]
            total = jnp.where(valid, total, 0)
        if first > 0:
            fetch_residual(plan, refs, warpgroup, row + begin, column)
        if refs.residual is not None:
            plgpu.barrier_wait(refs.residual_full.at[warpgroup])
            total = total + plgpu.load(out_s, layout=LAYOUT, optimized=False).astype(jnp.float32)
        out_s[...] = total.astype(plan.out_dtype)
        if plan.groups and plan.blocks is None:
            zeros = plgpu.layout_cast(jnp.zeros_like(total, plan.out_dtype), LAYOUT)
            # A select in place of this store made ptxas run one wgmma after the other (its note C7514).
            pl.when(place.group == plan.groups)(partial(store, out_s, zeros))
        plgpu.commit_smem()
        if plan.groups:
            store_rows(out_s, refs.out, row + begin, column, place.first, place.last)
        else:
            plgpu.copy_smem_to_gmem(out_s, refs.out.at[pl.ds(row + begin, UNIT), pl.ds(column, plan.columns)])
    if plan.vectors:
        plgpu.barrier_arrive(refs.vectors_free)


def store(ref: Any, value: jax.Array) -> None:
    ref[...] = value
