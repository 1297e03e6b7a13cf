"""Runs weight_only_matmul for few rows of x and codes of 8 bits on sm_90: the codes go straight into registers.

A CTA has 16 rows of the weight, and each of its four warps every fourth 128 columns of K. The order of columns within a
product does not matter as long as both operands have the same one. So each thread takes twice 16 columns that follow
each other, in loads of 16 bytes, and of x the same. Products are those of single warps, which wait for each other only
when their sums are added at the end. A CTA is small: loads of one hide what others compute, and no ring has to be
filled before the first product.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.formats.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.formats.weight_formats import WeightFormat
from pallas_kernels.weight_only_matmul.config import WARP_ROWS, StreamConfig
from pallas_kernels.weight_only_matmul.emitter_sm90 import StreamEmitter
from pallas_kernels.weight_only_matmul.operand_sm90 import Codes

CHUNK = 128  # columns that a warp multiplies at a time
TOKENS = 8  # rows of x in a product
WARPS = 4
LAYOUT = plgpu.Layout.WGMMA  # of sums [16 warps, tokens]


@dataclass(frozen=True)
class Plan:
    """Holds the sizes of a call: x [m, k], a weight [n, k]."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    format: WeightFormat
    stages: int


def product(
    x: jax.Array,
    w: QuantizedWeight,
    out_dtype: jnp.dtype,
    config: StreamConfig,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Returns x [M, K'] times the weight's padded rows [N', K'], transposed: [M, N'] of out_dtype."""
    (m, k), n = x.shape, w.values.shape[0]
    if m > TOKENS or n % WARP_ROWS or w.format.packed:
        raise NotImplementedError(
            f"{config} is for at most {TOKENS} rows of x, multiples of {WARP_ROWS} rows of the weight and 8 bits, not "
            f"M={m}, N={n} and {w.format.name}"
        )
    plan = Plan(m, n, k, x.dtype, out_dtype, w.format, config.stages)
    arrays = {"x": x, "w": w.values, "scales": group_scales(w), "zeros": w.zeros}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    kernel = plgpu.kernel(
        partial(_kernel, plan, tuple(arrays)),
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        scratch_types={"parts": plgpu.SMEM((WARPS * WARP_ROWS, TOKENS), jnp.float32)},
        grid=(n // WARP_ROWS,),
        grid_names=("worker",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="weight_only_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    return kernel(*arrays.values())


def _kernel(plan: Plan, names: tuple[str, ...], *refs: Any, parts: Any) -> None:
    """Multiplies arrays in global memory into out [M, N], of which a CTA has 16 columns."""
    sources, out = dict(zip(names, refs)), refs[len(names)]
    tile = lax.axis_index("worker")
    parts[...] = _sums(plan, sources, tile)
    _finish(plan, tile, parts, out, {"scales": sources["scales"]} if plan.format.group is None else {})


def _sums(plan: Plan, sources: dict[str, Any], tile: jax.Array) -> jax.Array:
    """Returns [64, tokens]: of the first part of K 16 rows, then of the next."""
    names, shape = tuple(sources), (WARPS * WARP_ROWS, TOKENS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()), *(plgpu.RefType(),) * len(names)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=LAYOUT),
    )
    def compute(_: Any, tile: mgpu.FragmentedArray, *arrays: ir.Value) -> mgpu.FragmentedArray:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        sums = Stream(plan, StreamEmitter(plan.dtype, pointers), tile.registers.item()).sums()
        registers = np.empty(LAYOUT.to_mgpu().registers_shape(shape), object)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        registers.flat = [vector.from_elements(pair, sums[i : i + 2]) for i in range(0, len(sums), 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)

    return compute(tile, *sources.values())


class Stream(Codes):
    """Does one thread's work, in operations of `emit`: a StreamEmitter, or a test's stand-in for one."""

    def __init__(self, plan: Plan, emit: Any, tile: Any) -> None:
        super().__init__(plan.format, plan.dtype, emit)
        self.plan = plan
        self.row, self.column = emit.shift_right(self.lane, 2), emit.bits_and(self.lane, 3)
        self.further = (0, 8)  # a thread's rows of the weight, from the first
        self.part = emit.shift_right(emit.thread(), 5)  # of K
        emit.advance("w", tile, WARP_ROWS * plan.k)
        own = emit.add(emit.times(self.part, CHUNK), emit.times(self.column, 16))
        self.w = emit.add(emit.times(self.row, plan.k), own)
        token = emit.minimum(self.row, plan.m - 1)  # what does not exist is not stored
        self.x = emit.add(emit.times(token, 2 * plan.k), emit.times(own, 2))
        for name, size in {"scales": 2 if plan.format.group else 4, "zeros": 1}.items():
            if name in emit.names:
                emit.advance(name, tile, WARP_ROWS * size)

    def sums(self) -> list[Any]:
        """Returns the sums of rows l and l + 8 of the weight and two rows of x, float32."""
        emit, chunks = self.emit, self.plan.k // CHUNK
        whole, rest = divmod(chunks, WARPS)
        ahead = min(self.plan.stages, whole)
        codes = [self.load_codes(i) for i in range(ahead)]
        vectors = [self.load_vectors(i) for i in range(ahead)]
        by_row = self.by_row()
        total = [emit.zero()] * 4
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
        """Loads for each row the words of the thread's columns."""
        first = chunk * WARPS * CHUNK
        halves = first, first + CHUNK // 2  # that four threads load at once
        return [
            [word for place in halves for word in self.emit.stream("w", self.w, place + further * self.plan.k)]
            for further in self.further
        ]

    def load_x(self, chunk: int) -> list[Any]:
        """Loads pairs in the order in which codes are decoded: 16 columns and then 16."""
        first = 2 * chunk * WARPS * CHUNK
        return [pair for more in (0, 16, CHUNK, CHUNK + 16) for pair in self.emit.fetch("x", self.x, first + more, 4)]

    def load_vectors(self, chunk: int) -> list[list[tuple[Any, Any]]]:
        """Loads the zero and the scale as they are stored, for each row and each run of columns of the thread's."""
        fmt, emit = self.format, self.emit
        if fmt.group is None:
            return []
        groups = CHUNK // fmt.group  # of a chunk
        found: list[list[tuple[Any, Any]]] = [[] for _ in self.further]
        for within in self.groups_of_runs():
            group = emit.add(emit.times(self.part, groups), within)
            at = emit.add(emit.times(group, self.plan.n), self.row)
            for runs_of_row, further in zip(found, self.further):
                more = chunk * WARPS * groups * self.plan.n + further
                zero = emit.load_vector("zeros", at, more) if "zeros" in emit.names else None
                runs_of_row.append((zero, emit.load_vector("scales", emit.times(at, 2), 2 * more)))
        return found

    def groups_of_runs(self) -> list[Any]:
        """Returns the groups of a chunk that the thread's two runs of 16 columns are in, or one where they are the
        same."""
        emit, fmt = self.emit, self.format
        assert fmt.group is not None
        groups = CHUNK // fmt.group
        within = emit.shift_right(self.column, 1 if groups == 4 else 2)
        return [emit.add(within, emit.c(run * groups // 2)) for run in range(1 if groups == 1 else 2)]

    def by_row(self) -> list[list[tuple[Any, Any]]]:
        """Loads what load_vectors gives, where scales are not of groups: they come last."""
        if "zeros" not in self.emit.names or self.format.group is not None:
            return [[(None, None)] for _ in self.further]
        return [[(self.emit.load_vector("zeros", self.row, further), None)] for further in self.further]

    def multiply(self, total: list[Any], codes: Any, x: list[Any], vectors: Any) -> list[Any]:
        """Returns the sums with a chunk's. Scales of whole chunks multiply sums, finer ones the weights."""
        emit, fmt = self.emit, self.format
        late = fmt.group == CHUNK
        rows = []
        for words, runs in zip(codes, vectors):
            finish = [
                (self.offset(zero), emit.both(emit.widened(scale)) if fmt.group and not late else None)
                for zero, scale in runs
            ]
            pairs = self.byte_pairs(words)
            rows.append([self.finish(pair, *finish[i * len(finish) // len(pairs)]) for i, pair in enumerate(pairs)])
        sums = [emit.zero()] * 4
        for i in range(0, len(x), 2):
            left = [row[i + j] for j in range(2) for row in rows]
            sums = emit.multiply_add(left, x[i : i + 2], sums)
        if not late:
            return [emit.plus(a, b) for a, b in zip(total, sums)]
        scales = [emit.widened(vectors[i // 2][0][1]) for i in range(4)]
        return [emit.fused(product, scale, a) for a, product, scale in zip(total, sums, scales)]


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
    """Adds one thread's share of the parts: a row of the weight and one of x."""
    width = plan.out_dtype.itemsize
    emit.advance("out", tile, WARP_ROWS * width)
    if "scales" in emit.names:
        emit.advance("scales", tile, WARP_ROWS * 4)
    row, token = (
        emit.bits_and(emit.thread(), WARP_ROWS - 1),
        emit.shift_right(emit.thread(), WARP_ROWS.bit_length() - 1),
    )

    def store() -> None:
        place = emit.add(emit.times(row, 4 * TOKENS), emit.times(token, 4))
        total, *others = (emit.load("parts", place, "f32", 4 * TOKENS * WARP_ROWS * i) for i in range(WARPS))
        for part in others:
            total = emit.plus(total, part)
        if "scales" in emit.names:
            total = emit.scaled(total, emit.load("scales", emit.times(row, 4), "f32"))
        at = emit.add(emit.times(token, plan.n * width), emit.times(row, width))
        emit.store_float("out", at, total, plan.out_dtype)

    if plan.m < TOKENS:
        emit.only(emit.below(token, plan.m), store)
    else:
        store()
