"""Computes a lane's share in the kernel of weight_only_matmul for one row of x on sm_90.

Products are those of single warps (mma.m16n8k16), of which one row of x would use one column in eight. So a row of the
weight becomes eight of the operand. Lane 4g + t has columns t of row g of the left operand and of column g of the right
one. These are its own 32 columns (of 8 bits: 16) of the weight and of x. Sums of which g is not the same on both sides
mean nothing. The others are the sums of a quad of lanes, each of which has columns of one group. Once a chunk, a lane
with such a sum subtracts the codes' offset, as often as x says, and multiplies by the scale.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp

from pallas_kernels.formats.weight_formats import WeightFormat
from pallas_kernels.hopper.row_pieces_sm90 import LANES, WARPS
from pallas_kernels.weight_only_matmul.operand_sm90 import Codes

PIECE = 16  # bytes of a row of the weight that a lane has of a chunk
QUADS = LANES // 4


@dataclass(frozen=True)
class Plan:
    """Holds the sizes of a call: n rows of the weight, or of each of its two halves. A block has `kept` of each. If
    rows of x are in groups, there are `weights` such weights, one below the other. `across` warps share a row's
    columns."""

    n: int
    k: int
    dtype: jnp.dtype
    format: WeightFormat
    halves: int
    kept: int
    weights: int = 0
    across: int = WARPS

    @property
    def rows(self) -> int:
        return self.halves * self.kept

    @property
    def own(self) -> int:
        """Counts the rows of a warp: of both halves only if it has all of a block's rows."""
        return self.rows * self.across // WARPS

    @property
    def parts(self) -> int:
        """Counts the sums that add up to a row's."""
        return QUADS * self.across

    @property
    def stored(self) -> int:
        """Counts the rows of all weights."""
        return max(self.weights, 1) * self.halves * self.n

    @property
    def row_bytes(self) -> int:
        return self.k // self.columns_of_byte

    @property
    def columns_of_byte(self) -> int:
        return 2 if self.format.packed else 1

    @property
    def late(self) -> bool:
        """Tells whether all columns of a quad of lanes have one scale and zero, which then go with sums."""
        return self.format.group is None or self.format.group % (4 * PIECE * self.columns_of_byte) == 0


class Row(Codes):
    """Does one thread's work, in operations of `emit`, a StreamEmitter."""

    def __init__(self, plan: Plan, emit: Any, block: Any, row: Any, weight: Any) -> None:
        super().__init__(plan.format, plan.dtype, emit)
        self.plan = plan
        self.chunk = LANES * PIECE  # bytes
        self.stride = plan.across * self.chunk  # from one of a warp's chunks to the next
        self.steps = -(-plan.row_bytes // self.stride)
        warp = emit.bits_and(emit.shift_right(emit.thread(), 5), WARPS - 1)
        team = emit.shift_right(warp, plan.across.bit_length() - 1)
        # Which chunk of those that share a row: warps that have one more are not of one scheduler for all blocks.
        self.part = emit.bits_and(emit.add(warp, block), plan.across - 1)
        self.first = emit.times(team, plan.own)  # row of the block
        self.quad = emit.shift_right(self.lane, 2)
        self.at = emit.add(emit.times(self.part, self.chunk), emit.times(self.lane, PIECE))
        for name, size in {"w": plan.row_bytes, "scales": self.scale_bytes, "zeros": 1}.items():
            if name in emit.names:
                if plan.weights:
                    emit.advance(name, weight, plan.halves * plan.n * size)
                emit.advance(name, block, plan.kept * size)
                if plan.own <= plan.kept:
                    half = emit.shift_right(self.first, plan.kept.bit_length() - 1)
                    emit.advance(name, half, plan.n * size)
                    emit.advance(name, emit.bits_and(self.first, plan.kept - 1), size)
                else:
                    emit.pointers[f"{name}1"] = emit.pointers[name]  # of the second half
                    emit.advance(f"{name}1", emit.c(1), plan.n * size)
        if plan.weights and "x" in emit.names:
            emit.advance("x", row, 2 * plan.k)

    @property
    def scale_bytes(self) -> int:
        fmt = self.plan.format
        return 4 if fmt.group is None else 1 if fmt.scale_codes == "e8m0" else 2

    def whole(self, step: int) -> bool:
        """Returns whether all warps have whole chunks in this step."""
        return (step + 1) * self.stride <= self.plan.row_bytes

    def place(self, step: int) -> tuple[Any, int]:
        """Returns where the lane's bytes of a row are, as a number and what is to be added. Instead of bytes beyond the
        row they are its last ones."""
        more = step * self.stride
        if self.whole(step):
            return self.at, more
        return self.emit.minimum(self.emit.add(self.at, self.emit.c(more)), self.plan.row_bytes - PIECE), 0

    def load_codes(self, step: int) -> list[list[Any]]:
        """Loads four words for each row."""
        return [self.load_row(step, row) for row in range(self.plan.own)]

    def load_row(self, step: int, row: int) -> list[Any]:
        half, within = divmod(row, self.plan.kept)
        at, more = self.place(step)
        return self.emit.stream(f"w{half or ''}", at, more + within * self.plan.row_bytes, pinned=True)

    def load_x(self, step: int) -> list[Any]:
        """Loads pairs in the order in which codes are decoded: zeros beyond the last column."""
        emit, plan = self.emit, self.plan
        size = 2 * plan.columns_of_byte  # bytes of x for one of the weight
        at, more = self.place(step)
        start = emit.times(at, size)
        pairs = [
            word for i in range(0, size * PIECE, 16) for word in emit.vector("x", start, size * more + i)
        ]  # fmt: skip
        if not self.whole(step):
            inside = emit.below(emit.add(self.at, emit.c(step * self.stride)), plan.row_bytes)
            pairs = [emit.select(inside, pair, emit.c(0)) for pair in pairs]
        return self.by_bytes(pairs) if plan.format.codes == "nf4" else pairs

    def load_vectors(self, step: int, name: str) -> list[Any]:
        """Loads of each row the scale or zero of the lane's columns, as float32 or as an integer."""
        emit, plan = self.emit, self.plan
        if plan.format.group is None:
            return [self.row_vector(name, row) for row in range(plan.own)] if name in emit.names else []
        if name not in emit.names:
            return []
        of_group = plan.format.group // plan.columns_of_byte  # bytes of a row
        at, more = self.place(step)
        size = self.scale_bytes if name == "scales" else 1
        stride = plan.stored * size
        start = emit.times(emit.shift_right(at, of_group.bit_length() - 1), stride)
        found = []
        for half in range(-(-plan.own // plan.kept)):
            first, count = more // of_group * stride, min(plan.own, plan.kept) * size // 4
            words = []
            for i in range(0, count, 4):
                words += emit.fetch(f"{name}{half or ''}", start, first + 4 * i, min(4, count - i))
            if name == "zeros":
                found += [emit.signed_byte(word, i) for word in words for i in range(4)]
            elif size == 1:
                found += [emit.power(emit.byte(word, i)) for word in words for i in range(4)]
            else:
                found += [emit.widened(emit.low_half(word, i)) for word in words for i in range(2)]
        return found

    def row_vector(self, name: str, row: int) -> Any:
        """Loads the zero of a row that has only one."""
        half, within = divmod(row, self.plan.kept)
        return self.emit.load_vector(f"{name}{half or ''}", self.emit.c(0), within)

    def store_sums(self, codes: list[list[Any]]) -> None:
        """Stores the rows' sums that the lane's quad has, if this lane has it; `codes` are those of the first step."""
        emit, plan = self.emit, self.plan
        if "table" in emit.names:
            self.fill_table()
            emit.synchronize()
        totals = [emit.zero()] * plan.own
        for step in range(self.steps):
            inside = emit.below(emit.add(emit.times(self.part, self.chunk), emit.c(step * self.stride)), plan.row_bytes)
            add = partial(self.multiply, totals, step, codes)
            if self.whole(step):
                totals, codes = add()
            else:
                totals = emit.either(inside, lambda add=add: add()[0], totals)
        mine = emit.equal(emit.bits_and(self.lane, 3), emit.shift_right(self.quad, 1))
        place = emit.add(emit.times(self.first, plan.parts), emit.add(emit.times(self.part, QUADS), self.quad))

        def store() -> None:
            for row, total in enumerate(totals):
                at = emit.times(emit.add(place, emit.c(plan.parts * row)), 4)
                emit.store_float("parts", at, total, jnp.dtype("float32"))

        emit.only(mine, store)

    def multiply(self, totals: list[Any], step: int, codes: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
        """Returns the sums with those of a chunk, and the codes of the next one, asked for as registers become free."""
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
        for row in range(0, plan.own, 2):
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
        """Multiplies two rows' pairs by x."""
        sums = [self.emit.zero()] * 4
        for i in range(0, len(x), 2):
            sums = self.emit.multiply_add([row[i + j] for j in range(2) for row in rows], x[i : i + 2], sums)
        return sums
