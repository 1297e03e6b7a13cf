"""The kernel of weight_only_matmul for one row of x on sm_90, with the norm before it, and SiLU or a residual after it.

Codes are copied 512 bytes of a row of the weight at a time, 16 bytes a lane: a lane copies what it will multiply, so
that it waits for its own copies alone, and next ones are always on their way. The four warps of a CTA share its rows, a
chunk of columns each in turn, so that what a warp has of x meets all of them.

Products are those of single warps (mma.m16n8k16), of which one row of x would use one column in eight. So a row of the
weight becomes eight of the operand: lane 4g + t has columns t of row g of the left operand and of column g of the right
one, and these are its own 32 columns (of 8 bits: 16) of the weight and of x. Sums of which g is not the same on both
sides mean nothing; the others are the sums of a quad of lanes, each of which has columns of one group. A lane that has
such a sum subtracts the codes' offset, as many times as x says, and multiplies by the scale: once a chunk.
"""

from collections.abc import Callable
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

from pallas_kernels import row_pieces_sm90 as row_pieces
from pallas_kernels.hopper import SMS
from pallas_kernels.quantized_weights import QuantizedWeight, WeightFormat, group_scales
from pallas_kernels.row_pieces_sm90 import LANES, VECTOR, WARPS
from pallas_kernels.weight_only_matmul.config import RowConfig, takes_one_row
from pallas_kernels.weight_only_matmul.emitter_sm90 import StreamEmitter
from pallas_kernels.weight_only_matmul.operand_sm90 import Codes, pair_table

PIECE = 16  # bytes of a row of the weight that a lane has of a chunk
CHUNK = LANES * PIECE
STEP = WARPS * CHUNK
QUADS = LANES // 4
GROUP = 4  # rows of a tile that are waited for together
PARTS = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, LANES, 1),)), (-3,), (-2,), -1)  # of sums [rows, 32, 1]


@dataclass(frozen=True)
class Plan:
    """The sizes of a call: n rows of the weight, or of each of its two halves; a tile has `kept` of each."""

    n: int
    k: int
    dtype: jnp.dtype
    format: WeightFormat
    halves: int
    config: RowConfig

    @property
    def kept(self) -> int:
        return self.config.rows // self.halves

    @property
    def tiles(self) -> int:
        return self.n // self.kept

    @property
    def columns_of_byte(self) -> int:
        return 2 if self.format.packed else 1

    @property
    def row_bytes(self) -> int:
        return self.k // self.columns_of_byte

    @property
    def steps(self) -> int:
        """In which the four warps go through the columns, a chunk each."""
        return -(-self.row_bytes // STEP)

    @property
    def late(self) -> bool:
        """Whether all columns of a quad of lanes have one scale and zero, which then go with sums."""
        return self.format.group is None or self.format.group % (4 * PIECE * self.columns_of_byte) == 0

    @property
    def vectors(self) -> dict[str, int]:
        """Of scales and zeros of groups, the bytes of one."""
        if self.format.group is None:
            return {}
        return {"scales": 2, **({"zeros": 1} if self.format.zero_point else {})}

    @property
    def places(self) -> dict[str, int]:
        """Where a warp's stage has its codes, scales and zeros, and its end: a row or 16 bytes of each lane follow each
        other."""
        found, end = {"w": 0}, self.config.rows * CHUNK
        for name, size in self.vectors.items():
            found[name] = end
            end += LANES * max(self.config.rows * size, PIECE)
        return {**found, "end": end}


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
    plan = Plan(stored // halves, x.shape[1], x.dtype, w.format, halves, config)
    vectors = plan.k // VECTOR
    optional: dict[str, jax.Array | None] = {
        "scales": group_scales(w), "zeros": w.zeros,
        "table": pair_table(x.dtype)[:, 0] if w.format.codes == "nf4" else None,
        "norm": None if norm is None else norm.reshape(vectors, VECTOR), "bias": bias, "residual": residual,
    }  # fmt: skip
    given = {name: array for name, array in optional.items() if array is not None}
    for name in given.keys() & {"bias", "residual"}:
        given[name] = jnp.pad(given[name].reshape(-1), (0, stored - w.shape[0]))
        if given[name].dtype == jnp.float64:
            given[name] = given[name].astype(jnp.float32)  # as it is added
    wide = out_dtype == jnp.float64
    at_once = plan.tiles if config.ctas is None else config.ctas * SMS
    kernel = plgpu.kernel(
        partial(_kernel, plan, eps, tuple(given)),
        out_type=jax.ShapeDtypeStruct((plan.n,), jnp.float32 if wide else out_dtype),
        scratch_types=_scratch(plan, tuple(given)),
        grid=(min(plan.tiles, at_once),),
        grid_names=("worker",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="weight_only_row_gated" if gated else "weight_only_row",
    )
    y = kernel(x.reshape(vectors, VECTOR), w.values, *given.values())[None]
    return y[:, : w.shape[0] // halves].astype(out_dtype)


def _scratch(plan: Plan, names: tuple[str, ...]) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    found: dict[str, Any] = {
        "ring": plgpu.SMEM((WARPS * plan.config.stages * plan.places["end"],), jnp.uint8),
        "parts": plgpu.SMEM((2, plan.config.rows, LANES, 1), jnp.float32),
        "barrier": plgpu.Barrier(),
    }
    if "norm" in names:
        found["row"] = plgpu.SMEM((plan.k // VECTOR, VECTOR), plan.dtype)
        found["squares"] = plgpu.SMEM((plan.k // VECTOR,), jnp.float32)
    if "table" in names:
        found["table_s"] = plgpu.SMEM((256, 32), jnp.int32)
    return found


def _kernel(plan: Plan, eps: float, names: tuple[str, ...], x: Any, w: Any, *refs: Any, **scratch: Any) -> None:
    *arrays, out = refs
    extra = dict(zip(names, arrays, strict=True))
    worker, workers, barrier = lax.axis_index("worker"), lax.axis_size("worker"), scratch["barrier"]
    mine = lax.div(plan.tiles - worker + workers - 1, workers)
    read = {"x": x, "w": w, "ring": scratch["ring"], **{name: extra[name] for name in plan.vectors}}
    _run(plan, "start", read, worker)  # before anything that waits
    if "norm" in extra:
        read["x"] = scratch["row"]
        part = row_pieces.Part(jnp.int32(0), row_pieces.pieces(x.shape[0]))
        gains = part.load(extra["norm"])
        part.store(read["x"], part.norm(part.load(x), gains, eps, scratch["squares"], barrier))
    if "table" in extra:
        read["table"] = scratch["table_s"]
        _run(plan, "fill_table", {"bytes": extra["table"], "table": read["table"]})
    if "zeros" in extra:
        read["zeros"] = extra["zeros"]
    if "norm" in extra or "table" in extra:
        row_pieces.everyone(barrier)
    by_row = PARTS.reduce((1, 2))

    @pl.loop(0, mine)
    def _tile(i: jax.Array) -> None:
        tile, parts = worker + i * workers, scratch["parts"].at[lax.rem(i, jnp.int32(2))]
        rows = [pl.ds(tile * plan.kept + half * plan.n, plan.kept) for half in range(plan.halves)]
        load = lambda ref, at: plgpu.load(ref.at[at], layout=by_row, optimized=False)  # noqa: E731
        scales = [load(extra["scales"], at) for at in rows] if plan.format.group is None else []
        added = [row_pieces.widen(load(extra[name], rows[0])) for name in ("bias", "residual") if name in extra]
        _run(plan, "multiply_tile", {**read, "parts": parts}, worker, i)
        row_pieces.everyone(barrier)  # those of the tile after the next one are stored after another one
        totals = []
        for half in range(plan.halves):
            sums = plgpu.load(parts.at[pl.ds(half * plan.kept, plan.kept)], layout=PARTS, optimized=False)
            total = jnp.sum(jnp.sum(sums, axis=2), axis=1)
            totals.append(total * scales[half] if scales else total)
        total = row_pieces.silu_mul(*totals) if plan.halves == 2 else totals[0]
        out.at[rows[0]][...] = sum(added, total).astype(out.dtype)


def _run(plan: Plan, method: str, refs: dict[str, Any], *numbers: jax.Array) -> None:
    """A method of Row, with references by name and with numbers."""
    names, count, workers = tuple(refs), len(numbers), lax.axis_size("worker")
    kinds = *(plgpu.Layout.WG_SPLAT(()),) * count, *(plgpu.RefType(),) * len(names)

    @plgpu.inline_mgpu(arg_types=kinds, return_type=())
    def run(_: Any, *operands: Any) -> tuple[()]:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, operands[count:])}
        row = Row(plan, StreamEmitter(plan.dtype, pointers), workers)
        getattr(row, method)(*(number.registers.item() for number in operands[:count]))
        return ()

    run(*numbers, *refs.values())


class Row(Codes):
    """What one thread does, in operations of `emit`, a StreamEmitter. Items are a worker's tiles, in order."""

    def __init__(self, plan: Plan, emit: Any, workers: int) -> None:
        super().__init__(plan.format, plan.dtype, emit)
        self.plan, self.workers = plan, workers
        self.warp = emit.bits_and(emit.shift_right(emit.thread(), 5), WARPS - 1)
        self.quad = emit.shift_right(self.lane, 2)
        self.mine = emit.times(self.lane, PIECE)
        self.one = 0x3F803F80 if plan.dtype == jnp.bfloat16 else 0x3C003C00  # a pair of ones
        self.bias = np.array(self.biased, np.uint16).view(plan.dtype).astype(float).item()

    def start(self, worker: Any) -> None:
        """Begins the copies of the first stages."""
        for number in range(self.plan.config.stages):
            item, step = divmod(number, self.plan.steps)
            for first in range(0, self.plan.config.rows, GROUP):
                self.copy(self.tile(worker, self.emit.c(item)), step, self.emit.c(number), first)

    def tile(self, worker: Any, item: Any) -> Any:
        """Which tile of all a worker's item is."""
        return self.emit.add(worker, self.emit.times(item, self.workers))

    def part(self, tile: Any) -> Any:
        """Which of four chunks the warp has of a tile: those that have one more are not the same ones in all tiles."""
        return self.emit.bits_and(self.emit.add(self.warp, tile), WARPS - 1)

    def column(self, tile: Any, step: int) -> tuple[Any, Any, Any]:
        """Of the lane in a step, in bytes of a row: where it is, whether that is within the row, and whether the warp's
        chunk begins there. Beyond the end it is the last one's."""
        emit, size = self.emit, self.plan.row_bytes
        begin = emit.add(emit.times(self.part(tile), CHUNK), emit.c(step * STEP))
        at = emit.add(begin, self.mine)
        if (step + 1) * STEP <= size:
            return at, None, None
        return emit.minimum(at, size - PIECE), emit.below(at, size), emit.below(begin, size)

    def slot(self, number: Any) -> Any:
        """Where in the ring the lane's pieces of a warp's stage are, of all that it has had."""
        emit, stages, size = self.emit, self.plan.config.stages, self.plan.places["end"]
        slot = emit.remainder(number, stages)
        warps = emit.times(self.warp, stages * size)
        return emit.add(emit.add(warps, emit.times(slot, size)), self.mine)

    def copy(self, tile: Any, step: int, number: Any, first: int) -> None:
        """Begins the copies of a stage's rows from `first` on, where there is such a tile; with those of the first ones
        come all rows' scales and zeros."""
        emit, plan = self.emit, self.plan
        at, _, begins = self.column(tile, step)
        exists = emit.below(tile, plan.tiles)
        half, within = divmod(first, plan.kept)
        to = self.slot(number)

        def begin() -> None:
            rows = self.moved("w", tile, half, plan.row_bytes)
            for row in range(GROUP):
                place = emit.add(to, emit.c((first + row) * CHUNK))
                emit.begin_copy("ring", place, rows, at, (within + row) * plan.row_bytes, PIECE)
            for name, size in {} if first else plan.vectors.items():
                self.copy_vectors(tile, at, to, name, size)

        emit.only(exists if begins is None else emit.both_true(exists, begins), begin)
        emit.commit_copies()

    def copy_vectors(self, tile: Any, at: Any, to: Any, name: str, size: int) -> None:
        emit, plan = self.emit, self.plan
        count = plan.kept * size
        piece = min(count, PIECE)
        for half in range(plan.halves):
            vectors = self.moved(name, tile, half, size)
            for first in range(0, count, piece):
                into = half * count + first
                place = emit.add(to, emit.c(plan.places[name] + into // PIECE * CHUNK + into % PIECE))
                emit.begin_copy("ring", place, vectors, self.vectors_of(at, size), first, piece)

    def moved(self, name: str, tile: Any, half: int, size: int) -> str:
        """A name for where the tile's rows of this half begin, of `size` bytes each."""
        emit, plan = self.emit, self.plan
        emit.pointers["moved"] = emit.pointers[name]
        emit.advance("moved", tile, plan.kept * size)
        emit.advance("moved", emit.c(half), plan.n * size)
        return "moved"

    def vectors_of(self, at: Any, size: int) -> Any:
        """Where scales or zeros of the lane's columns begin."""
        group = self.plan.format.group
        assert group is not None
        shift = (group // self.plan.columns_of_byte).bit_length() - 1
        return self.emit.times(self.emit.shift_right(at, shift), self.plan.halves * self.plan.n * size)

    def multiply_tile(self, worker: Any, item: Any) -> None:
        """Puts the sums of the lane's quad into `parts`, if the lane has them, and begins the copies of later steps."""
        emit, plan = self.emit, self.plan
        stages = plan.config.stages
        tile, number = self.tile(worker, item), emit.times(item, plan.steps)
        zeros: list[Any] = []
        if "zeros" in emit.names and plan.format.group is None:
            zeros = self.zeros_of_rows(tile)
        totals = [emit.zero()] * plan.config.rows
        for step in range(plan.steps):
            items, later = divmod(step + stages, plan.steps)
            following = self.tile(worker, emit.add(item, emit.c(items)))
            slot = self.slot(emit.add(number, emit.c(step)))
            at, inside, begins = self.column(tile, step)
            copy = partial(self.copy, following, later, emit.add(number, emit.c(step + stages)))
            add = partial(self.multiply, totals, slot, at, inside, zeros, copy)
            totals = add() if begins is None else emit.either(begins, add, totals, partial(self.skip, copy))
        mine = emit.equal(emit.bits_and(self.lane, 3), emit.shift_right(self.quad, 1))
        place = emit.times(emit.add(emit.times(self.part(tile), QUADS), self.quad), 4)

        def store() -> None:
            for row, total in enumerate(totals):
                emit.store_float("parts", emit.add(place, emit.c(4 * LANES * row)), total, jnp.dtype("float32"))

        emit.only(mine, store)

    def zeros_of_rows(self, tile: Any) -> list[Any]:
        """Of each row its only zero."""
        emit, plan = self.emit, self.plan
        first = emit.times(tile, plan.kept)
        rows = [divmod(row, plan.kept) for row in range(plan.config.rows)]
        return [emit.load_vector("zeros", first, half * plan.n + within) for half, within in rows]

    def load_x(self, at: Any, inside: Any) -> list[Any]:
        """Pairs in the order in which codes are decoded: zeros beyond the last column."""
        emit, size = self.emit, 2 * self.plan.columns_of_byte  # bytes of x for one of the weight
        start = emit.times(at, size)
        pairs = [word for i in range(0, size * PIECE, 16) for word in emit.vector("x", start, i)]
        if inside is not None:
            pairs = [emit.select(inside, pair, emit.c(0)) for pair in pairs]
        return self.by_bytes(pairs) if self.format.codes == "nf4" else pairs

    def load_vectors(self, slot: Any, name: str) -> list[Any]:
        """Of each row the scale or zero of the lane's columns, as float32 or as an integer; none: no such array."""
        emit, rows = self.emit, self.plan.config.rows
        if name not in self.plan.vectors:
            return []
        size = rows * self.plan.vectors[name]
        begins = range(0, size, PIECE)
        words = [w for i in begins for w in emit.vector("ring", slot, self.plan.places[name] + i // PIECE * CHUNK)]
        if name == "scales":
            return [emit.widened(emit.low_half(words[row // 2], row % 2)) for row in range(rows)]
        return [emit.signed_byte(words[row // 4], row % 4) for row in range(rows)]

    def skip(self, copy: Callable[[int], None]) -> None:
        """A stage of which the warp has no chunk."""
        for first in range(0, self.plan.config.rows, GROUP):
            copy(first)

    def multiply(
        self, totals: list[Any], slot: Any, at: Any, inside: Any, zeros: list[Any], copy: Callable[[int], None]
    ) -> list[Any]:
        """The sums with those of a chunk. Where its rows were, `copy` begins to copy those of a later stage."""
        emit, plan, fmt = self.emit, self.plan, self.format
        rows, groups = plan.config.rows, plan.config.rows // GROUP
        x = self.load_x(at, inside)
        odd = emit.equal(emit.bits_and(self.quad, 1), emit.c(1))

        def diagonal(sums: list[Any]) -> list[Any]:
            return [emit.select(odd, sums[i + 1], sums[i]) for i in (0, 2)]

        corrected = plan.late and (self.biased or "zeros" in emit.names)
        if corrected:
            total_x = diagonal(self.product([[emit.c(self.one)] * len(x)] * 2, x))[0]
        totals, scales = list(totals), list[Any]()
        for first in range(0, rows, 2):
            if first % GROUP == 0:  # later ones are those of this stage and of the others
                emit.wait_for_copies(plan.config.stages * groups - 1)
            if first == 0:
                scales, zeros = self.load_vectors(slot, "scales"), zeros or self.load_vectors(slot, "zeros")
            two = range(first, first + 2)
            pairs = [self.pairs(emit.vector("ring", slot, row * CHUNK)) for row in two]
            if first % GROUP == GROUP - 2:
                copy(first + 2 - GROUP)
            if not plan.late:
                for row, each in zip(two, pairs):
                    offset, scale = self.offset(zeros[row] if zeros else None), emit.both(scales[row])
                    pairs[row - first] = [self.finish(pair, offset, scale) for pair in each]
            for row, value in zip(two, diagonal(self.product(pairs, x))):
                if corrected:
                    offset = emit.number(-self.bias)
                    offset = emit.minus(offset, emit.float_of(zeros[row])) if zeros else offset
                    value = emit.fused(offset, total_x, value)
                late = plan.late and fmt.group is not None
                totals[row] = emit.fused(value, scales[row], totals[row]) if late else emit.plus(value, totals[row])
        return totals

    def pairs(self, words: list[Any]) -> list[Any]:
        return self.packed_pairs(words) if self.format.packed else self.byte_pairs(words)

    def product(self, rows: list[list[Any]], x: list[Any]) -> list[Any]:
        """Of two rows' pairs with x."""
        sums = [self.emit.zero()] * 4
        for i in range(0, len(x), 2):
            sums = self.emit.multiply_add([row[i + j] for j in range(2) for row in rows], x[i : i + 2], sums)
        return sums
