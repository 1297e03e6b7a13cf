"""Turns codes in shared memory into wgmma's 16-bit left operand in registers, for the kernel of weight_only_matmul.

Let l = lane / 4 and c = lane % 4. A thread of wgmma's left operand holds pairs of rows l and l + 8 of its warp's 16
rows. Of each 16 columns these are 2c, 2c + 1 and 8 + 2c, 9 + 2c. Integers become floats by their bits: with `magic` the
bits of 2^7 in bfloat16 or 2^10 in float16, magic | u is that power plus u.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.formats.weight_formats import NF4, WeightFormat
from pallas_kernels.weight_only_matmul.emitter_sm90 import Emitter

ROWS, COLUMNS = 64, 64  # of an operand
_MAGIC = {"bfloat16": 0x4300, "float16": 0x6400}


@dataclass(frozen=True)
class Tile:
    """Describes how codes lie in a stage: [rows, fold * width] bytes in tiles of 8 rows by `swizzle` bytes. Scales
    and zeros are [halves * fold * groups, rows of a half or more]. Of two halves each is a row tile."""

    format: WeightFormat
    dtype: jnp.dtype
    width: int  # bytes
    swizzle: int  # bytes
    rows: int  # of the weight
    fold: int
    groups: int
    vector_rows: dict[str, int]  # the last dimension of scales and zeros
    halves: int = 1


def pair_table(dtype: jnp.dtype) -> jax.Array:
    """Returns int32 [256, 32]: the two values that a byte of NF4 codes stands for, the low nibble's in the low half.
    There is one for each bank of shared memory, so that no two threads of a warp ever meet in one."""
    values = np.asarray(NF4, np.float64).astype(dtype).view(np.uint16).astype(np.uint32)
    pairs = values[None, :] | values[:, None] << 16
    return jnp.asarray(np.broadcast_to(pairs.reshape(256, 1), (256, 32)).view(np.int32))


def operand(tile: Tile, refs: dict[str, Any], j: int, r: int, row_tiles: int) -> jax.Array:
    """Returns [64, 64] of the weight: rows of the warpgroup's r-th row tile, columns from 64 j on, scaled by group."""
    names = tuple(refs)
    swizzle = (plgpu.TilingTransform((8, tile.swizzle)), plgpu.SwizzleTransform(tile.swizzle))  # type: ignore[abstract]

    @plgpu.inline_mgpu(
        arg_types=tuple(plgpu.RefType(swizzle if name == "w" else ()) for name in names),
        return_type=plgpu.ShapeDtypeStruct((ROWS, COLUMNS), tile.dtype, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, *arrays: ir.Value) -> mgpu.FragmentedArray:
        emit = Emitter(tile.dtype, {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)})
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, COLUMNS)), object)
        pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(tile.dtype))
        registers.flat = [llvm.bitcast(pair, bits) for bits in Converter(tile, emit, j, r, row_tiles).pairs().flat]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return convert(*refs.values())


class Codes:
    """Turns codes of a format into pairs of 16-bit floats, in 32-bit operations of `emit`. That is an Emitter, or a
    test's stand-in for one."""

    def __init__(self, fmt: WeightFormat, dtype: jnp.dtype, emit: Any) -> None:
        self.format, self.dtype, self.emit = fmt, dtype, emit
        self.lane = emit.bits_and(emit.thread(), 31)
        magic, half = _MAGIC[dtype.name], dtype == jnp.float16
        # What pairs have too much, as bits.
        self.biased = {"int4": magic | 8, "int8": (magic | 0x80) if half else 0}.get(fmt.codes, 0)
        self.bias = np.array(self.biased, np.uint16).view(dtype).astype(float).item()
        self.one = _twice(0x3C00 if half else 0x3F80)  # a pair of ones

    def offset(self, zero: Any) -> Any:
        """Returns what is to be subtracted from pairs for a zero, an integer, or for none."""
        emit = self.emit
        if zero is None:
            return emit.c(_twice(self.biased)) if self.biased else None
        if self.biased:
            return emit.times(emit.add(zero, emit.c(self.biased)), 0x10001)
        return emit.both(emit.float_of(zero))

    def finish(self, pair: Any, offset: Any, scale: Any) -> Any:
        """Returns the pair of the operand."""
        pair = pair if offset is None else self.emit.subtract(pair, offset)
        return pair if scale is None else self.emit.multiply(pair, scale)

    def int4_pairs(self, word: Any) -> list[Any]:
        """Returns magic + 8 + code."""
        emit, magic = self.emit, _twice(_MAGIC[self.dtype.name] | 8)
        return [emit.masked_xor(emit.shift_right(word, 4 * p), _twice(15), magic) for p in range(4)]

    def e2m1_pairs(self, word: Any) -> list[Any]:
        """Returns values. The bits of exponent and mantissa go where a float has its lowest of one and highest of the
        other. That is the value, subnormal too, times a power of two that one product takes back."""
        emit, half = self.emit, self.dtype == jnp.float16
        place, power = (9, 0x7400) if half else (6, 0x7E80)  # 2^14 and 2^126
        words = word, emit.shift_right(word, 8)

        def pair_by_one_product(p: int) -> Any:
            """Moves the sign and the rest at once. What else comes of it goes out, and meets no bit of these."""
            code = emit.bits_and(words[p // 2], _twice(15 << 4 * (p % 2)))
            moved = emit.times(code, (1 << 12 | 1 << place) >> 4 * (p % 2))
            return emit.multiply(emit.bits_and(moved, _twice(0x8000 | 7 << place)), emit.c(_twice(power)))

        def pair(p: int) -> Any:
            signs = emit.bits_and(emit.times(word, 1 << (12 - 4 * p)), _twice(0x8000))
            moved = place - 4 * p
            rest = emit.times(word, 1 << moved) if moved > 0 else emit.shift_right(word, -moved)
            return emit.multiply(emit.masked_xor(rest, _twice(7 << place), signs), emit.c(_twice(power)))

        return [(pair if half else pair_by_one_product)(p) for p in range(4)]

    def nf4_pairs(self, word: Any) -> list[Any]:
        """Sorts bytes' pairs into pairs of i."""
        found, permute = self.nf4_bytes(word), self.emit.permute
        return [permute(found[p // 2], found[2 + p // 2], 0x7632 if p % 2 else 0x5410) for p in range(4)]

    def nf4_bytes(self, word: Any) -> list[Any]:
        """Looks up what each byte stands for: byte 2 i + p / 2 for nibbles p and p + 1 of one i."""
        emit = self.emit
        lane = emit.times(self.lane, 4)

        def look_up(byte: int) -> Any:
            shifted = emit.times(word, 1 << 7) if byte == 0 else emit.shift_right(word, 8 * byte - 7)
            return emit.load("table", emit.masked_xor(shifted, 0xFF << 7, lane), 32)

        return [look_up(byte) for byte in range(4)]

    def int8_pair(self, word: Any, half: int = 0) -> Any:
        """Returns the codes in a half of a word in bfloat16; in float16 magic + 128 + code."""
        emit = self.emit
        spread = emit.permute(word, emit.c(0), 0x4342 if half else 0x4140)
        if self.dtype == jnp.float16:
            return emit.bits_xor(spread, _twice(0x6400 | 0x80))
        magic = _twice(_MAGIC["bfloat16"])  # 2^7 + the low 7 bits, less 2^7, or 2^8 for a negative code
        low = emit.masked_xor(spread, _twice(0x7F), magic)
        return emit.subtract(low, emit.masked_xor(spread, _twice(0x80), magic))

    def packed_pairs(self, words: list[Any]) -> list[Any]:
        decode = {"int4": self.int4_pairs, "nf4": self.nf4_bytes, "e2m1": self.e2m1_pairs}[self.format.codes]
        by_word = [decode(word) for word in words]
        return [pairs[p] for p in range(4) for pairs in by_word]

    def by_bytes(self, x: list[Any]) -> list[Any]:
        """Pairs x, four to a word of codes, as the codes of a byte are: 8 columns apart."""
        words = len(x) // 4
        return [
            self.emit.permute(x[p + w], x[p + words + w], selector)
            for selector in (0x5410, 0x7632)
            for p in (0, 2 * words)
            for w in range(words)
        ]

    def byte_pairs(self, words: list[Any]) -> list[Any]:
        decode = self.int8_pair if self.format.codes == "int8" else self.emit.from_fp8
        return [decode(word, half) for word in words for half in range(2)]

    def fill_table(self) -> None:
        """Fills in the pairs of all bytes, 32 times each, by the CTA's first 128 threads. A warp has 64 of them, 4 at a
        time."""
        emit = self.emit
        byte = emit.add(emit.times(emit.shift_right(emit.thread(), 5), 64), emit.shift_right(self.lane, 3))
        place = emit.add(emit.times(byte, 128), emit.times(emit.bits_and(self.lane, 7), 16))
        for i in range(16):
            (pair,) = emit.fetch("bytes", emit.times(byte, 4), 16 * i, 1)
            emit.store("table", place, 512 * i, [pair] * 4)


class Converter(Codes):
    """Converts one thread's share of an operand in a stage of the ring."""

    def __init__(self, tile: Tile, emit: Any, j: int, r: int, row_tiles: int) -> None:
        super().__init__(tile.format, tile.dtype, emit)
        self.tile, self.j = tile, j
        kept = ROWS // tile.fold
        thread = emit.thread()
        above = emit.shift_right(self.lane, 2)
        warp = emit.bits_and(emit.shift_right(thread, 5), 3)
        in_operand = emit.add(emit.times(warp, 16), above)
        self.part = emit.shift_right(in_operand, kept.bit_length() - 1)  # of K
        gated = tile.halves == 2
        self.half = r if gated else 0
        of_warpgroup = kept if gated else kept * row_tiles
        row = emit.add(emit.times(emit.shift_right(thread, 7), of_warpgroup), emit.bits_and(in_operand, kept - 1))
        self.row = row if gated else emit.add(row, emit.c(r * kept))  # in its half of the tile of the weight's rows
        in_tile = emit.add(row, emit.c(self.half * (tile.rows // 2))) if gated else self.row
        block = emit.add(emit.times(emit.shift_right(in_tile, 3), tile.fold), self.part)  # of 8 rows
        swizzled = emit.shift_right(above, {128: 0, 64: 1, 32: 2}[tile.swizzle])
        start = emit.add(emit.times(block, 8 * tile.width), emit.times(above, tile.swizzle))
        start = emit.add(start, emit.times(swizzled, 16))
        self.start = emit.add(start, emit.times(emit.bits_and(self.lane, 3), 4 if tile.format.packed else 2))
        self.below = 8 * tile.fold * tile.width  # from a row's codes to those of the row 8 further

    def pairs(self) -> np.ndarray:
        """Returns [8, 2] of 32 bits: by groups of 8 columns, rows l and l + 8."""
        found = np.empty((COLUMNS // 8, 2), object)
        blocks = (COLUMNS // 2 if self.tile.format.packed else COLUMNS) // 16  # of 16 bytes
        count = len(found) // blocks  # groups of 8 columns of each
        for lower in range(2):
            finish: dict[int, Any] = {}
            for block in range(blocks):
                group = (self.j * COLUMNS + block * count * 8) // (self.tile.format.group or self.tile.width * 2)
                if group not in finish:
                    finish[group] = self.finisher(lower, group)
                words = self.words(lower, self.j * blocks + block)
                for k in range(count):
                    found[block * count + k, lower] = finish[group](words[k])
        return found

    def words(self, lower: int, block: int) -> list[Any]:
        """Returns pairs of a row's codes in a block of 16 bytes, before zeros and scales: 16-bit floats, by 8
        columns."""
        codes, emit = self.tile.format.codes, self.emit
        across, within = divmod(block, self.tile.swizzle // 16)
        start, more = emit.bits_xor(self.start, within << 4), lower * self.below + across * 8 * self.tile.swizzle
        if self.tile.format.packed:
            decode = {"int4": self.int4_pairs, "nf4": self.nf4_pairs, "e2m1": self.e2m1_pairs}[codes]
            return decode(emit.load("w", start, 32, more))
        found = [emit.load("w", start, 16, more + 8 * h) for h in range(2)]
        return [self.int8_pair(x) if codes == "int8" else emit.from_fp8(x) for x in found]

    def finisher(self, lower: int, group: int) -> Any:
        """Returns what makes the operand's pair of a pair of words(): it subtracts the zero, multiplies by the
        scale."""
        emit, fmt = self.emit, self.tile.format
        offset = scale = None
        if "zeros" in emit.names:
            offset = self.offset(emit.load("zeros", self.vector_index("zeros", group), 8, lower * 8))
        elif self.biased:
            offset = self.offset(None)
        if fmt.group is not None:
            kind, size = ("e8m0", 1) if fmt.scale_codes == "e8m0" else ("f16", 2)
            at = emit.times(self.vector_index("scales", group), size)
            scale = emit.both(emit.load("scales", at, kind, lower * 8 * size))

        return partial(self.finish, offset=offset, scale=scale)

    def vector_index(self, name: str, group: int) -> Any:
        """Returns where in scales or zeros a row's are."""
        if self.tile.format.group is None:
            return self.row
        emit, rows = self.emit, self.tile.vector_rows[name]
        at = emit.add(emit.times(self.part, self.tile.groups * rows), self.row)
        return emit.add(at, emit.c((self.half * self.tile.groups + group) * rows))


def _twice(bits: int) -> int:
    return bits << 16 | bits
