"""Matrix product with scales for Hopper, for many rows, in Pallas Mosaic GPU.

Persistent CTAs of two computing warpgroups and one that fetches. The fetching one issues all TMA copies, K step by K
step, in the order in which they are consumed, and runs ahead across tiles: the next tile's operands come in while the
last one's results go out. Each computing warpgroup accumulates its half of the tile in registers, scales it there, and
hands it out through shared memory, a chunk of 64 rows and 128 bytes at a time. CTAs of a cluster may share the K axis
of one tile: they exchange their sums through each other's shared memory, and each finishes a part of the columns. Sums
are added in the order of K, so results are the same bits in every run.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemm_sm90.tall_config import SHARED_MEMORY, Config

ROWS = 64  # of one wgmma
STEP = 128  # bytes along K of a stage, at most: the widest swizzle
VECTOR = 32  # floats: copies move multiples of 128 bytes
REGISTERS = 232, 40  # of each thread that computes and that fetches: the CTA's 64 Ki, moved to where they are needed
SPLIT = "split"  # the axis of a cluster


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
    """x [M, K] times w [N, K] transposed -> [M, N]; see the package's docstring."""
    (m, k), n = x.shape, w.shape[0]
    if m == 0:
        return jnp.zeros((0, n), out_dtype)
    rows = max(config.tile_m, pl.cdiv(m, 8) * 8)  # no copy is larger than its array, and rows are tiled by eight
    if rows > m:
        pad = partial(jax.tree.map, lambda a: jnp.pad(a, [(0, rows - m)] + [(0, 0)] * (a.ndim - 1)))
        x, x_scale, residual = pad((x, x_scale, residual))
    optional = {"x_scale": x_scale, "w_scale": w_scale, "bias": bias, "residual": residual}
    names = tuple(name for name, array in optional.items() if array is not None)
    if config.split_k > 1 and k * x.dtype.itemsize <= STEP:
        raise NotImplementedError(f"K={k} is too short for {config.split_k} CTAs to share")
    plan = Plan(x.shape[0], n, k, x.dtype, jnp.dtype(out_dtype), names, config)
    kernel = plgpu.kernel(
        partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.m, n), out_dtype),
        scratch_types=plan.scratch(),
        grid=(plan.clusters,),
        grid_names=("cluster",),
        cluster=(config.split_k,),
        cluster_names=(SPLIT,),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="gemm_tall",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(x, w, *(optional[name] for name in names))[:m]


class Refs(NamedTuple):
    """Global arrays, shared memory and barriers, which are named for what they say."""

    x: Any
    w: Any
    out: Any
    x_s: Any  # [stages, tile_m, step]
    w_s: Any  # [stages, tile_n, step]
    full: Any
    free: Any
    out_s: Any  # [warpgroups, buffers, 64, columns of a chunk]
    sums_s: Any  # [warpgroups, split_k, rows, columns]: what this CTA finishes, as each CTA of the cluster has it
    sums_full: Any
    vectors_full: Any
    vectors_free: Any
    residual_full: Any
    vectors_s: Any  # the tile's parts of x_scale, w_scale and bias, one after the other
    x_scale: Any = None
    w_scale: Any = None
    bias: Any = None
    residual: Any = None


@dataclass(frozen=True)
class Plan:
    """Static sizes."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    optional: tuple[str, ...]  # the arguments that are there
    config: Config

    @property
    def tile_n(self) -> int:
        """No copy is larger than its array."""
        return min(self.config.tile_n, self.n)

    @property
    def step(self) -> int:
        """Elements of K that a stage holds."""
        size = self.dtype.itemsize
        return next(width // size for width in (STEP, 64, 32) if self.k * size % width == 0)

    @property
    def steps(self) -> int:
        """Of each CTA; those past the end of K read zeros."""
        return pl.cdiv(pl.cdiv(self.k, self.step), self.config.split_k)

    @property
    def rows(self) -> int:
        """Of a warpgroup."""
        return max(self.config.tile_m // 2, ROWS)

    @property
    def columns(self) -> int:
        """Of a warpgroup."""
        return self.tile_n if self.config.tile_m > ROWS else self.tile_n // 2

    @property
    def finished(self) -> int:
        """Columns of a warpgroup that it scales and stores."""
        return self.columns // self.config.split_k

    @property
    def chunk(self) -> int:
        """Columns that go out at a time."""
        size = self.out_dtype.itemsize
        both = math.gcd(self.finished, self.n)
        return next(width // size for width in (128, 64, 32, 16) if both % (width // size) == 0)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First row and column of each chunk of a warpgroup."""
        return [(i, j) for i in range(0, self.rows, ROWS) for j in range(0, self.finished, self.chunk)]

    @property
    def adds_residual(self) -> bool:
        return "residual" in self.optional

    @property
    def vectors(self) -> dict[str, tuple[int, int]]:
        """Where each vector's part lies in shared memory: its begin and size."""
        columns = pl.cdiv(self.tile_n, VECTOR) * VECTOR
        sizes = {"x_scale": self.config.tile_m, "w_scale": columns, "bias": columns}
        names = [name for name in sizes if name in self.optional]
        return {name: (sum(sizes[before] for before in names[:i]), sizes[name]) for i, name in enumerate(names)}

    def shared_memory(self, stages: int, buffers: int) -> int:
        """Bytes that a CTA takes with so many K steps in flight and chunks of each warpgroup on their way out."""
        config = self.config
        taken = stages * (config.tile_m + self.tile_n) * self.step * self.dtype.itemsize
        taken += 2 * buffers * ROWS * self.chunk * self.out_dtype.itemsize
        taken += 4 * config.tile_m * self.tile_n if config.split_k > 1 else 0
        taken += pl.cdiv(4 * sum(size for _, size in self.vectors.values()), 1024) * 1024
        return taken + 512  # barriers

    @property
    def stages(self) -> int:
        """As configured, or what shared memory holds."""
        for stages in range(self.config.stages, 1, -1):
            if self.shared_memory(stages, 1) <= SHARED_MEMORY:
                return stages
        raise NotImplementedError(
            f"{self.config} needs {self.shared_memory(2, 1)} bytes of shared memory, a CTA has {SHARED_MEMORY}"
        )

    @property
    def buffers(self) -> int:
        """Chunks of a warpgroup that shared memory holds beside the rest, up to four."""
        return max(b for b in range(1, min(len(self.chunks), 4) + 1) if b == 1 or self._fits(b))

    def _fits(self, buffers: int) -> bool:
        return self.shared_memory(self.stages, buffers) <= SHARED_MEMORY

    @property
    def accumulator(self) -> Any:
        return jnp.int32 if self.dtype == jnp.int8 else jnp.float32

    @property
    def tiles(self) -> tuple[int, int]:
        """Along M and N."""
        return pl.cdiv(self.m, self.config.tile_m), pl.cdiv(self.n, self.tile_n)

    @property
    def clusters(self) -> int:
        """One CTA each, or those that share K; they exchange sums once in their lives, and so have one tile."""
        tiles = math.prod(self.tiles)
        return tiles if self.config.split_k > 1 else min(tiles, self.config.ctas)

    def slot(self, number: jax.Array) -> jax.Array:
        """Where the operands of a CTA's K step lie."""
        return lax.rem(number, jnp.int32(self.stages))

    def scratch(self) -> dict[str, Any]:
        stages, split, vectors = self.stages, self.config.split_k, self.vectors.values()
        return {
            "x_s": tiled((stages, self.config.tile_m, self.step), self.dtype),
            "w_s": tiled((stages, self.tile_n, self.step), self.dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "out_s": tiled((2, self.buffers, ROWS, self.chunk), self.out_dtype),
            "sums_s": tiled((2, split, self.rows, self.finished), self.accumulator) if split > 1 else None,
            "sums_full": plgpu.Barrier(num_arrivals=2 * split) if split > 1 else None,
            "vectors_s": plgpu.SMEM((sum(size for _, size in vectors),), jnp.float32) if vectors else None,
            "vectors_full": plgpu.Barrier(num_arrivals=len(vectors)) if vectors else None,
            "vectors_free": plgpu.Barrier(num_arrivals=2) if vectors else None,
            "residual_full": plgpu.Barrier(num_barriers=2 * self.buffers) if self.adds_residual else None,
        }


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory as TMA and wgmma want it: rows of at most 128 bytes, swizzled."""
    size = jnp.dtype(dtype).itemsize
    width = next(width for width in (128, 64, 32, 16) if shape[-1] * size % width == 0)
    transforms = (plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Tile(NamedTuple):
    """Where a CTA's tile begins."""

    row: jax.Array
    column: jax.Array


class Place(NamedTuple):
    """What a warpgroup finishes of a tile: where the tile begins, and where in it the warpgroup's part does."""

    wg: jax.Array
    row: jax.Array
    row_in_tile: Any
    column: jax.Array
    column_in_tile: Any

    def chunk(self, plan: Plan, c: int) -> tuple[pl.Slice, pl.Slice]:
        """The c-th chunk's rows and columns of the result."""
        i, j = plan.chunks[c]
        row, column = self.row + self.row_in_tile + i, self.column + self.column_in_tile + j
        return pl.ds(row, ROWS), pl.ds(column, plan.chunk)


def for_each_tile(plan: Plan, body: Callable[[Tile, jax.Array], None]) -> jax.Array:
    """Calls body(tile, n) for the n-th tile of this CTA; returns how many there were."""
    cluster, (along_m, along_n) = lax.axis_index("cluster"), plan.tiles
    count = (along_m * along_n - cluster + plan.clusters - 1) // plan.clusters

    @pl.loop(0, count)
    def _(i: jax.Array) -> None:
        number, width = cluster + i * plan.clusters, min(plan.config.group, along_m)
        row, column = plgpu.planar_snake(number, plan.tiles, 0, width)
        body(Tile(row * plan.config.tile_m, column * plan.tile_n), i)

    return count


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
    """The fetching warpgroup: copies the operands and vectors of every tile of this CTA."""
    steps, stages = plan.steps, plan.stages
    first = lax.axis_index(SPLIT) * steps

    def fetch_tile(tile: Tile, n: jax.Array) -> None:
        @pl.loop(0, steps)
        def _(s: jax.Array) -> None:
            number = n * steps + s
            slot = plan.slot(number)
            pl.when(number >= stages)(lambda: plgpu.barrier_wait(refs.free.at[slot]))
            at = pl.ds((first + s) * plan.step, plan.step)
            x, w = refs.x.at[pl.ds(tile.row, plan.config.tile_m), at], refs.w.at[pl.ds(tile.column, plan.tile_n), at]
            plgpu.copy_gmem_to_smem(x, refs.x_s.at[slot], refs.full.at[slot])
            plgpu.copy_gmem_to_smem(w, refs.w_s.at[slot], refs.full.at[slot])

        if plan.vectors:
            pl.when(n > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))
        for name, (begin, size) in plan.vectors.items():
            source = getattr(refs, name).at[pl.ds(tile.row if name == "x_scale" else tile.column, size)]
            plgpu.copy_gmem_to_smem(source, refs.vectors_s.at[pl.ds(begin, size)], refs.vectors_full)

    tiles = for_each_tile(plan, fetch_tile)
    # No barrier is left in the middle of a phase, and no CTA leaves while another still signals it.
    if plan.vectors:
        pl.when(tiles > 0)(lambda: plgpu.barrier_wait(refs.vectors_free))

    @pl.loop(jnp.maximum(tiles * steps - stages, 0), tiles * steps)
    def _(number: jax.Array) -> None:
        plgpu.barrier_wait(refs.free.at[plan.slot(number)])


def compute(plan: Plan, refs: Refs, wg: jax.Array) -> None:
    """A computing warpgroup: its half of every tile of this CTA."""
    steps = plan.steps
    by_rows = plan.config.tile_m > ROWS
    rows = pl.ds(wg * plan.rows, plan.rows) if by_rows else pl.ds(0, plan.rows)
    columns = pl.ds(0, plan.columns) if by_rows else pl.ds(wg * plan.columns, plan.columns)

    def compute_tile(tile: Tile, n: jax.Array) -> None:
        part = lax.axis_index(SPLIT) * plan.finished if plan.config.split_k > 1 else 0
        place = Place(wg, tile.row, rows.start, tile.column, columns.start + part)
        if plan.adds_residual:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for c in range(plan.buffers):
                load_residual(plan, refs, place, c)

        def accumulate(acc: Any) -> jax.Array:
            @pl.loop(0, steps)
            def _(s: jax.Array) -> None:
                slot = plan.slot(n * steps + s)
                plgpu.barrier_wait(refs.full.at[slot])
                plgpu.wgmma(acc, refs.x_s.at[slot, rows], refs.w_s.at[slot, columns].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                pl.when(s > 0)(lambda: plgpu.barrier_arrive(refs.free.at[plan.slot(n * steps + s - 1)]))

            return lax.optimization_barrier(acc[...])  # LLVM doesn't know that accumulators change until the wait

        sums = pl.run_scoped(accumulate, plgpu.ACC((plan.rows, plan.columns), plan.accumulator))
        plgpu.barrier_arrive(refs.free.at[plan.slot(n * steps + steps - 1)])
        finish(plan, refs, place, exchange(plan, refs, wg, sums))

    for_each_tile(plan, compute_tile)
    plgpu.wait_smem_to_gmem(0)


def exchange(plan: Plan, refs: Refs, wg: jax.Array, sums: jax.Array) -> Callable[[int, int], jax.Array]:
    """What gives a chunk of the warpgroup's finished sums by its first row and column."""
    if plan.config.split_k == 1:
        return lambda i, j: sums[i : i + ROWS, j : j + plan.chunk]
    for peer in range(plan.config.split_k):
        part = sums[:, peer * plan.finished : (peer + 1) * plan.finished]
        target = refs.sums_s.at[wg, lax.axis_index(SPLIT)]
        # One barrier for both warpgroups: JAX 0.11.2 adds the offset of an indexed one twice.
        plgpu.async_store_smem(part, target, refs.sums_full, cluster_idx=jnp.int32(peer), cluster_dim=SPLIT)
    plgpu.barrier_wait(refs.sums_full)

    def total(i: int, j: int) -> jax.Array:
        places = [refs.sums_s.at[wg, s, pl.ds(i, ROWS), pl.ds(j, plan.chunk)] for s in range(plan.config.split_k)]
        return functools.reduce(operator.add, [plgpu.load(place, layout=plgpu.Layout.WGMMA) for place in places])

    return total


def load_residual(plan: Plan, refs: Refs, place: Place, c: int) -> None:
    """The c-th chunk's residual, to where the chunk will go out from."""
    b = c % plan.buffers
    ready = refs.residual_full.at[place.wg * plan.buffers + b]
    plgpu.copy_gmem_to_smem(refs.residual.at[place.chunk(plan, c)], refs.out_s.at[place.wg, b], ready)


def finish(plan: Plan, refs: Refs, place: Place, sums: Callable[[int, int], jax.Array]) -> None:
    """Scales, adds and stores what a warpgroup finishes of a tile."""
    behind = min(1, plan.buffers - 1)  # stores that may still be read while the residual of another chunk comes in
    if plan.vectors:
        plgpu.barrier_wait(refs.vectors_full)
    for c, (i, j) in enumerate(plan.chunks):
        buffer, shape = refs.out_s.at[place.wg, c % plan.buffers], (ROWS, plan.chunk)
        part = sums(i, j).astype(jnp.float32)

        def spread(name: str, begin: Any, axis: int, shape: tuple[int, int] = shape) -> jax.Array:
            vector = refs.vectors_s.at[pl.ds(plan.vectors[name][0] + begin, shape[axis])]
            value = plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
            return lax.broadcast_in_dim(value, shape, (axis,))

        if "x_scale" in plan.optional:
            part = part * spread("x_scale", place.row_in_tile + i, 0)
        if "w_scale" in plan.optional:
            part = part * spread("w_scale", place.column_in_tile + j, 1)
        if "bias" in plan.optional:
            part = part + spread("bias", place.column_in_tile + j, 1)
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
