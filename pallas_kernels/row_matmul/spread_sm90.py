"""Multiplies many rows of few columns by the matrix of their run on Hopper, in Pallas Mosaic GPU, and adds a residual.

It is the second product of adapters over prompts, and bound by the bytes of the residual and of the result. A tile has
128 rows of one run and two pieces of 64 columns. Each CTA has neighbouring tiles, along a block's columns first. So its
rows stay in shared memory. Parts of matrices and of the residual are on their way for the tiles that follow.

With `gated` the two pieces are those of gate and up, and SiLU(gate) * up is all that is stored.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gemm_sm90.skinny_plan import cut_of, store_rows
from pallas_kernels.hopper.hopper import SMS
from pallas_kernels.hopper.ring_sm90 import drain, free_slot, slot_of
from pallas_kernels.hopper.row_pieces_sm90 import silu_mul
from pallas_kernels.hopper.smem_sm90 import swizzled
from pallas_kernels.row_groups import Pairs, most_pairs, pairs_of
from pallas_kernels.row_matmul.config import SPREAD_PIECE as PIECE
from pallas_kernels.row_matmul.config import SPREAD_ROWS as ROWS

LAYOUT = plgpu.Layout.WGMMA
WARPGROUPS, STAGES = 2, 3
UNIT = ROWS // WARPGROUPS  # rows of a warpgroup


@dataclass(frozen=True)
class Plan:
    """Holds static sizes."""

    m: int
    runs: int
    count: int  # of blocks of b
    parts: tuple[int, ...]
    gated: bool
    workers: int

    @property
    def width(self) -> int:
        """Counts the columns from one tile to the next."""
        return PIECE if self.gated else 2 * PIECE

    @property
    def slabs(self) -> int:
        return (self.parts[0] if self.gated else sum(self.parts)) // self.width

    def pieces(self, column: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the first column and the part of a tile's pieces."""
        if self.gated:
            return [(column + i * self.parts[0], jnp.int32(i)) for i in range(2)]
        return [(column + i * PIECE, cut_of(self.parts, column)) for i in range(2)]

    def begins(self, column: jax.Array) -> jax.Array:
        """Returns whether a tile has other columns of the rows than the tile before."""
        starts = (0,) if self.gated else (sum(self.parts[:i]) for i in range(len(self.parts)))
        return sum((jnp.where(column == start, 1, 0) for start in starts), start=jnp.int32(0)) > 0


class Refs(NamedTuple):
    """Holds global arrays, shared memory and barriers."""

    low: Any  # [M, P r]
    b: Any  # [count N, r]
    out: Any
    pairs: Pairs
    low_s: Any  # [2, 128, r]
    b_s: Any  # [stages, 2, 64, r]
    out_s: Any  # [warpgroups, 64, 64]
    edge_s: Any  # [warpgroups, 64, 64], of which single rows are stored
    low_full: Any
    low_free: Any
    full: Any
    free: Any
    residual: Any = None  # [M, N]
    residual_s: Any = None  # [stages, 2, 128, 64]
    scale: Any = None  # f32[count, P]


class Tile(NamedTuple):
    row: jax.Array
    column: jax.Array
    first: jax.Array  # the rows of its run, from `first` to `last`
    last: jax.Array
    block: jax.Array  # of b, or another number than 0 .. count - 1


@partial(jax.jit, static_argnames=("parts", "gated", "out_dtype", "interpret"))
def spread(
    low: jax.Array,
    b: jax.Array,
    sizes: jax.Array,
    own: jax.Array,
    *,
    parts: tuple[int, ...],
    scale: jax.Array | None,
    residual: jax.Array | None,
    gated: bool,
    out_dtype: jnp.dtype,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns [M, N] of low [M, P r] and b [count, N, r]. sizes and own i32[runs] are the rows of each run and their
    block of b; what is none of 0 .. count - 1 adds nothing. scale [count, P] multiplies each part, and residual [M, N]
    is added. gated: SiLU of the first of two parts times the second, [M, N / 2]."""
    (m, _), (count, n, r) = low.shape, b.shape
    runs = sizes.shape[0]
    tiles = most_pairs(m, runs + 1, ROWS) * n // (2 * PIECE)
    plan = Plan(m, runs, count, parts, gated, min(SMS, tiles))
    given = {"scale": scale, "residual": residual}
    given = {name: array for name, array in given.items() if array is not None}
    scratch = {
        "low_s": swizzled((2, ROWS, r), low.dtype),
        "b_s": swizzled((STAGES, 2, PIECE, r), b.dtype),
        "out_s": swizzled((WARPGROUPS, UNIT, PIECE), out_dtype),
        "edge_s": plgpu.SMEM((WARPGROUPS, UNIT, PIECE), out_dtype),
        "low_full": plgpu.Barrier(num_arrivals=2),
        "low_free": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "full": plgpu.Barrier(num_arrivals=2 if residual is None else 4, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
    }
    if residual is not None:
        scratch["residual_s"] = swizzled((STAGES, 2, ROWS, PIECE), residual.dtype)
    kernel = plgpu.kernel(
        partial(_kernel, plan, tuple(given)),
        out_type=jax.ShapeDtypeStruct((m, n // 2 if gated else n), out_dtype),
        scratch_types=scratch,
        grid=(plan.workers,),
        grid_names=("worker",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            approx_math=gated,  # SiLU's exponential, good to 2^-21
        ),
        interpret=interpret,
        kernel_name="spread_gated" if gated else "spread",
    )
    return kernel(low, b.reshape(-1, r), *given.values(), *pairs_of(sizes, m, ROWS, own).arrays())


def _kernel(plan: Plan, names: tuple[str, ...], low: Any, b: Any, *arrays: Any, **scratch: Any) -> None:
    *extra, out = arrays
    pairs = Pairs(*extra[len(names) :])
    refs = Refs(low=low, b=b, out=out, pairs=pairs, **dict(zip(names, extra)), **scratch)
    warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
    tiles = pairs.number(plan.m, ROWS) * plan.slabs
    first, last = (lax.div(tiles * (worker + i), plan.workers) for i in range(2))

    @pl.when(warpgroup < WARPGROUPS)
    def _() -> None:
        pl.loop(first, last)(lambda number: compute(plan, refs, warpgroup, number, first, last))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _() -> None:
        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(lambda: copy_tiles(plan, refs, first, last))
            pl.when(warp == 1)(lambda: copy_rows(plan, refs, first, last))


def tile_of(plan: Plan, refs: Refs, number: jax.Array) -> Tile:
    pair = lax.div(number, jnp.int32(plan.slabs))
    column = (number - pair * plan.slabs) * plan.width
    group, row, first, last = (each[pair] for each in refs.pairs[:4])
    return Tile(row, column, first, last, refs.pairs.own[group])


def begins(plan: Plan, number: jax.Array, first: jax.Array) -> jax.Array:
    """Returns whether a tile of a CTA needs other rows, or other columns of them, than the one before."""
    return (number == first) | plan.begins(lax.rem(number, jnp.int32(plan.slabs)) * plan.width)


def copy_tiles(plan: Plan, refs: Refs, first: jax.Array, last: jax.Array) -> None:
    """Copies parts of b and of the residual, in one warp."""

    @pl.loop(first, last)
    def _(number: jax.Array) -> None:
        tile, slot = tile_of(plan, refs, number), free_slot(number - first, refs.free)
        top = jnp.clip(tile.block, 0, plan.count - 1) * sum(plan.parts)
        for i, (column, _) in enumerate(plan.pieces(tile.column)):
            plgpu.copy_gmem_to_smem(refs.b.at[pl.ds(top + column, PIECE)], refs.b_s.at[slot, i], refs.full.at[slot])
            if refs.residual is not None:
                source = refs.residual.at[pl.ds(tile.row, ROWS), pl.ds(column, PIECE)]
                plgpu.copy_gmem_to_smem(source, refs.residual_s.at[slot, i], refs.full.at[slot])

    drain(last - first, refs.free)


def copy_rows(plan: Plan, refs: Refs, first: jax.Array, last: jax.Array) -> None:
    """Copies rows, in one warp."""

    @pl.loop(first, last)
    def _(number: jax.Array) -> None:
        @pl.when(begins(plan, number, first))
        def _() -> None:
            pl.when(number > first)(lambda: plgpu.barrier_wait(refs.low_free))
            tile, r = tile_of(plan, refs, number), refs.b.shape[1]
            for i, (_, part) in enumerate(plan.pieces(tile.column)):
                source = refs.low.at[pl.ds(tile.row, ROWS), pl.ds(part * r, r)]
                plgpu.copy_gmem_to_smem(source, refs.low_s.at[i], refs.low_full)

    pl.when(last > first)(lambda: plgpu.barrier_wait(refs.low_free))


def compute(plan: Plan, refs: Refs, warpgroup: jax.Array, number: jax.Array, first: jax.Array, last: jax.Array) -> None:
    """Computes and stores a warpgroup's rows of a tile."""
    tile, slot = tile_of(plan, refs, number), slot_of(number - first, STAGES)
    rows, row = pl.ds(warpgroup * UNIT, UNIT), tile.row + warpgroup * UNIT
    valid = (tile.block >= 0) & (tile.block < plan.count)
    pieces = plan.pieces(tile.column)
    pl.when(begins(plan, number, first))(lambda: plgpu.barrier_wait(refs.low_full))
    plgpu.barrier_wait(refs.full.at[slot])

    def multiply(*sums: Any) -> tuple[jax.Array, ...]:
        for i, acc in enumerate(sums):
            plgpu.wgmma(acc, refs.low_s.at[i, rows], refs.b_s.at[slot, i].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in sums)

    totals = list(pl.run_scoped(multiply, *[plgpu.ACC((UNIT, PIECE), jnp.float32)] * 2))
    for i, (_, part) in enumerate(pieces):
        if refs.scale is not None:
            totals[i] = totals[i] * refs.scale[jnp.where(valid, tile.block, 0), part]
        totals[i] = jnp.where(valid, totals[i], 0)
        if refs.residual is not None:
            added = plgpu.load(refs.residual_s.at[slot, i, rows], layout=LAYOUT)
            totals[i] = added.astype(jnp.float32) + totals[i]
    plgpu.barrier_arrive(refs.free.at[slot])
    ends = (number + 1 == last) | begins(plan, number + 1, first)
    pl.when(ends)(lambda: plgpu.barrier_arrive(refs.low_free))
    found = [silu_mul(*totals)] if plan.gated else totals
    for (column, _), total in zip(pieces, found):
        store(refs, warpgroup, tile, row, column, total.astype(refs.out.dtype))


def store(refs: Refs, warpgroup: jax.Array, tile: Tile, row: jax.Array, column: jax.Array, total: jax.Array) -> None:
    """Stores 64 rows, or those of them that are the tile's run's."""
    whole = (tile.first <= row) & (row + UNIT <= tile.last)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(whole)
    def _() -> None:
        out_s = refs.out_s.at[warpgroup]
        out_s[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[pl.ds(row, UNIT), pl.ds(column, PIECE)])

    @pl.when(jnp.logical_not(whole))
    def _() -> None:
        edge_s = refs.edge_s.at[warpgroup]
        edge_s[...] = total
        plgpu.commit_smem()
        store_rows(edge_s, refs.out, row, column, tile.first, tile.last)
