"""The kernel of weight_only_matmul for few rows of x on sm_90: codes go from memory straight into registers.

A warp has 16 or more rows of the weight and every warps-th 128 columns of K. The order of columns within a product
does not matter as long as both operands have the same one, so each thread takes 32 (of bytes: twice 16) columns that
follow each other, in loads of 16 bytes, and of x the same. Products are those of single warps, which wait for each
other only when their sums are added at the end, and a CTA is small: loads of one hide what others compute, and no ring
has to be filled before the first product.
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

from pallas_kernels.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.weight_only_matmul.emitter_sm90 import StreamEmitter
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, Codes, pair_table
from pallas_kernels.weight_only_matmul.plan_sm90 import Plan

CHUNK = 128  # columns that a warp multiplies at a time
TOKENS = 8  # rows of x in a product
THREADS = 128  # of a warpgroup


def scratch(plan: Plan, names: tuple[str, ...]) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    warpgroups = plan.config.warpgroups
    rows = ROWS * plan.config.row_tiles
    found: dict[str, Any] = {"parts_s": plgpu.SMEM((warpgroups, rows, plan.config.tokens), jnp.float32)}
    if warpgroups > 1:
        found["summed"] = plgpu.Barrier(num_arrivals=warpgroups)
    if "table" in names:
        found["table_s"] = plgpu.SMEM((256, 32), jnp.int32)
    return found


def product(plan: Plan, x: jax.Array, w: QuantizedWeight, interpret: plgpu.InterpretGPUParams | None) -> jax.Array:
    """As mosaic_sm90.product: [1, M, N']."""
    if plan.m > plan.config.tokens:
        raise NotImplementedError(f"{plan.config} streams for at most {plan.config.tokens} rows of x, not M={plan.m}")
    if plan.n % plan.config.rows:
        raise NotImplementedError(
            f"tiles have {plan.config.rows} rows of the weight, which are {plan.n}: {plan.config} wants a larger fold"
        )
    arrays = {"x": x, "w": w.values, "scales": group_scales(w), "zeros": w.zeros}
    if w.format.codes == "nf4":
        arrays["table"] = pair_table(x.dtype)[:, 0]
    arrays = {name: array for name, array in arrays.items() if array is not None}
    kernel = plgpu.kernel(
        partial(_kernel, plan, tuple(arrays)),
        out_type=jax.ShapeDtypeStruct((plan.m, plan.n), plan.out_dtype),
        scratch_types=scratch(plan, tuple(arrays)),
        grid=(plan.n // plan.config.rows,),
        grid_names=("worker",),
        num_threads=plan.config.warpgroups,
        thread_name="warpgroup",
        kernel_name="weight_only_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(*arrays.values())[None]


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    """Arrays in global memory -> out [M, N], of which a CTA has config.rows columns."""
    sources, out = dict(zip(names, refs)), refs[len(names)]
    tile, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    parts = scratch["parts_s"]
    parts.at[warpgroup][...] = _sums(plan, sources, scratch, tile)
    if plan.config.warpgroups > 1:
        plgpu.barrier_arrive(scratch["summed"])
        plgpu.barrier_wait(scratch["summed"])

    @pl.when(warpgroup == 0)
    def _first() -> None:
        vectors = {"scales": sources["scales"]} if plan.format.group is None else {}
        _finish(plan, tile, parts, out, vectors)


def _sums(plan: Plan, sources: dict[str, Any], scratch: dict[str, Any], tile: jax.Array) -> jax.Array:
    """[64 row_tiles, tokens] of a warpgroup: of each row tile 64 / fold rows of the first part of K, then the next."""
    shape = ROWS * plan.config.row_tiles, plan.config.tokens
    read = dict(sources)
    if "table" in sources:
        read |= {"bytes": sources["table"], "table": scratch["table_s"]}
    names = tuple(read)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()), *(plgpu.RefType(),) * len(names)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout),
    )
    def compute(_: Any, tile: mgpu.FragmentedArray, *arrays: ir.Value) -> mgpu.FragmentedArray:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        sums = Stream(plan, StreamEmitter(plan.dtype, pointers), tile.registers.item()).sums()
        registers = np.empty(layout.to_mgpu().registers_shape(shape), object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers.flat = [vector.from_elements(pair, sums[i : i + 2]) for i in range(0, len(sums), 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return compute(tile, *read.values())


class Stream(Codes):
    """What one thread does, in operations of `emit`: a StreamEmitter, or a test's stand-in for one."""

    def __init__(self, plan: Plan, emit: Any, tile: Any) -> None:
        super().__init__(plan.format, plan.dtype, emit)
        self.plan, config, fmt = plan, plan.config, plan.format
        kept = ROWS // config.fold
        # Of a thread's rows of the weight, how far they are from the first.
        self.further = [r * kept + lower for r in range(config.row_tiles) for lower in (0, 8)]
        thread, above, self.column = emit.thread(), emit.shift_right(self.lane, 2), emit.bits_and(self.lane, 3)
        in_operand = emit.add(emit.times(emit.bits_and(emit.shift_right(thread, 5), 3), 16), above)
        part = emit.shift_right(in_operand, kept.bit_length() - 1)
        self.part = emit.add(part, emit.times(emit.shift_right(thread, 7), config.fold))
        self.parts = config.fold * config.warpgroups
        row = emit.bits_and(in_operand, kept - 1)
        width = 2 if fmt.packed else 1  # columns of a byte
        self.row_bytes = plan.k // width
        emit.advance("w", tile, config.rows * self.row_bytes)
        self.w = emit.add(emit.times(row, self.row_bytes), emit.times(self.part, CHUNK // width))
        self.w = emit.add(self.w, emit.times(self.column, 16))
        column = emit.add(emit.times(self.part, 2 * CHUNK), emit.times(self.column, 64 if fmt.packed else 32))
        self.x = []
        for first in range(0, config.tokens, TOKENS):
            token = emit.minimum(emit.add(above, emit.c(first)), plan.m - 1)  # what does not exist is not stored
            self.x.append(emit.add(emit.times(token, 2 * plan.k), column))
        for name in ("scales", "zeros"):
            if name in emit.names:
                emit.advance(name, tile, config.rows * plan.vector_dtype(name).itemsize)
        self.row = row

    def sums(self) -> list[Any]:
        """By 16 rows of the weight, 8 of x, and rows l and l + 8: of two rows of x, float32."""
        emit, chunks = self.emit, self.plan.k // CHUNK
        whole, rest = divmod(chunks, self.parts)
        ahead = min(self.plan.config.stages, whole)
        codes = [self.load_codes(i) for i in range(ahead)]
        vectors = [self.load_vectors(i) for i in range(ahead)]
        by_row = self.by_row()
        if "table" in emit.names:
            if self.plan.config.warpgroups == 1:
                self.fill_table()
            else:
                emit.only(emit.below(emit.thread(), THREADS), self.fill_table)
            emit.synchronize()
        total = [emit.zero()] * (2 * len(self.further) * len(self.x))
        for i in range(whole):
            total = self.multiply(total, codes[i], self.load_x(i), vectors[i] or by_row)
            if i + ahead < whole:
                codes.append(self.load_codes(i + ahead))
                vectors.append(self.load_vectors(i + ahead))
        if rest:

            def more() -> list[Any]:
                loaded = self.load_codes(whole), self.load_x(whole), self.load_vectors(whole) or by_row
                return self.multiply(total, *loaded)

            total = emit.either(emit.below(self.part, rest), more, total)
        return total

    def load_codes(self, chunk: int) -> list[list[Any]]:
        """For each row the words of the thread's columns."""
        width = 2 if self.format.packed else 1
        first = chunk * self.parts * CHUNK // width
        halves = range(first, first + CHUNK // width, 64)  # that four threads load at once
        return [
            [word for place in halves for word in self.emit.stream("w", self.w, place + further * self.row_bytes)]
            for further in self.further
        ]

    def load_x(self, chunk: int) -> list[list[Any]]:
        """For each row of x pairs in the order in which codes are decoded, of bytes 16 columns and then 16."""
        first = 2 * chunk * self.parts * CHUNK
        places = (0, 16, 32, 48) if self.format.packed else (0, 16, CHUNK, CHUNK + 16)
        rows = [[pair for more in places for pair in self.emit.fetch("x", x, first + more, 4)] for x in self.x]
        return [self.by_bytes(pairs) for pairs in rows] if self.format.codes == "nf4" else rows

    def load_vectors(self, chunk: int) -> list[list[tuple[Any, Any]]]:
        """For each row and each run of columns of the thread's, the zero and the scale as they are stored."""
        fmt, emit = self.format, self.emit
        if fmt.group is None:
            return []
        groups = CHUNK // fmt.group  # of a chunk
        found: list[list[tuple[Any, Any]]] = [[] for _ in self.further]
        for within in self.groups_of_runs():
            group = emit.add(emit.times(self.part, groups), within)
            at = emit.add(emit.times(group, self.plan.n), self.row)
            for runs_of_row, further in zip(found, self.further):
                more = chunk * self.parts * groups * self.plan.n + further
                zero = emit.load_vector("zeros", at, more) if "zeros" in emit.names else None
                runs_of_row.append((zero, emit.load_vector("scales", emit.times(at, 2), 2 * more)))
        return found

    def groups_of_runs(self) -> list[Any]:
        """Which group of a chunk each of the thread's runs of columns is in: one run of 32 columns where two share a
        byte, two of 16 otherwise, or one where that is the same group."""
        emit, fmt = self.emit, self.format
        assert fmt.group is not None
        groups = CHUNK // fmt.group
        if fmt.packed:
            return [emit.shift_right(self.column, {1: 2, 2: 1, 4: 0}[groups])]
        within = emit.shift_right(self.column, 1 if groups == 4 else 2)
        return [emit.add(within, emit.c(run * groups // 2)) for run in range(1 if groups == 1 else 2)]

    def by_row(self) -> list[list[tuple[Any, Any]]]:
        """What load_vectors gives, where scales are not of groups: they come last."""
        if "zeros" not in self.emit.names or self.format.group is not None:
            return [[(None, None)] for _ in self.further]
        return [[(self.emit.load_vector("zeros", self.row, further), None)] for further in self.further]

    def multiply(self, total: list[Any], codes: Any, x: list[list[Any]], vectors: Any) -> list[Any]:
        """The sums with a chunk's. Scales of whole chunks multiply sums, finer ones the weights."""
        emit, fmt = self.emit, self.format
        late = fmt.group == CHUNK
        rows = []
        for words, runs in zip(codes, vectors):
            finish = [
                (self.offset(zero), emit.both(emit.widened(scale)) if fmt.group and not late else None)
                for zero, scale in runs
            ]
            pairs = self.packed_pairs(words) if fmt.packed else self.byte_pairs(words)
            rows.append([self.finish(pair, *finish[i * len(finish) // len(pairs)]) for i, pair in enumerate(pairs)])
        products, scales = [], []
        for r in range(0, len(rows), 2):
            for pairs in x:
                sums = [emit.zero()] * 4
                for i in range(0, len(pairs), 2):
                    left = [row[i + j] for j in range(2) for row in rows[r : r + 2]]
                    sums = emit.multiply_add(left, pairs[i : i + 2], sums)
                products += sums
                if late:
                    scales += [emit.widened(vectors[r + i // 2][0][1]) for i in range(4)]
        if not late:
            return [emit.plus(a, b) for a, b in zip(total, products)]
        return [emit.fused(product, scale, a) for a, product, scale in zip(total, products, scales)]


def _finish(plan: Plan, tile: jax.Array, parts: Any, out: Any, vectors: dict[str, Any]) -> None:
    """Adds the parts of K in order, scales rows, and stores what exists."""
    names = ("parts", "out", *vectors)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *(plgpu.RefType(),) * len(names)), return_type=())
    def add(_: Any, tile: mgpu.FragmentedArray, *arrays: ir.Value) -> tuple[()]:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        add_parts(plan, StreamEmitter(plan.dtype, pointers), tile.registers.item())
        return ()

    add(tile, parts, out, *vectors.values())


def add_parts(plan: Plan, emit: Any, tile: Any) -> None:
    """What one thread of the first warpgroup does of that."""
    config, kept = plan.config, ROWS // plan.config.fold
    thread, width = emit.thread(), plan.out_dtype.itemsize
    emit.advance("out", tile, config.rows * width)
    if "scales" in emit.names:
        emit.advance("scales", tile, config.rows * 4)
    for first in range(0, config.rows * plan.m, THREADS):
        element = emit.add(thread, emit.c(first))
        row, token = emit.bits_and(element, config.rows - 1), emit.shift_right(element, config.rows.bit_length() - 1)

        def store(row: Any = row, token: Any = token) -> None:
            row_tile = emit.shift_right(row, kept.bit_length() - 1)
            place = emit.add(emit.times(row_tile, ROWS), emit.bits_and(row, kept - 1))
            place = emit.add(emit.times(place, 4 * config.tokens), emit.times(token, 4))
            found = [
                emit.load("parts", place, "f32", 4 * config.tokens * (ROWS * config.row_tiles * i + kept * j))
                for i in range(config.warpgroups)
                for j in range(config.fold)
            ]
            total = found[0]
            for part in found[1:]:
                total = emit.plus(total, part)
            if "scales" in emit.names:
                total = emit.scaled(total, emit.load("scales", emit.times(row, 4), "f32"))
            at = emit.add(emit.times(token, plan.n * width), emit.times(row, width))
            emit.store_float("out", at, total, plan.out_dtype)

        if first + THREADS > config.rows * plan.m:
            emit.only(emit.below(element, config.rows * plan.m), store)
        else:
            store()
