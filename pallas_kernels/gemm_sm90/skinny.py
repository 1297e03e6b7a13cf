"""Matrix product with scales for Hopper, for few rows, in Pallas Mosaic GPU: bound by the bytes of the weights.

A tile is all rows of x by a slab of w's rows, whose width is any multiple of 16: so the slabs of a layer divide evenly
among the SMs, and in most shapes one wave of tiles, each over all of K, is the whole product. Rows of x are the 64-row
operand of wgmma; those that don't exist are neither copied nor stored. Two warps of one warpgroup copy x and w into a
deep ring, one or two warpgroups multiply. Where slabs would be so narrow that x costs more to read than they do, the
CTAs of a cluster share K instead: each stores its sums into the shared memory of those that finish them, which add
them in the order of K.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm_sm90.skinny_config import MOST_ROWS, SHARED_MEMORY, Config

ROWS = 64  # of one wgmma
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
REGISTERS = {1: None, 2: (232, 40)}  # by computing warpgroups: of each thread that computes, and that copies


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
    """x [M, K] times w [N, K] transposed -> [M, N]; see the package's docstring. M is at most 256."""
    (m, k), n = x.shape, w.shape[0]
    if m == 0:
        return jnp.zeros((0, n), out_dtype)
    if m > MOST_ROWS:
        raise NotImplementedError(f"x has {m} rows; the product for few rows takes at most {MOST_ROWS}")
    if m > 8 and m % 8:  # TMA cuts x into groups of 8 rows
        x = jnp.pad(x, ((0, -m % 8), (0, 0)))
    optional = {"x_scale": x_scale, "w_scale": w_scale, "bias": bias, "residual": residual}
    given = {name: array for name, array in optional.items() if array is not None}
    plan = Plan(m, n, k, x.dtype, jnp.dtype(out_dtype), {name: a.dtype for name, a in given.items()}, config)
    kernel = plgpu.kernel(
        partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.workers,),
        grid_names=("worker",),
        cluster=(config.split,),
        cluster_names=("split",),
        num_threads=plan.computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="gemm_skinny",
    )
    return kernel(x, w, *given.values())


class Refs(NamedTuple):
    """Global arrays, shared memory and barriers."""

    x: Any
    w: Any
    out: Any
    x_s: Any  # [stages, rows, step]
    w_s: Any  # [stages, columns, step]
    full: Any
    free: Any
    out_s: Any  # [warpgroups, 64, finished]
    sums_s: Any = None  # [split, rows, finished]: what this CTA finishes, as each CTA of the cluster has it
    sums_full: Any = None
    ring_done: Any = None
    vectors_full: Any = None
    vectors_free: Any = None
    x_scale: Any = None
    x_scale_s: Any = None  # [rows]
    w_scale: Any = None
    w_scale_s: Any = None  # [finished, and more: copies are of 128 bytes]
    bias: Any = None
    bias_s: Any = None
    residual: Any = None
    residual_full: Any = None


@dataclass(frozen=True)
class Plan:
    """Static sizes."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    extra: dict[str, jnp.dtype]  # the optional arguments that are there
    config: Config

    @property
    def copied(self) -> int:
        """Rows of x in a tile, as copied."""
        return pl.cdiv(self.m, 8) * 8

    @property
    def computing(self) -> int:
        """Warpgroups that compute."""
        return 1 if self.m <= ROWS else 2

    @property
    def rows(self) -> int:
        """Of a computing warpgroup."""
        return ROWS if self.m <= 2 * ROWS else 2 * ROWS

    @property
    def finished(self) -> int:
        """Columns of a tile that a CTA scales and stores."""
        return self.config.columns // self.config.split

    @property
    def width(self) -> int:
        """Bytes of K that are swizzled together."""
        return next(width for width in (128, 64, 32) if self.k * self.dtype.itemsize % width == 0)

    @property
    def step(self) -> int:
        """Elements of K that a stage holds."""
        return (self.config.step if self.width == 128 else self.width) // self.dtype.itemsize

    @property
    def steps(self) -> int:
        """Of each CTA; what is past the end of K reads as zeros."""
        return pl.cdiv(pl.cdiv(self.k, self.step), self.config.split)

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.n, self.config.columns)

    @property
    def workers(self) -> int:
        """Clusters."""
        workers = min(self.tiles, self.config.ctas // self.config.split)
        if self.config.split > 1 and self.tiles > workers:  # sums are exchanged once in a CTA's life
            raise NotImplementedError(f"{self.tiles} tiles of {self.config} are more than one wave")
        return workers

    @property
    def vectors(self) -> list[str]:
        return [name for name in self.extra if name != "residual"]

    @property
    def accumulator(self) -> Any:
        return jnp.int32 if self.dtype == jnp.int8 else jnp.float32

    @property
    def overlapping(self) -> bool:
        """Whether the sums that a cluster exchanges take the place of the ring: shared memory doesn't hold both."""
        return self.config.split > 1 and self.m > ROWS

    def stages(self) -> int:
        """What shared memory holds beside the rest."""
        rows, size = self.rows * self.computing, self.out_dtype.itemsize
        other = 3072 + 4 * (rows + 2 * self.vector) + ROWS * self.computing * self.finished * size
        if self.config.split > 1 and not self.overlapping:
            other += 4 * rows * self.config.columns
        stage = (rows + self.config.columns) * self.step * self.dtype.itemsize
        stages = min(self.config.stages, max(self.steps, 2), (SHARED_MEMORY - other) // stage)
        if stages < 2:
            raise NotImplementedError(f"{self.config} needs more shared memory at M={self.m}")
        return stages

    @property
    def vector(self) -> int:
        """Elements of a column vector that are copied: a multiple of 128 bytes, in 16 bits too."""
        return pl.cdiv(self.finished, 64) * 64

    def scratch(self) -> dict[str, Any]:
        stages, rows, finished, split = self.stages(), self.rows * self.computing, self.finished, self.config.split
        vectors = {"x_scale": rows, "w_scale": self.vector, "bias": self.vector}
        ring = (
            swizzled((stages, rows, self.step), self.dtype, self.width),
            swizzled((stages, self.config.columns, self.step), self.dtype, self.width),
        )
        scratch = {
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=self.computing, num_barriers=stages),
            "out_s": plgpu.SMEM((self.computing, ROWS, finished), self.out_dtype),
        }
        if split > 1:
            width = next(width for width in (128, 64, 32) if 4 * finished % width == 0)
            sums = swizzled((split, rows, finished), self.accumulator, width)
            scratch["ring_and_sums"] = plgpu.RefUnion(ring, sums) if self.overlapping else (ring, sums)
            # One for both warpgroups: JAX 0.11.2 misses, from another CTA, any but the first barrier of an array.
            scratch["sums_full"] = plgpu.Barrier(num_arrivals=split * self.computing)
            scratch["ring_done"] = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=self.computing)
        else:
            scratch["ring_and_sums"] = (ring, None)
        if self.vectors:
            scratch["vectors_full"] = plgpu.Barrier(num_arrivals=len(self.vectors))
            scratch["vectors_free"] = plgpu.Barrier(num_arrivals=self.computing)
        for name in self.vectors:
            scratch[f"{name}_s"] = plgpu.SMEM((vectors[name],), self.extra[name])
        if "residual" in self.extra:
            scratch["residual_full"] = plgpu.Barrier(num_barriers=self.computing)
        return scratch


def swizzled(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
    """Shared memory in which rows of `width` bytes are swizzled, as TMA and wgmma want it."""
    transforms = (plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(plan: Plan, x: Any, w: Any, *arrays: Any, ring_and_sums: Any, **scratch: Any) -> None:
    *extra, out = arrays
    (x_s, w_s), sums_s = ring_and_sums
    arguments = dict(zip(plan.extra, extra))
    refs = Refs(x=x, w=w, out=out, x_s=x_s, w_s=w_s, sums_s=sums_s, **arguments, **scratch)
    warpgroup, registers = lax.axis_index("warpgroup"), REGISTERS[plan.computing]

    @pl.when(warpgroup < plan.computing)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        compute(plan, refs, warpgroup)

    @pl.when(warpgroup == plan.computing)
    def _() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(lambda: copy_operand(plan, refs, refs.w, refs.w_s, plan.config.columns))
            pl.when(warp == 1)(lambda: copy_operand(plan, refs, refs.x, refs.x_s, plan.copied))
            if plan.vectors:
                pl.when(warp == 2)(lambda: copy_vectors(plan, refs))


def tiles_of(plan: Plan) -> jax.Array:
    """How many tiles this CTA has: tile i of worker j is number j + i * workers."""
    return (plan.tiles - lax.axis_index("worker") + plan.workers - 1) // plan.workers


def first_column(plan: Plan, i: jax.Array) -> jax.Array:
    return (lax.axis_index("worker") + i * plan.workers) * plan.config.columns


def copy_operand(plan: Plan, refs: Refs, source: Any, target: Any, rows: int) -> None:
    """The warp that copies x or w, step by step, on and on across tiles."""
    if plan.config.early and source is refs.x:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    steps, stages = plan.steps, refs.full.shape[0]
    first_step, tiles = lax.axis_index("split") * steps, tiles_of(plan)

    @pl.loop(0, tiles)
    def _(i: jax.Array) -> None:
        row = first_column(plan, i) if source is refs.w else lax.axis_index("worker") * 0

        @pl.loop(0, steps)
        def _(s: jax.Array) -> None:
            number = i * steps + s
            slot = lax.rem(number, jnp.int32(stages))
            pl.when(number >= stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
            at = pl.ds(row, rows), pl.ds((first_step + s) * plan.step, plan.step)
            plgpu.copy_gmem_to_smem(source.at[at], target.at[slot, pl.ds(0, rows)], refs.full.at[slot])

    @pl.loop(jnp.maximum(tiles * steps - stages, 0), tiles * steps)
    def _(number: jax.Array) -> None:  # no barrier is left in the middle of a phase
        plgpu.barrier_wait(refs.free.at[lax.rem(number, jnp.int32(stages))])


def copy_vectors(plan: Plan, refs: Refs) -> None:
    """The warp that copies scales and bias."""
    if plan.config.early:
        plgpu.griddepcontrol_wait()
    tiles = tiles_of(plan)

    @pl.loop(0, tiles)
    def _(i: jax.Array) -> None:
        pl.when(i > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))
        column = first_column(plan, i) + lax.axis_index("split") * plan.finished
        for name in plan.vectors:
            source, target = getattr(refs, name), getattr(refs, f"{name}_s")
            at = pl.ds(column * 0 if name == "x_scale" else column, target.shape[0])
            plgpu.copy_gmem_to_smem(source.at[at], target, refs.vectors_full)

    plgpu.barrier_wait(refs.vectors_free)


def compute(plan: Plan, refs: Refs, warpgroup: jax.Array) -> None:
    """A computing warpgroup: its rows of every tile of this CTA."""
    steps, stages = plan.steps, refs.full.shape[0]
    rows = pl.ds(warpgroup * plan.rows, plan.rows)

    @pl.loop(0, tiles_of(plan))
    def _(i: jax.Array) -> None:
        column = first_column(plan, i) + lax.axis_index("split") * plan.finished
        if plan.config.early:
            plgpu.griddepcontrol_wait()
        fetch_residual(plan, refs, warpgroup, rows.start, column)

        def accumulate(acc: Any) -> jax.Array:
            @pl.loop(0, steps)
            def _(s: jax.Array) -> None:
                slot = lax.rem(i * steps + s, jnp.int32(stages))
                plgpu.barrier_wait(refs.full.at[slot])
                plgpu.wgmma(acc, refs.x_s.at[slot, rows], refs.w_s.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)

                @pl.when(s > 0)
                def _() -> None:
                    plgpu.barrier_arrive(refs.free.at[lax.rem(i * steps + s - 1, jnp.int32(stages))])

            return lax.optimization_barrier(acc[...])  # else what is done with the sums may move before the wait

        sums = pl.run_scoped(accumulate, plgpu.ACC((plan.rows, plan.config.columns), plan.accumulator))
        plgpu.barrier_arrive(refs.free.at[lax.rem(i * steps + steps - 1, jnp.int32(stages))])
        if plan.config.split > 1:
            sums = exchange(plan, refs, rows, sums)
        finish(plan, refs, warpgroup, column, sums)

    plgpu.wait_smem_to_gmem(0)


def exchange(plan: Plan, refs: Refs, rows: Any, sums: jax.Array) -> jax.Array:
    """Gives the cluster's CTAs the sums of the columns that they finish; returns the totals of this one's."""
    own = lax.axis_index("split")
    plgpu.barrier_arrive(refs.ring_done)
    if plan.overlapping:
        plgpu.barrier_wait(refs.ring_done)
    for i in range(plan.config.split):
        part = sums[:, i * plan.finished : (i + 1) * plan.finished]
        plgpu.async_store_smem(
            part,
            refs.sums_s.at[own, rows],
            refs.sums_full,
            cluster_idx=jnp.int32(i),
            cluster_dim="split",
            optimized=False,
        )
    plgpu.barrier_wait(refs.sums_full)
    parts = [
        plgpu.load(refs.sums_s.at[i, rows], layout=plgpu.Layout.WGMMA, optimized=False)
        for i in range(plan.config.split)
    ]
    if not plan.overlapping:
        plgpu.barrier_wait(refs.ring_done)
    return sum(parts[1:], parts[0])


def fetch_residual(plan: Plan, refs: Refs, warpgroup: jax.Array, row: Any, column: jax.Array) -> None:
    """Copies 64 rows of the residual to where the result that they are added to will be."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if refs.residual is not None:
        source = refs.residual.at[pl.ds(row, ROWS), pl.ds(column, plan.finished)]
        plgpu.copy_gmem_to_smem(source, refs.out_s.at[warpgroup], refs.residual_full.at[warpgroup])


def finish(plan: Plan, refs: Refs, warpgroup: jax.Array, column: jax.Array, sums: jax.Array) -> None:
    """Scales, adds and stores a warpgroup's sums, 64 rows at a time."""
    out_s, columns = refs.out_s.at[warpgroup], pl.ds(0, plan.finished)
    if plan.vectors:
        plgpu.barrier_wait(refs.vectors_full)
    for first in range(0, plan.rows, ROWS):
        rows = pl.ds(warpgroup * plan.rows + first, ROWS)
        total = sums[first : first + ROWS].astype(jnp.float32)

        def spread(vector: Any, layout: Any, axis: int, shape: Any = total.shape) -> jax.Array:
            value = plgpu.load(vector, layout=layout, optimized=False).astype(jnp.float32)
            return lax.broadcast_in_dim(value, shape, (axis,))

        if refs.x_scale is not None:
            total = total * spread(refs.x_scale_s.at[rows], ROW, 0)
        if refs.w_scale is not None:
            total = total * spread(refs.w_scale_s.at[columns], COLUMN, 1)
        if refs.bias is not None:
            total = total + spread(refs.bias_s.at[columns], COLUMN, 1)
        if first > 0:
            fetch_residual(plan, refs, warpgroup, rows.start, column)
        if refs.residual is not None:
            plgpu.barrier_wait(refs.residual_full.at[warpgroup])
            total = total + plgpu.load(out_s, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        out_s[...] = total.astype(plan.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[rows, pl.ds(column, plan.finished)])
    if plan.vectors:
        plgpu.barrier_arrive(refs.vectors_free)
