"""The kernel of weight_only_matmul for one row of x on sm_90, with the norm before it, and SiLU or a residual after it.

Codes go from memory straight into registers, 512 bytes of a row of the weight at a time: 16 bytes a lane. The four
warps of a block share its rows, a chunk of columns each in turn, so that what a warp has of x meets all of them.

Products are those of single warps (mma.m16n8k16), of which one row of x would use one column in eight. So a row of the
weight becomes eight of the operand: lane 4g + t has columns t of row g of the left operand and of column g of the right
one, and these are its own 32 columns (of 8 bits: 16) of the weight and of x. Sums of which g is not the same on both
sides mean nothing; the others are the sums of a quad of lanes, each of which has columns of one group. A lane that has
such a sum subtracts the codes' offset, as many times as x says, and multiplies by the scale: once a chunk.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels import row_pieces_sm90 as row_pieces
from pallas_kernels.quantized_weights import QuantizedWeight, WeightFormat, group_scales
from pallas_kernels.row_pieces_sm90 import LANES, VECTOR, WARPS
from pallas_kernels.weight_only_matmul.config import RowConfig, takes_one_row
from pallas_kernels.weight_only_matmul.emitter_sm90 import StreamEmitter
from pallas_kernels.weight_only_matmul.operand_sm90 import Codes, pair_table

PIECE = 16  # bytes of a row of the weight that a lane has of a chunk
QUADS = LANES // 4
CODES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES, 4),)), (-3,), (-2,), -1)  # words [rows, 4, 32, 4]
PARTS = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES, 1),)), (-3,), (-2,), -1)  # of sums [rows, 32, 1]


@dataclass(frozen=True)
class Plan:
    """The sizes of a call: n rows of the weight, or of each of its two halves; a block has `kept` of each."""

    n: int
    k: int
    dtype: jnp.dtype
    format: WeightFormat
    halves: int
    kept: int

    @property
    def rows(self) -> int:
        """Of the weight, of a block."""
        return self.halves * self.kept

    @property
    def row_bytes(self) -> int:
        return self.k // self.columns_of_byte

    @property
    def columns_of_byte(self) -> int:
        return 2 if self.format.packed else 1

    @property
    def late(self) -> bool:
        """Whether all columns of a quad of lanes have one scale and zero, which then go with sums."""
        return self.format.group is None or self.format.group % (4 * PIECE * self.columns_of_byte) == 0


def product(
    x: jax.Array,
    w: QuantizedWeight,
    norm: jax.Array | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
    *,
    eps: float = 0.0,
    gated: bool = False,
    config: RowConfig,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """x [1, K'] with columns as stored times a weight [N, K] transposed, plus bias [N] and residual [1, N] -> [1, N].

    norm [K']: the row is RMSNorm(x) * norm, with the bits of norm_quant's kernel. gated: SiLU of the product with the
    weight's first half, times that with its second half -> [1, N / 2]; nothing is added. Raises NotImplementedError for
    weights that the configuration does not cut evenly.
    """
    stored, halves = w.values.shape[0], 2 if gated else 1
    if x.shape[0] != 1 or not takes_one_row(stored, w.format, gated, config) or (gated and w.shape[0] != stored):
        raise NotImplementedError(
            f"{config} is for one row of x and a weight whose rows are a multiple, not M={x.shape[0]} and {w.shape}"
        )
    assert not gated or (bias is None and residual is None), "nothing is added to a gated product"
    n, k = stored // halves, x.shape[1]
    wide = out_dtype == jnp.float64
    beyond = stored - w.shape[0]
    plan = Plan(n, k, x.dtype, w.format, halves, config.rows // halves)
    vectors = k // VECTOR
    optional: dict[str, jax.Array | None] = {
        "zeros": w.zeros, "table": pair_table(x.dtype)[:, 0] if w.format.codes == "nf4" else None,
        "norm": None if norm is None else norm.reshape(vectors, VECTOR), "bias": bias,
        "residual": residual,
    }  # fmt: skip
    given = {name: array for name, array in optional.items() if array is not None}
    for name in given.keys() & {"bias", "residual"}:
        given[name] = jnp.pad(given[name].reshape(-1), (0, beyond))
        if given[name].dtype == jnp.float64:
            given[name] = given[name].astype(jnp.float32)  # as it is added
    scratch: dict[str, Any] = {
        "parts_s": plgpu.SMEM((plan.rows, LANES, 1), jnp.float32), "barrier": plgpu.Barrier()
    }  # fmt: skip
    if norm is not None:
        scratch["row_s"] = plgpu.SMEM((vectors, VECTOR), x.dtype)
        scratch["squares"] = plgpu.SMEM((vectors,), jnp.float32)
    if "table" in given:
        scratch["table_s"] = plgpu.SMEM((256, 32), jnp.int32)
    kernel = plgpu.kernel(
        partial(_kernel, plan, eps, tuple(given)),
        out_type=jax.ShapeDtypeStruct((n,), jnp.dtype("float32") if wide else out_dtype),
        scratch_types=scratch,
        grid=(n // plan.kept,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="weight_only_row_gated" if gated else "weight_only_row",
    )
    y = kernel(x.reshape(vectors, VECTOR), w.values, group_scales(w), *given.values())[None]
    return y[:, : w.shape[0] // halves].astype(out_dtype)


def _kernel(
    plan: Plan, eps: float, names: tuple[str, ...], x: Any, w: Any, scales: Any, *refs: Any, **scratch: Any
) -> None:
    *arrays, out = refs
    extra = dict(zip(names, arrays, strict=True))
    index = lax.axis_index("block")
    block = pl.ds(index * plan.kept, plan.kept)
    codes = _load_first(plan, index, w)  # before anything that waits
    row, parts, barrier = x, scratch["parts_s"], scratch["barrier"]
    if "norm" in extra:
        row = scratch["row_s"]
        part = row_pieces.Part(jnp.int32(0), row_pieces.pieces(x.shape[0]))
        normed = part.norm(part.load(x), part.load(extra["norm"]), eps, scratch["squares"], barrier)
        part.store(row, normed)
        row_pieces.everyone(barrier)
    read = {"x": row, "w": w, "scales": scales, "parts": parts}
    if "zeros" in extra:
        read["zeros"] = extra["zeros"]
    if "table" in extra:
        read |= {"bytes": extra["table"], "table": scratch["table_s"]}
    if plan.format.group is None:
        del read["scales"]
    _sum(plan, index, codes, read)
    row_pieces.everyone(barrier)
    by_row = PARTS.reduce((1, 2))
    totals = []
    for half in range(plan.halves):
        of_half = plgpu.load(parts.at[pl.ds(half * plan.kept, plan.kept)], layout=PARTS, optimized=False)
        total = jnp.sum(jnp.sum(of_half, axis=2), axis=1)
        if plan.format.group is None:
            at = pl.ds(index * plan.kept + half * plan.n, plan.kept)
            total = total * plgpu.load(scales.at[at], layout=by_row, optimized=False)
        totals.append(total)
    total = row_pieces.silu_mul(*totals) if plan.halves == 2 else totals[0]
    for name in ("bias", "residual"):
        if name in extra:
            total = total + row_pieces.widen(plgpu.load(extra[name].at[block], layout=by_row, optimized=False))
    out.at[block][...] = total.astype(out.dtype)


def _load_first(plan: Plan, block: jax.Array, w: Any) -> jax.Array:
    """The codes of each warp's first chunk: int32 [rows, 4, 32, 4]."""
    shape = plan.rows, WARPS, LANES, 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT(()), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=CODES),
    )
    def load(_: Any, block: mgpu.FragmentedArray, w: ir.Value) -> mgpu.FragmentedArray:
        emit = StreamEmitter(plan.dtype, {"w": mgpu.utils.memref_ptr(w)})
        codes = Row(plan, emit, block.registers.item()).load_codes(0)
        registers = np.empty(CODES.to_mgpu().registers_shape(shape), object)
        kind = ir.VectorType.get((4,), emit.i32)
        registers.flat = [vector.from_elements(kind, words) for words in codes]
        return mgpu.FragmentedArray(_registers=registers, _layout=CODES.to_mgpu(), _is_signed=True)

    return load(block, w)


def _sum(plan: Plan, block: jax.Array, codes: jax.Array, read: dict[str, Any]) -> None:
    """Puts the sums of the quads of lanes of four warps into read["parts"]."""
    names = tuple(read)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), CODES, *(plgpu.RefType(),) * len(names)), return_type=())
    def compute(_: Any, block: mgpu.FragmentedArray, codes: mgpu.FragmentedArray, *arrays: ir.Value) -> tuple[()]:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        words = [
            [vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for i in range(4)]
            for register in codes.registers.flat
        ]
        Row(plan, StreamEmitter(plan.dtype, pointers), block.registers.item()).store_sums(words)
        return ()

    compute(block, codes, *read.values())


class Row(Codes):
    """What one thread does, in operations of `emit`, a StreamEmitter."""

    def __init__(self, plan: Plan, emit: Any, block: Any) -> None:
        super().__init__(plan.format, plan.dtype, emit)
        self.plan, fmt = plan, plan.format
        self.chunk = LANES * PIECE  # bytes
        self.steps = -(-plan.row_bytes // (WARPS * self.chunk))
        warp = emit.bits_and(emit.shift_right(emit.thread(), 5), WARPS - 1)
        # Which of four chunks: warps that have one more are not those of one scheduler for all blocks.
        self.part = emit.bits_and(emit.add(warp, block), WARPS - 1)
        self.quad = emit.shift_right(self.lane, 2)
        self.at = emit.add(emit.times(self.part, self.chunk), emit.times(self.lane, PIECE))
        vectors = {"scales": 2 if fmt.group else 4, "zeros": 1}
        for name, size in {"w": plan.row_bytes, **vectors}.items():
            if name in emit.names:
                emit.advance(name, block, plan.kept * size)
                emit.pointers[f"{name}1"] = emit.pointers[name]  # of the second half
                emit.advance(f"{name}1", emit.c(1), plan.n * size)

    def whole(self, step: int) -> bool:
        """Whether all warps have whole chunks in this step."""
        return (step + 1) * WARPS * self.chunk <= self.plan.row_bytes

    def place(self, step: int) -> tuple[Any, int]:
        """Where the lane's bytes of a row are, as a number and what is to be added: its last ones instead of those
        beyond."""
        more = step * WARPS * self.chunk
        if self.whole(step):
            return self.at, more
        return self.emit.minimum(self.emit.add(self.at, self.emit.c(more)), self.plan.row_bytes - PIECE), 0

    def load_codes(self, step: int) -> list[list[Any]]:
        """For each row four words."""
        return [self.load_row(step, row) for row in range(self.plan.rows)]

    def load_row(self, step: int, row: int) -> list[Any]:
        half, within = divmod(row, self.plan.kept)
        at, more = self.place(step)
        return self.emit.stream(f"w{half or ''}", at, more + within * self.plan.row_bytes, pinned=True)

    def load_x(self, step: int) -> list[Any]:
        """Pairs in the order in which codes are decoded: zeros beyond the last column."""
        emit, plan = self.emit, self.plan
        size = 2 * plan.columns_of_byte  # bytes of x for one of the weight
        at, more = self.place(step)
        start = emit.times(at, size)
        pairs = [
            word for i in range(0, size * PIECE, 16) for word in emit.vector("x", start, size * more + i)
        ]  # fmt: skip
        if not self.whole(step):
            inside = emit.below(emit.add(self.at, emit.c(step * WARPS * self.chunk)), plan.row_bytes)
            pairs = [emit.select(inside, pair, emit.c(0)) for pair in pairs]
        return self.by_bytes(pairs) if plan.format.codes == "nf4" else pairs

    def load_vectors(self, step: int, name: str) -> list[Any]:
        """Of each row the scale or zero of the lane's columns, as float32 or as an integer."""
        emit, plan = self.emit, self.plan
        if plan.format.group is None:
            return [self.row_vector(name, row) for row in range(plan.rows)] if name in emit.names else []
        if name not in emit.names:
            return []
        of_group = plan.format.group // plan.columns_of_byte  # bytes of a row
        at, more = self.place(step)
        size = 2 if name == "scales" else 1
        stride = plan.halves * plan.n * size
        start = emit.times(emit.shift_right(at, of_group.bit_length() - 1), stride)
        found = []
        for half in range(plan.halves):
            first, count = more // of_group * stride, plan.kept * size // 4
            words = []
            for i in range(0, count, 4):
                words += emit.fetch(f"{name}{half or ''}", start, first + 4 * i, min(4, count - i))
            if name == "scales":
                found += [emit.widened(emit.low_half(word, i)) for word in words for i in range(2)]
            else:
                found += [emit.signed_byte(word, i) for word in words for i in range(4)]
        return found

    def row_vector(self, name: str, row: int) -> Any:
        """The zero of a row that has only one."""
        half, within = divmod(row, self.plan.kept)
        return self.emit.load_vector(f"{name}{half or ''}", self.emit.c(0), within)

    def store_sums(self, codes: list[list[Any]]) -> None:
        """Of the rows' sums what the lane's quad has, if this lane has it; `codes` are those of the first step."""
        emit, plan = self.emit, self.plan
        if "table" in emit.names:
            self.fill_table()
            emit.synchronize()
        totals = [emit.zero()] * plan.rows
        for step in range(self.steps):
            inside = emit.below(emit.add(emit.times(self.part, self.chunk), emit.c(step * WARPS * self.chunk)),
                                plan.row_bytes)  # fmt: skip
            add = partial(self.multiply, totals, step, codes)
            if self.whole(step):
                totals, codes = add()
            else:
                totals = emit.either(inside, lambda add=add: add()[0], totals)
        mine = emit.equal(emit.bits_and(self.lane, 3), emit.shift_right(self.quad, 1))
        place = emit.times(emit.add(emit.times(self.part, QUADS), self.quad), 4)

        def store() -> None:
            for row, total in enumerate(totals):
                emit.store_float("parts", emit.add(place, emit.c(4 * LANES * row)), total, jnp.dtype("float32"))

        emit.only(mine, store)

    def multiply(self, totals: list[Any], step: int, codes: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
        """The sums with those of a chunk, and the codes of the next one, which are asked for as registers become
        free."""
        emit, plan, fmt = self.emit, self.plan, self.format
        x = self.load_x(step)
        scales, zeros = (self.load_vectors(step, name) for name in ("scales", "zeros"))
        odd = emit.equal(emit.bits_and(self.quad, 1), emit.c(1))

        def diagonal(sums: list[Any]) -> list[Any]:
            return [emit.select(odd, sums[i + 1], sums[i]) for i in (0, 2)]

        late = plan.late
        corrected = late and (self.biased or zeros)
        if corrected:
            total_x = diagonal(self.product([[emit.c(self.one)] * len(x)] * 2, x))[0]
        following, totals = [], list(totals)
        for row in range(0, plan.rows, 2):
            pairs = [(self.packed_pairs if fmt.packed else self.byte_pairs)(words) for words in codes[row : row + 2]]
            if not late:
                for i, each in enumerate(pairs):
                    offset = self.offset(zeros[row + i] if zeros else None)
                    scale = emit.both(scales[row + i])
                    pairs[i] = [self.finish(pair, offset, scale) for pair in each]
            found = diagonal(self.product(pairs, x))
            if step + 1 < self.steps:
                following += [self.load_row(step + 1, row), self.load_row(step + 1, row + 1)]
            for i, value in enumerate(found):
                if corrected:
                    offset = emit.number(-self.bias)
                    if zeros:
                        offset = emit.minus(offset, emit.float_of(zeros[row + i]))
                    value = emit.fused(offset, total_x, value)
                scaled = late and fmt.group is not None
                before = totals[row + i]
                totals[row + i] = emit.fused(value, scales[row + i], before) if scaled else emit.plus(value, before)
        return totals, following

    def product(self, rows: list[list[Any]], x: list[Any]) -> list[Any]:
        """Of two rows' pairs with x."""
        sums = [self.emit.zero()] * 4
        for i in range(0, len(x), 2):
            sums = self.emit.multiply_add([row[i + j] for j in range(2) for row in rows], x[i : i + 2], sums)
        return sums
