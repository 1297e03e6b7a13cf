"""Multiplies few rows of x by what a stage of weight_only_matmul's ring on sm_90 holds, by single warps.

16 rows of the weight and 8 of x are a product (mma.m16n8k16). The four warps of a warpgroup share its rows and have a
quarter of a stage's columns each. So what a warp has of x meets all of these rows. Warps wait for each other only where
their sums are added. Loads of matrices (ldmatrix) bring x in the order of an operand, and codes too. Of 32 columns
pack4 made one word in four for each lane. Codes are not scaled, and too large by an offset. Once a group that goes from
their sums, as often as a product of x with ones says, and scales multiply these.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from pallas_kernels.hopper.ring_sm90 import slot_of
from pallas_kernels.weight_only_matmul.config import WARP_ROWS
from pallas_kernels.weight_only_matmul.emitter_sm90 import StreamEmitter
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, Codes
from pallas_kernels.weight_only_matmul.plan_sm90 import PARTS, PIECE, Item, Plan

TOKENS = 8  # rows of x in a product
THREADS = 128  # of a warpgroup
RUN = 32  # columns of 16 bytes of codes; one load has twice as many, of 16 rows
BLOCK = 1024  # bytes of 8 swizzled rows of 128
# E2M1's bits in bfloat16 are 2^-126 of their value. x is multiplied by 2^64 first, so that no sum is subnormal. What
# all groups add up to is multiplied by the rest, with which a large scale would overflow.
LARGER_BITS, REST = 0x5F80, 2.0**62
LAYOUT = plgpu.Layout.WGMMA  # of sums [64 row_tiles, tokens]: of each row tile the rows of the first warp, then others


def compute_item(
    plan: Plan,
    names: tuple[str, ...],
    warpgroup: jax.Array,
    i: jax.Array,
    item: Item,
    out: Any,
    scratch: Any,
) -> None:
    """Computes a warpgroup's rows of a tile."""
    full, free = scratch["full"], scratch["free"]
    in_ring = [name for name in names if name != "table"]

    def step(s: jax.Array, total: jax.Array) -> jax.Array:
        slot = slot_of(i * plan.steps + s, full.shape[0])
        plgpu.barrier_wait(full.at[slot])
        refs = {name: scratch[f"{name}_s"].at[slot] for name in in_ring}
        if "table" in names:
            refs["table"] = scratch["table_s"]
        total = _add_stage(plan, refs, total)
        plgpu.barrier_arrive(free.at[slot])
        return total

    shape = ROWS * plan.config.row_tiles, plan.config.tokens
    total = lax.fori_loop(0, plan.steps, step, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT))
    if _small(plan):
        total = total * REST
    own = item.column + warpgroup * (WARP_ROWS * plan.config.row_tiles // plan.halves)
    place = [own, item.split]
    if plan.apart:  # rows of x, how many, and whether they have a weight
        place = [own, item.token, item.last - item.first, jnp.where(item.group < plan.weights, 1, 0)]
    _store(plan, place, total, scratch["parts_s"].at[warpgroup], out)


def _small(plan: Plan) -> bool:
    """Tells whether values are decoded as 2^-126 of what they are."""
    return plan.format.codes == "e2m1" and plan.dtype == jnp.bfloat16


def _add_stage(plan: Plan, refs: dict[str, Any], total: jax.Array) -> jax.Array:
    names = tuple(refs)
    swizzle = plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    tilings = {"w": plgpu.TilingTransform((8, 128)), "x": plgpu.TilingTransform((8, 64))}  # type: ignore[abstract]
    transforms = {name: (swizzle,) if plan.apart else (tiling, swizzle) for name, tiling in tilings.items()}
    kinds = [plgpu.RefType(transforms.get(name, ())) for name in names]

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT, *kinds), return_type=plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=LAYOUT)
    )
    def add(_: Any, total: mgpu.FragmentedArray, *arrays: ir.Value) -> mgpu.FragmentedArray:
        emit = StreamEmitter(plan.dtype, {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)})
        sums = Warp(plan, emit).add_to(_numbers(total))
        registers = np.empty(total.registers.shape, object)
        pair = ir.VectorType.get((2,), emit.f32)
        registers.flat = [vector.from_elements(pair, sums[i : i + 2]) for i in range(0, len(sums), 2)]
        return mgpu.FragmentedArray(_registers=registers, _layout=LAYOUT.to_mgpu(), _is_signed=None)

    return add(total, *refs.values())


def _store(plan: Plan, place: list[jax.Array], total: jax.Array, parts: Any, out: Any) -> None:
    """Adds the warps' sums in their order, and stores what exists: out [split, M, N]."""
    scalars = (plgpu.Layout.WG_SPLAT(()),) * len(place)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), plgpu.RefType(), *scalars), return_type=())
    def store(_: Any, total: mgpu.FragmentedArray, *arrays: Any) -> tuple[()]:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(("parts", "out"), arrays[:2])}
        emit = StreamEmitter(plan.dtype, pointers)
        run: Any = store_group if plan.apart else store_sums
        run(plan, emit, *(each.registers.item() for each in arrays[2:]), _numbers(total))
        return ()

    store(total, parts, out, *place)


def _numbers(x: mgpu.FragmentedArray) -> list[ir.Value]:
    return [
        vector.extract(register, [], ir.DenseI64ArrayAttr.get([i])) for register in x.registers.flat for i in range(2)
    ]


class Warp(Codes):
    """Does one thread's work with a stage, in operations of `emit`, a StreamEmitter."""

    def __init__(self, plan: Plan, emit: Any) -> None:
        super().__init__(plan.format, plan.dtype, emit)
        self.plan, config = plan, plan.config
        self.small = _small(plan)
        self.columns = plan.step * config.fold // PARTS  # of a warp
        thread = emit.thread()
        part = emit.bits_and(emit.shift_right(thread, 5), PARTS - 1)
        self.of_half = config.row_tiles // plan.halves  # row tiles
        first = emit.times(emit.shift_right(thread, 7), WARP_ROWS * self.of_half)  # row of the warpgroup
        # A load brings four matrices of 8 rows of 16 bytes; of each a lane says where one row is.
        matrix, row = emit.shift_right(self.lane, 3), emit.bits_and(self.lane, 7)
        unit = emit.add(emit.times(part, self.columns // RUN), emit.shift_right(matrix, 1))
        eights = emit.add(emit.shift_right(first, 3), emit.bits_and(matrix, 1))
        # Blocks of rows' 128 bytes follow each other. If copies are of such rows, next are those of 8 rows more.
        self.further = 1 if plan.apart else config.fold
        across = emit.times(emit.shift_right(unit, 3), config.rows // 8 if plan.apart else 1)
        self.w = self.places(emit.add(emit.times(eights, self.further), across), row, emit.bits_and(unit, 7), 2)
        tiles, pieces, own = config.tokens // TOKENS, plan.step // PIECE, self.columns // PIECE
        if plan.apart:
            block = emit.times(part, own * tiles)
        else:
            in_fold = PARTS // config.fold  # warps that have columns of the same rows of x_s
            block = emit.times(emit.shift_right(part, in_fold.bit_length() - 1), tiles * pieces)
            block = emit.add(block, emit.times(emit.bits_and(part, in_fold - 1), own))
        self.x = self.places(block, row, matrix, 4)
        self.vectors = {}
        above = emit.add(first, emit.shift_right(self.lane, 2))
        for name in ("scales", "zeros"):
            if name in emit.names:
                group = emit.shift_right(emit.times(part, self.columns), self.group.bit_length() - 1)
                self.vectors[name] = emit.add(emit.times(group, plan.vector_rows(name)), above)

    @property
    def group(self) -> int:
        group = self.plan.format.group
        assert group is not None
        return group

    def places(self, block: Any, row: Any, unit: Any, other: int) -> list[Any]:
        """Returns where 16 bytes of a swizzled row are, and those of the unit `other` further, a bit that `unit`
        lacks."""
        emit = self.emit
        start = emit.add(emit.times(block, BLOCK), emit.times(row, 128))
        start = emit.add(start, emit.times(emit.xor(unit, row), 16))
        return [start, emit.bits_xor(start, 16 * other)]

    def add_to(self, total: list[Any]) -> list[Any]:
        """Adds to `total` the products of the warp's columns of a stage. For each 16 rows of the weight and 8 of x
        these are the lane's four float32 of a product. They are of rows l and l + 8 of the weight, each with two rows
        of x."""
        total = list(total)
        span = max(PIECE, min(self.group, self.columns))
        for first in range(0, self.columns, span):
            self.add_span(total, first, span)
        return total

    def add_span(self, total: list[Any], first: int, span: int) -> None:
        """Adds products of `span` columns from `first` of the warp's on: of whole groups, or of a part of one."""
        emit, tiles = self.emit, range(self.plan.config.tokens // TOKENS)
        size = min(self.group, span)
        groups = [range(begin, begin + size, RUN) for begin in range(first, first + span, size)]
        x = {(n, c): self.load_x(n, c) for runs in groups for c in runs for n in tiles}
        sums = [[self.sum_x([x[n, c] for c in runs]) for n in tiles] for runs in groups]
        for r in range(self.plan.config.row_tiles):
            codes = {c: words for p in range(first, first + span, PIECE) for c, words in self.load_codes(r, p)}
            for runs, sum_x in zip(groups, sums):
                products = [[emit.zero()] * 4 for _ in tiles]
                for c in runs:
                    lower, upper = (self.packed_pairs([word]) for word in codes[c])
                    for i in (0, 2):
                        left = [lower[i], upper[i], lower[i + 1], upper[i + 1]]
                        products = [emit.multiply_add(left, x[n, c][i : i + 2], products[n]) for n in tiles]
                self.add_group(total, r, runs[0] // self.group, products, sum_x)

    def load_x(self, n: int, column: int) -> list[Any]:
        """Loads the lane's four pairs of 32 columns of the n-th 8 rows of x, in the order of pairs of codes."""
        tiles = self.plan.config.tokens // TOKENS
        block = column // PIECE * tiles + n if self.plan.apart else n * (self.plan.step // PIECE) + column // PIECE
        pairs = self.emit.matrices("x", self.x[column // RUN % 2], block * BLOCK)
        if self.small:
            return [self.emit.multiply(pair, self.emit.c(LARGER_BITS << 16 | LARGER_BITS)) for pair in pairs]
        return self.by_bytes(pairs) if self.format.codes == "nf4" else pairs

    def e2m1_pairs(self, word: Any) -> list[Any]:
        """Returns values, in bfloat16 times 2^-126. A nibble's bits of sign and value are brought to their places by
        one product, which leaves others between them."""
        if not self.small:
            return super().e2m1_pairs(word)
        emit, words = self.emit, (word, self.emit.shift_right(word, 8))
        moved = [
            emit.times(emit.bits_and(words[p // 2], 0xF000F << p % 2 * 4), 1 << 12 - p % 2 * 4 | 1 << 6 - p % 2 * 4)
            for p in range(4)
        ]
        return [emit.bits_and(each, 0x81C081C0) for each in moved]

    def load_codes(self, r: int, column: int) -> list[tuple[int, list[Any]]]:
        """Loads codes of 64 columns of a row tile: first columns, each with the lane's words of rows l and l + 8."""
        half, own = divmod(r, self.of_half)
        eights = half * (self.plan.rows // 8) + own * (WARP_ROWS // 8)
        words = self.emit.matrices("w", self.w[column // PIECE % 2], eights * self.further * BLOCK)
        return [(column, words[:2]), (column + RUN, words[2:])]

    def sum_x(self, x: list[list[Any]]) -> list[Any]:
        """Sums a group of the lane's two rows of x. The sums are zero if no offset is taken from codes."""
        emit = self.emit
        sums = [emit.zero()] * 4
        for pairs in x if self.biased else ():
            for i in (0, 2):
                sums = emit.multiply_add([emit.c(self.one)] * 4, pairs[i : i + 2], sums)
        return sums[:2]

    def add_group(self, total: list[Any], r: int, group: int, products: list[list[Any]], sums: list[Any]) -> None:
        """Adds a group's products with a row tile to `total`: less the codes' offset times `sums`, then scaled."""
        emit = self.emit
        for lower in range(2):
            scale = self.vector("scales", r, lower, group)
            offset = emit.number(-self.bias)
            if "zeros" in self.vectors:
                offset = emit.minus(offset, emit.float_of(self.vector("zeros", r, lower, group)))
            for n, (found, sum_x) in enumerate(zip(products, sums)):
                for i in range(2):
                    at = (r * len(products) + n) * 4 + 2 * lower + i
                    value = found[2 * lower + i]
                    if self.biased:
                        value = emit.fused(offset, sum_x[i], value)
                    total[at] = emit.fused(value, scale, total[at])

    def vector(self, name: str, r: int, lower: int, group: int) -> Any:
        """Returns a row's scale as float32, or its zero as an integer."""
        half, own = divmod(r, self.of_half)
        groups = self.plan.config.fold * self.plan.groups  # of a half
        more = (half * groups + group) * self.plan.vector_rows(name) + own * WARP_ROWS + 8 * lower
        if name == "zeros":
            return self.emit.load(name, self.vectors[name], 8, more)
        if self.format.scale_codes == "e8m0":
            return self.emit.load(name, self.vectors[name], "e8m0", more)
        return self.emit.load(name, self.emit.times(self.vectors[name], 2), "f16", 2 * more)


def store_sums(plan: Plan, emit: Any, row: Any, split: Any, total: list[Any]) -> None:
    """Stores one thread's share of _store, from the warpgroup's first row on."""
    config, stride, width = plan.config, plan.parts_stride, plan.out_dtype.itemsize
    thread = emit.bits_and(emit.thread(), THREADS - 1)
    lane = emit.bits_and(thread, 31)
    emit.advance("out", split, plan.m * plan.n * width)
    emit.advance("out", row, width)
    own = emit.add(emit.times(emit.shift_right(thread, 5), WARP_ROWS), emit.shift_right(lane, 2))
    own = emit.times(emit.add(own, emit.times(emit.bits_and(lane, 3), 2 * stride)), 4)
    tiles = config.tokens // TOKENS
    for r in range(config.row_tiles):
        emit.synchronize_warpgroup()  # all have read what was there
        for n in range(tiles):
            for i, x in enumerate(total[(r * tiles + n) * 4 :][:4]):
                more = (TOKENS * n + i % 2) * stride + i // 2 * 8
                emit.store_float("parts", emit.add(own, emit.c(4 * more)), x, jnp.dtype("float32"))
        emit.synchronize_warpgroup()

        def store(r: int = r) -> None:
            for first in range(0, WARP_ROWS * plan.m, THREADS):
                # More threads than there are elements store the last one: none is apart from others at a barrier.
                element = emit.minimum(emit.add(thread, emit.c(first)), WARP_ROWS * plan.m - 1)
                in_tile = emit.bits_and(element, WARP_ROWS - 1)
                token = emit.shift_right(element, WARP_ROWS.bit_length() - 1)
                place = emit.times(emit.add(emit.times(token, stride), in_tile), 4)
                value = emit.load("parts", place, "f32")
                for part in range(1, PARTS):
                    value = emit.plus(value, emit.load("parts", place, "f32", 4 * WARP_ROWS * part))
                at = emit.add(emit.times(token, plan.n * width), emit.times(in_tile, width))
                emit.store_float("out", emit.add(at, emit.c(WARP_ROWS * r * width)), value, plan.out_dtype)

        if plan.n % config.rows:  # of the last tile some row tiles do not exist
            emit.only(emit.below(emit.add(row, emit.c(WARP_ROWS * r)), plan.n), store)
        else:
            store()


def store_group(plan: Plan, emit: Any, row: Any, token: Any, count: Any, live: Any, total: list[Any]) -> None:
    """Stores one thread's share of _store for a group's `count` rows, which are zero if none is `live`."""
    config, stride, width = plan.config, plan.parts_stride, plan.out_dtype.itemsize
    thread = emit.bits_and(emit.thread(), THREADS - 1)
    lane, tiles, own = emit.bits_and(thread, 31), config.tokens // TOKENS, config.row_tiles // plan.halves
    of_tile = 4 * stride * config.tokens  # bytes of a row tile's sums
    emit.advance("out", token, plan.n * width)
    emit.advance("out", row, width)
    place = emit.add(emit.times(emit.shift_right(thread, 5), WARP_ROWS), emit.shift_right(lane, 2))
    place = emit.times(emit.add(place, emit.times(emit.bits_and(lane, 3), 2 * stride)), 4)
    emit.synchronize_warpgroup()  # all have read what was there
    for r in range(config.row_tiles):
        for n in range(tiles):
            for i, x in enumerate(total[(r * tiles + n) * 4 :][:4]):
                more = of_tile * r + 4 * ((TOKENS * n + i % 2) * stride + i // 2 * 8)
                emit.store_float("parts", emit.add(place, emit.c(more)), x, jnp.dtype("float32"))
    emit.synchronize_warpgroup()

    def sum_of(r: int, place: Any) -> Any:
        value = emit.load("parts", place, "f32", of_tile * r)
        for part in range(1, PARTS):
            value = emit.plus(value, emit.load("parts", place, "f32", of_tile * r + 4 * WARP_ROWS * part))
        return value

    for first in range(0, config.tokens, THREADS // WARP_ROWS):
        in_tile = emit.bits_and(thread, WARP_ROWS - 1)
        of_token = emit.add(emit.shift_right(thread, WARP_ROWS.bit_length() - 1), emit.c(first))
        place = emit.times(emit.add(emit.times(of_token, stride), in_tile), 4)
        at = emit.add(emit.times(of_token, plan.n * width), emit.times(in_tile, width))

        def store(place: Any = place, at: Any = at) -> None:
            for r in range(own):

                def store_tile(r: int = r) -> None:
                    value = sum_of(r, place)
                    if plan.gated:
                        value = emit.silu(value, sum_of(own + r, place))
                    value = emit.select(emit.equal(live, emit.c(0)), emit.zero(), value)
                    emit.store_float("out", emit.add(at, emit.c(WARP_ROWS * r * width)), value, plan.out_dtype)

                if plan.n % plan.rows:  # of the last tile some row tiles do not exist
                    emit.only(emit.below(emit.add(row, emit.c(WARP_ROWS * r)), plan.n), store_tile)
                else:
                    store_tile()

        emit.only(emit.less(of_token, count), store)
