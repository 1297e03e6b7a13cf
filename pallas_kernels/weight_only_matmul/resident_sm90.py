"""The kernel of weight_only_matmul for few rows of x on sm_90 that stay in shared memory, beside a ring of codes.

A persistent CTA keeps its part of x in the order in which threads multiply it. One warp copies codes, and another
scales, into a ring of stages, on and on across tiles of 16 rows of the weight, so that memory always has as many bytes
to bring as the ring holds. Each computing warp has its own 128 columns of a stage and goes from stage to stage without
the others; at a tile's end it leaves its sums, which one warpgroup adds in order when the next tile is through.

In tiles of 8 rows by 128 bytes, whose 16-byte units are swizzled by row, threads of rows r and r + 4 load beside each
other: they never meet in a bank. So row l of a product is row l / 2 + 4 (l % 2) of its eight.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.hopper import SHARED_MEMORY
from pallas_kernels.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.smem_sm90 import shared_bytes, swizzled
from pallas_kernels.weight_only_matmul import resident_interpreted
from pallas_kernels.weight_only_matmul.emitter_sm90 import StreamEmitter
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, Codes, pair_table
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan
from pallas_kernels.weight_only_matmul.resident_sizes import SWIZZLE, TILE, Sizes
from pallas_kernels.weight_only_matmul.stream_sm90 import CHUNK, TOKENS, Stream, add_parts

PIECES = 4  # of x that a thread has in flight


def scratch(plan: Plan, names: tuple[str, ...]) -> dict[str, Any]:
    """Shared memory and barriers, by name, with as many stages as are asked for and fit."""
    for stages in range(plan.config.stages, 1, -1):
        found = _scratch(plan, names, stages)
        if shared_bytes(found) <= SHARED_MEMORY:
            return found
    raise NotImplementedError(
        f"{plan.config} needs more shared memory for {plan.format.name} and M={plan.m}, K={plan.k}: "
        f"{shared_bytes(_scratch(plan, names, 2))} bytes for two stages; a larger split needs less"
    )


def _scratch(plan: Plan, names: tuple[str, ...], stages: int) -> dict[str, Any]:
    sizes, config = Sizes(plan), plan.config
    found: dict[str, Any] = {
        "w_s": swizzled((stages, TILE, sizes.row_bytes), plan.format.storage_dtype, SWIZZLE),
        "x_s": plgpu.SMEM((sizes.of_part, 4, plan.m, 32), plan.dtype),
        "parts_s": plgpu.SMEM((2, config.warpgroups, ROWS, config.tokens), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=1 + len(_vectors(plan, names)), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        "prepared": plgpu.Barrier(num_arrivals=config.warpgroups),
        "summed": plgpu.Barrier(num_arrivals=config.warpgroups),
    }
    for name in _vectors(plan, names):
        found[f"{name}_s"] = plgpu.SMEM((stages, sizes.groups, TILE), plan.vector_dtype(name))
    if "table" in names:
        found["table_s"] = plgpu.SMEM((256, 32), jnp.int32)
        found["table_full"] = plgpu.Barrier()
    return found


def _vectors(plan: Plan, names: tuple[str, ...]) -> list[str]:
    """What is copied with codes."""
    return [name for name in ("scales", "zeros") if name in names and plan.by_group]


def product(plan: Plan, x: jax.Array, w: QuantizedWeight, interpret: plgpu.InterpretGPUParams | None) -> jax.Array:
    """As mosaic_sm90.product: [split, M, N']."""
    config, sizes = plan.config, Sizes(plan)
    if plan.m > config.tokens:
        raise NotImplementedError(f"{config} takes at most {config.tokens} rows of x, not M={plan.m}")
    if (config.split - 1) * sizes.of_part >= sizes.chunks:
        raise NotImplementedError(f"K={plan.k} has fewer parts of whole copies than split={config.split}")
    arrays = {"x": x, "w": w.values, "scales": group_scales(w), "zeros": w.zeros}
    if w.format.codes == "nf4":
        arrays["table"] = pair_table(x.dtype)
    arrays = {name: array for name, array in arrays.items() if array is not None}
    kernel = plgpu.kernel(
        partial(_kernel, plan, tuple(arrays)),
        out_type=jax.ShapeDtypeStruct((config.split, plan.m, plan.n), plan.out_dtype),
        scratch_types=scratch(plan, tuple(arrays)),
        grid=(sizes.ctas,),
        grid_names=("worker",),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="weight_only_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(*arrays.values())


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    sources, out = dict(zip(names, refs)), refs[len(names)]
    config, sizes = plan.config, Sizes(plan)
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    part, first = lax.rem(worker, jnp.int32(config.split)), worker // config.split
    stride = sizes.ctas // config.split
    mine = (sizes.tiles - first + stride - 1) // stride

    def tile(i: jax.Array) -> jax.Array:
        return first + i * stride

    @pl.when(warpgroup < config.warpgroups)
    def _compute() -> None:
        prepare(plan, sources["x"], scratch["x_s"], part, warpgroup)
        plgpu.barrier_arrive(scratch["prepared"])
        plgpu.barrier_wait(scratch["prepared"])
        if "table" in names:
            plgpu.barrier_wait(scratch["table_full"])

        def finish(i: jax.Array) -> None:
            plgpu.barrier_wait(scratch["summed"])

            @pl.when(warpgroup == lax.rem(i, jnp.int32(config.warpgroups)))
            def _mine() -> None:
                by_row = {"scales": sources["scales"]} if not plan.by_group else {}
                parts = scratch["parts_s"].at[lax.rem(i, jnp.int32(2))]
                (resident_interpreted.finish if plan.interpreted else _finish)(plan, tile(i), part, parts, out, by_row)

        @pl.loop(0, mine)
        def _tile(i: jax.Array) -> None:
            sums = add_stages(plan, names, sources, scratch, warpgroup, i, tile(i), part)
            pl.when(i > 0)(lambda: finish(i - 1))
            scratch["parts_s"].at[lax.rem(i, jnp.int32(2)), warpgroup][...] = sums
            plgpu.barrier_arrive(scratch["summed"])

        finish(mine - 1)

    @pl.when(warpgroup == config.warpgroups)
    def _copy() -> None:
        @plgpu.warp_map
        def _warps(warp: jax.Array) -> None:
            for number, name in enumerate(("w", *_vectors(plan, names))):
                pl.when(warp == number)(partial(copy_stages, plan, name, sources, scratch, mine, tile, part))
            if "table" in names:

                @pl.when(warp == 3)
                def _table() -> None:
                    plgpu.copy_gmem_to_smem(sources["table"], scratch["table_s"], scratch["table_full"])


def copy_stages(plan: Plan, name: str, sources: Any, scratch: Any, mine: jax.Array, tile: Any, part: jax.Array) -> None:
    """One warp's copies: codes, scales or zeros."""
    sizes, free = Sizes(plan), scratch["free"]
    stages = free.shape[0]

    @pl.loop(0, mine)
    def _tile(i: jax.Array) -> None:
        @pl.loop(0, sizes.steps)
        def _step(s: jax.Array) -> None:
            number = i * sizes.steps + s
            slot = lax.rem(number, jnp.int32(stages))
            pl.when(number >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            rows, chunk = pl.ds(tile(i) * TILE, TILE), part * sizes.of_part + s * sizes.warps
            if name == "w":
                place = rows, pl.ds(chunk * (CHUNK // sizes.width), sizes.row_bytes)
            else:
                assert plan.format.group is not None
                place = pl.ds(chunk * (CHUNK // plan.format.group), sizes.groups), rows
            target = scratch[f"{name}_s"].at[slot]
            plgpu.copy_gmem_to_smem(sources[name].at[*place], target, scratch["full"].at[slot])

    @pl.loop(jnp.maximum(mine * sizes.steps - stages, 0), mine * sizes.steps)
    def _drain(number: jax.Array) -> None:  # no barrier is left in the middle of a phase
        plgpu.barrier_wait(free.at[lax.rem(number, jnp.int32(stages))])


def add_stages(
    plan: Plan, names: tuple[str, ...], sources: Any, scratch: Any, warpgroup: jax.Array, i: jax.Array,
    tile: jax.Array, part: jax.Array,
) -> jax.Array:  # fmt: skip
    """The sums of the CTA's i-th tile: of each warp of the warpgroup 16 rows, [64, tokens] float32."""
    sizes, full, free = Sizes(plan), scratch["full"], scratch["free"]
    chunks = jnp.minimum(sizes.chunks - part * sizes.of_part, sizes.of_part)

    def step(s: jax.Array, sums: jax.Array) -> jax.Array:
        slot = lax.rem(i * sizes.steps + s, jnp.int32(full.shape[0]))
        plgpu.barrier_wait(full.at[slot])
        read = {name: scratch[f"{name}_s"].at[slot] for name in ("w", *_vectors(plan, names))}
        read["x"] = scratch["x_s"]
        if "table" in names:
            read["table"] = scratch["table_s"]
        if "zeros" in names and not plan.by_group:
            read["zeros"] = sources["zeros"]
        stage = resident_interpreted.stage if plan.interpreted else _stage
        sums = stage(plan, read, sums, tile, s * sizes.warps, chunks, warpgroup)
        if plan.interpreted:  # it wants loads fenced from the next copy, which waits for the barrier
            plgpu.commit_smem()
        plgpu.barrier_arrive(free.at[slot])
        return sums

    zeros = jnp.zeros((ROWS, plan.config.tokens), jnp.float32)
    return lax.fori_loop(0, sizes.steps, step, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))


def prepare(plan: Plan, x: Any, target: Any, part: jax.Array, warpgroup: jax.Array) -> None:
    """The CTA's part of x in the order of products: of each chunk, by 8 columns that a thread multiplies at once, rows
    of x, and of each the columns of threads c = 0 to 3."""
    if plan.interpreted:
        pl.when(warpgroup == 0)(lambda: resident_interpreted.prepare(plan, x, target, part))
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), plgpu.RefType(), plgpu.RefType()), return_type=())
    def run(_: Any, part: mgpu.FragmentedArray, x: ir.Value, target: ir.Value) -> tuple[()]:
        pointers = {"x": mgpu.utils.memref_ptr(x), "x_s": mgpu.utils.memref_ptr(target)}
        prepare_x(plan, StreamEmitter(plan.dtype, pointers), part.registers.item())
        return ()

    run(part, x, target)


def prepare_x(plan: Plan, emit: Any, part: Any) -> None:
    """What one thread does of that: the 32 columns of a chunk that one thread multiplies, of one row of x, several such
    pieces loaded before the first is stored."""
    sizes = Sizes(plan)
    columns = Stream.__new__(Stream)
    Codes.__init__(columns, plan.format, plan.dtype, emit)
    threads, count = sizes.warps * 32, 4 * sizes.of_part * plan.m
    for begin in range(0, count, PIECES * threads):
        found = []
        for first in range(begin, min(begin + PIECES * threads, count), threads):
            item = emit.add(emit.thread(), emit.c(first))
            column, rest = emit.bits_and(item, 3), emit.shift_right(item, 2)
            chunk, token = emit.divided(rest, plan.m)
            at = emit.add(emit.times(chunk, 256 * plan.m), emit.times(token, 64))
            at = emit.add(at, emit.times(column, 16))
            # Chunks that do not exist are never multiplied, but must not be read either.
            whole = emit.minimum(emit.add(chunk, emit.times(part, sizes.of_part)), sizes.chunks - 1)
            place = emit.add(emit.times(token, 2 * plan.k), emit.times(whole, 2 * CHUNK))
            place = emit.add(place, emit.times(column, 64 if plan.format.packed else 32))
            found.append((item, at, columns.fetch_x(place, 0)))
        for item, at, pairs in found:

            def store(at: Any = at, pairs: list[Any] = pairs) -> None:
                for j in range(4):
                    emit.store("x_s", at, 64 * plan.m * j, pairs[4 * j : 4 * j + 4])

            if count % threads:
                emit.only(emit.below(item, count), store)
            else:
                store()


class Resident(Stream):
    """What one thread does with a stage, in operations of `emit`: a StreamEmitter, or a test's stand-in for one."""

    def __init__(self, plan: Plan, emit: Any, tile: Any) -> None:
        Codes.__init__(self, plan.format, plan.dtype, emit)
        self.plan, sizes = plan, Sizes(plan)
        self.further = [0, 8]
        above, self.column = emit.shift_right(self.lane, 2), emit.bits_and(self.lane, 3)
        self.row = emit.add(emit.shift_right(above, 1), emit.times(emit.bits_and(above, 1), 4))
        self.warp = emit.shift_right(emit.thread(), 5)
        self.below = 8 * sizes.row_bytes
        if plan.format.packed:  # two chunks are a tile's 128 bytes
            unit = emit.add(self.column, emit.times(emit.bits_and(self.warp, 1), 4))
            first = emit.shift_right(self.warp, 1)
        else:
            unit, first = self.column, self.warp
        units = emit.times(emit.exclusive_or(unit, self.row), 16)
        self.w = emit.add(emit.times(first, 8 * SWIZZLE), emit.add(emit.times(self.row, SWIZZLE), units))
        self.x = []
        for begin in range(0, plan.config.tokens, TOKENS):
            token = emit.minimum(emit.add(above, emit.c(begin)), plan.m - 1)  # what does not exist is not stored
            self.x.append(emit.add(emit.times(token, 64), emit.times(self.column, 16)))
        if "zeros" in emit.names and not plan.by_group:
            emit.advance("zeros", tile, TILE)

    def stage(self, total: list[Any], first: Any, chunks: Any) -> list[Any]:
        """`total` with the products of the warp's chunk of a stage whose first is `first`, where that is one of
        `chunks` in all."""
        emit = self.emit
        chunk = emit.add(first, self.warp)

        def more() -> list[Any]:
            vectors = self.load_vectors(0) or self.by_row()
            return self.multiply(total, self.load_codes(0), self.load_some_x(chunk), vectors)

        return emit.either(emit.less(chunk, chunks), more, total) if Sizes(self.plan).ragged else more()

    def load_codes(self, chunk: int) -> list[list[Any]]:
        emit = self.emit
        places = [self.w] if self.format.packed else [self.w, emit.bits_xor(self.w, 64)]
        return [[word for place in places for word in emit.load_words("w", place, lower)] for lower in (0, self.below)]

    def load_some_x(self, chunk: Any) -> list[list[Any]]:
        emit, m = self.emit, self.plan.m
        first = emit.times(chunk, 256 * m)
        return [
            [pair for j in range(4) for pair in emit.load_words("x", emit.add(first, place), 64 * m * j)]
            for place in self.x
        ]

    def load_vectors(self, chunk: int) -> list[list[tuple[Any, Any]]]:
        fmt, emit = self.format, self.emit
        if fmt.group is None:
            return []
        found: list[list[tuple[Any, Any]]] = [[] for _ in self.further]
        for within in self.groups_of_runs():
            group = emit.add(emit.times(self.warp, CHUNK // fmt.group), within)
            at = emit.add(emit.times(group, TILE), self.row)
            for runs, further in zip(found, self.further):
                zero = emit.load_stored("zeros", at, further) if "zeros" in emit.names else None
                runs.append((zero, emit.load_stored("scales", emit.times(at, 2), 2 * further)))
        return found


def _stage(
    plan: Plan, read: dict[str, Any], sums: jax.Array, tile: jax.Array, first: jax.Array, chunks: jax.Array,
    warpgroup: jax.Array,
) -> jax.Array:  # fmt: skip
    """Sums with a stage's, [64, tokens] in WGMMA's layout: mma's own, by warp."""
    del warpgroup
    names, layout, splat = tuple(read), plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())
    swizzle = (plgpu.TilingTransform((8, SWIZZLE)), plgpu.SwizzleTransform(SWIZZLE))  # type: ignore[abstract]

    @plgpu.inline_mgpu(
        arg_types=(layout, splat, splat, splat, *(plgpu.RefType(swizzle if name == "w" else ()) for name in names)),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=layout),
    )
    def compute(_: Any, sums: Any, tile: Any, first: Any, chunks: Any, *arrays: ir.Value) -> mgpu.FragmentedArray:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        total = [
            vector.extract(pair, [], ir.DenseI64ArrayAttr.get([i])) for pair in sums.registers.flat for i in range(2)
        ]
        thread = Resident(plan, StreamEmitter(plan.dtype, pointers), tile.registers.item())
        total = thread.stage(total, first.registers.item(), chunks.registers.item())
        registers = np.empty(sums.registers.shape, object)
        two = ir.VectorType.get((2,), ir.F32Type.get())
        registers.flat = [vector.from_elements(two, total[i : i + 2]) for i in range(0, len(total), 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return compute(sums, tile, first, chunks, *read.values())


def _finish(plan: Plan, tile: jax.Array, part: jax.Array, parts: Any, out: Any, vectors: dict[str, Any]) -> None:
    """Adds the parts of K in order, scales rows, and stores what exists."""
    names, splat = ("parts", "out", *vectors), plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(splat, splat, *(plgpu.RefType(),) * len(names)), return_type=())
    def add(_: Any, tile: mgpu.FragmentedArray, part: mgpu.FragmentedArray, *arrays: ir.Value) -> tuple[()]:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        emit = StreamEmitter(plan.dtype, pointers)
        emit.advance("out", part.registers.item(), plan.m * plan.n * plan.out_dtype.itemsize)
        add_parts(plan, emit, tile.registers.item(), partial(row_of, emit))
        return ()

    add(tile, part, parts, out, *vectors.values())


def row_of(emit: Any, row: Any) -> Any:
    """ROW_ORDER's."""
    half = emit.shift_right(emit.bits_and(row, 6), 1)
    return emit.add(emit.bits_and(row, 8), emit.add(half, emit.times(emit.bits_and(row, 1), 4)))
