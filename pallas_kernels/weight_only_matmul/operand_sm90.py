"""Codes in shared memory to wgmma's 16-bit left operand in registers, for the kernel of weight_only_matmul.

A thread of wgmma's left operand holds, of each 16 columns, the pairs 2c, 2c + 1 and 8 + 2c, 9 + 2c of rows l and l + 8
of its warp's 16 rows, where l = lane / 4 and c = lane % 4. Integers become floats by their bits: with `magic` the bits
of 2^7 in bfloat16 or 2^10 in float16, magic | u is that power plus u.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.quantized_weights import NF4, WeightFormat, unpack4

ROWS, COLUMNS = 64, 64  # of an operand
_MAGIC = {"bfloat16": 0x4300, "float16": 0x6400}


@dataclass(frozen=True)
class Tile:
    """How codes lie in a stage: [rows, fold * width] bytes in tiles of 8 rows by `width`, swizzled; scales and zeros
    [fold * groups, rows or more]."""

    format: WeightFormat
    dtype: jnp.dtype
    width: int  # bytes
    rows: int  # of the weight
    fold: int
    groups: int
    vector_rows: dict[str, int]  # the last dimension of scales and zeros
    interpreted: bool


def pair_table(dtype: jnp.dtype) -> jax.Array:
    """int32 [256, 32]: the two values that a byte of NF4 codes stands for, the low nibble's in the low half; once for
    each bank of shared memory, so that no two threads of a warp ever meet in one."""
    values = np.asarray(NF4, np.float64).astype(dtype).view(np.uint16).astype(np.uint32)
    pairs = values[None, :] | values[:, None] << 16
    return jnp.asarray(np.broadcast_to(pairs.reshape(256, 1), (256, 32)).view(np.int32))


def operand(tile: Tile, refs: dict[str, Any], warpgroup: jax.Array, j: int, r: int, row_tiles: int) -> jax.Array:
    """[64, 64] of the weight: rows of the r-th row tile of the warpgroup, columns from 64 j on, scaled by group."""
    if tile.interpreted:
        return _interpreted(tile, refs, warpgroup, j, r, row_tiles)
    names = tuple(refs)
    swizzle = (plgpu.TilingTransform((8, tile.width)), plgpu.SwizzleTransform(tile.width))  # type: ignore[abstract]

    @plgpu.inline_mgpu(
        arg_types=tuple(plgpu.RefType(swizzle if name == "w" else ()) for name in names),
        return_type=plgpu.ShapeDtypeStruct((ROWS, COLUMNS), tile.dtype, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, *arrays: ir.Value) -> mgpu.FragmentedArray:
        pointers = {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)}
        return _Converter(tile, pointers, j, r, row_tiles).fragments()

    return convert(*refs.values())


def _interpreted(tile: Tile, refs: dict[str, Any], warpgroup: jax.Array, j: int, r: int, row_tiles: int) -> jax.Array:
    """The same by the format's definition, with the same roundings."""
    kept, first_column = ROWS // tile.fold, j * COLUMNS
    first = warpgroup * row_tiles * kept + r * kept

    def rows_of(x: jax.Array) -> jax.Array:  # [fold * some, rows] -> [some, 64]
        x = lax.dynamic_slice_in_dim(x.reshape(tile.fold, -1, x.shape[-1]), first, kept, axis=2)
        return jnp.moveaxis(x, 0, 1).reshape(-1, ROWS)

    codes = rows_of(refs["w"][...].T).T
    if tile.format.packed:
        codes = unpack4(codes, signed=tile.format.codes == "int4")
    codes = codes[:, first_column : first_column + COLUMNS]
    if tile.format.codes == "nf4":
        values = jnp.zeros(codes.shape, jnp.float32)
        for i, value in enumerate(NF4):
            values = jnp.where(codes == i, value, values)
        values = values.astype(tile.dtype)
    elif tile.format.codes == "fp8":
        values = codes.astype(jnp.float32).astype(tile.dtype)
    else:
        values = codes.astype(tile.dtype)

    def spread(name: str) -> jax.Array:
        x = refs[name][...].astype(tile.dtype)
        if tile.format.group is None:
            x = lax.dynamic_slice_in_dim(x, first, kept)
            return jnp.concatenate([x] * tile.fold)[:, None]
        halves = [rows_of(x)[(first_column + half) // tile.format.group] for half in (0, COLUMNS // 2)]
        return jnp.concatenate([jnp.broadcast_to(x[:, None], (ROWS, COLUMNS // 2)) for x in halves], axis=1)

    if "zeros" in refs:
        values = values - spread("zeros")
    return values * spread("scales") if tile.format.group is not None else values


class _Converter:
    """Emits one thread's share of an operand."""

    def __init__(self, tile: Tile, pointers: dict[str, ir.Value], j: int, r: int, row_tiles: int) -> None:
        self.tile, self.pointers, self.j = tile, pointers, j
        self.i8, self.i16, self.i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
        self.half = mgpu.utils.dtype_to_ir_type(tile.dtype)
        self.pair = ir.VectorType.get((2,), self.half)
        kept = ROWS // tile.fold
        thread = mgpu.utils.thread_idx()
        self.lane = self.bits_and(thread, 31)
        above = self.shift_right(self.lane, 2)
        self.quad = self.bits_and(self.lane, 3)
        warp = self.bits_and(self.shift_right(thread, 5), 3)
        warpgroup = self.shift_right(thread, 7)
        in_operand = self.add(self.times(warp, 16), above)
        self.part = self.shift_right(in_operand, kept.bit_length() - 1)  # of K
        row = self.add(self.times(warpgroup, kept * row_tiles), self.bits_and(in_operand, kept - 1))
        self.row = self.add(row, self.c(r * kept))  # in the tile of the weight's rows
        block = self.add(self.times(self.shift_right(self.row, 3), tile.fold), self.part)  # of 8 rows
        swizzled = above if tile.width == 128 else self.shift_right(above, 1)
        start = self.add(self.times(block, 8 * tile.width), self.times(above, tile.width))
        start = self.add(start, self.times(swizzled, 16))
        self.below = 8 * tile.fold * tile.width  # from a row's codes to those of the row 8 further
        self.start = self.add(start, self.times(self.quad, 4 if tile.format.packed else 2))

    def fragments(self) -> mgpu.FragmentedArray:
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, COLUMNS)), object)
        flat = registers.reshape(COLUMNS // 8, 2)  # groups of 8 columns, rows l and l + 8
        width = COLUMNS // 2 if self.tile.format.packed else COLUMNS
        group = self.tile.format.group
        for lower in range(2):
            finish: dict[int, Any] = {}
            for block in range(width // 16):  # of 16 bytes
                first = block * (8 // (width // 16))
                count = 8 // (width // 16)  # groups of 8 columns
                column = (self.j * COLUMNS + first * 8) // (group or 1) if group else 0
                if column not in finish:
                    finish[column] = self.finisher(lower, column)
                words = self.words(lower, self.j * (width // 16) + block)
                assert len(words) == count
                for k, word in enumerate(words):
                    value = finish[column](word)
                    flat[first + k, lower] = llvm.bitcast(self.pair, value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    def words(self, lower: int, block: int) -> list[ir.Value]:
        """Pairs of a row's codes in a block of 16 bytes, before zeros and scales: 16-bit floats, by 8 columns."""
        codes = self.tile.format.codes
        start = self.bits_xor(self.start, block << 4)
        if codes in ("int4", "nf4"):
            word = self.load("w", start, self.i32, lower * self.below)
            return self.int4_pairs(word) if codes == "int4" else self.nf4_pairs(word)
        found = [self.load("w", start, self.i16, lower * self.below + 8 * h) for h in range(2)]
        return [self.int8_pair(x) if codes == "int8" else self.fp8_pair(x) for x in found]

    def int4_pairs(self, word: ir.Value) -> list[ir.Value]:
        """magic + 8 + code."""
        magic = _twice(_MAGIC[self.tile.dtype.name] | 8)
        return [self.bits_xor(self.bits_and(self.shift_right(word, 4 * p), _twice(15)), magic) for p in range(4)]

    def nf4_pairs(self, word: ir.Value) -> list[ir.Value]:
        """Pairs (p, p + 1) of one i are looked up together, then sorted into pairs of i."""
        lane = self.times(self.lane, 4)

        def look_up(byte: int) -> ir.Value:
            shifted = self.shift_left(word, 7) if byte == 0 else self.shift_right(word, 8 * byte - 7)
            at = self.bits_or(self.bits_and(shifted, 0xFF << 7), lane)
            return self.load("table", at, self.i32)

        found = [look_up(byte) for byte in range(4)]
        return [
            self.asm("prmt.b32 $0, $1, $2, $3;", found[p // 2], found[2 + p // 2], self.c(0x7632 if p % 2 else 0x5410))
            for p in range(4)
        ]

    def int8_pair(self, codes: ir.Value) -> ir.Value:
        """The codes in bfloat16; in float16 magic + 128 + code."""
        spread = self.asm("prmt.b32 $0, $1, $2, $3;", self.widen(codes), self.c(0), self.c(0x4140))
        if self.tile.dtype == jnp.float16:
            return self.bits_xor(spread, _twice(0x6400 | 0x80))
        magic = _twice(_MAGIC["bfloat16"])  # 2^7 + the low 7 bits, less 2^7, or 2^8 for a negative code
        low = self.bits_or(self.bits_and(spread, _twice(0x7F)), magic)
        return self.subtract(low, self.bits_or(self.bits_and(spread, _twice(0x80)), magic))

    def fp8_pair(self, values: ir.Value) -> ir.Value:
        both = llvm.inline_asm(self.i32, [values], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        if self.tile.dtype == jnp.float16:
            return both
        halves = llvm.bitcast(ir.VectorType.get((2,), ir.F16Type.get()), both)
        wide = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), halves)
        return llvm.bitcast(self.i32, arith.truncf(self.pair, wide))

    def finisher(self, lower: int, group: int) -> Any:
        """What turns a pair of words() into the pair of the operand: subtracts the zero, multiplies by the scale."""
        fmt, offset, scale = self.tile.format, None, None
        magic = _MAGIC[self.tile.dtype.name]
        biased = {"int4": magic | 8, "int8": (magic | 0x80) if self.tile.dtype == jnp.float16 else 0}.get(fmt.codes, 0)
        if "zeros" in self.pointers:
            zero = arith.extsi(self.i32, self.load("zeros", self.vector_index("zeros", group), self.i8, lower * 8))
            if biased:
                offset = self.times(self.add(zero, self.c(biased)), 0x10001)
            else:
                offset = self.splat(arith.sitofp(ir.F32Type.get(), zero))
        elif biased:
            offset = self.c(_twice(biased))
        if fmt.group is not None:
            at = self.times(self.vector_index("scales", group), 2)
            scale = self.load("scales", at, ir.F16Type.get(), lower * 16)
            scale = self.splat(arith.extf(ir.F32Type.get(), scale))

        def finish(pair: ir.Value) -> ir.Value:
            if offset is not None:
                pair = self.subtract(pair, offset)
            return pair if scale is None else self.asm(f"mul.rn.{self.suffix} $0, $1, $2;", pair, scale)

        return finish

    def vector_index(self, name: str, group: int) -> ir.Value:
        if self.tile.format.group is None:
            return self.row
        rows = self.tile.vector_rows[name]
        at = self.add(self.times(self.part, self.tile.groups * rows), self.row)
        return self.add(at, self.c(group * rows))

    @property
    def suffix(self) -> str:
        return "bf16x2" if self.tile.dtype == jnp.bfloat16 else "f16x2"

    def splat(self, x: ir.Value) -> ir.Value:
        """A float32 rounded, in both halves."""
        rounded = arith.truncf(self.half, x)
        bits = arith.extui(self.i32, arith.bitcast(self.i16, rounded))
        return self.times(bits, 0x10001)

    def subtract(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.asm(f"sub.rn.{self.suffix} $0, $1, $2;", a, b)

    def asm(self, text: str, *arguments: ir.Value) -> ir.Value:
        return llvm.inline_asm(self.i32, list(arguments), text, "=r" + ",r" * len(arguments))

    def load(self, name: str, offset: ir.Value, kind: ir.Type, more: int = 0) -> ir.Value:
        """Of shared memory, `offset` + `more` bytes from an array's begin."""
        pointer = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        pointer = mgpu.utils.getelementptr(pointer, [more], self.i8) if more else pointer
        return llvm.load(kind, pointer)

    def c(self, value: int) -> ir.Value:
        return mgpu.c(value if value < 2**31 else value - 2**32, self.i32)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.addi(a, b)

    def times(self, a: ir.Value, b: int) -> ir.Value:
        return arith.muli(a, self.c(b))

    def widen(self, a: ir.Value) -> ir.Value:
        return arith.extui(self.i32, a)

    def bits_and(self, a: ir.Value, b: int) -> ir.Value:
        return arith.andi(a, self.c(b))

    def bits_xor(self, a: ir.Value, b: int) -> ir.Value:
        return arith.xori(a, self.c(b)) if b else a

    def bits_or(self, a: ir.Value, b: Any) -> ir.Value:
        return arith.ori(a, self.c(b) if isinstance(b, int) else b)

    def shift_right(self, a: ir.Value, b: int) -> ir.Value:
        return arith.shrui(a, self.c(b)) if b else a

    def shift_left(self, a: ir.Value, b: int) -> ir.Value:
        return arith.shli(a, self.c(b))


def _twice(bits: int) -> int:
    """In both halves of 32 bits."""
    return bits << 16 | bits
