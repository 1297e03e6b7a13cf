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
        emit = Emitter(tile.dtype, {name: mgpu.utils.memref_ptr(array) for name, array in zip(names, arrays)})
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((ROWS, COLUMNS)), object)
        pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(tile.dtype))
        registers.flat = [llvm.bitcast(pair, bits) for bits in Converter(tile, emit, j, r, row_tiles).pairs().flat]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

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


class Converter:
    """One thread's share of an operand, in 32-bit operations of `emit`: an Emitter, or a test's stand-in for one."""

    def __init__(self, tile: Tile, emit: Any, j: int, r: int, row_tiles: int) -> None:
        self.tile, self.emit, self.j = tile, emit, j
        kept = ROWS // tile.fold
        thread = emit.thread()
        self.lane = emit.bits_and(thread, 31)
        above = emit.shift_right(self.lane, 2)
        warp = emit.bits_and(emit.shift_right(thread, 5), 3)
        in_operand = emit.add(emit.times(warp, 16), above)
        self.part = emit.shift_right(in_operand, kept.bit_length() - 1)  # of K
        row = emit.add(emit.times(emit.shift_right(thread, 7), kept * row_tiles), emit.bits_and(in_operand, kept - 1))
        self.row = emit.add(row, emit.c(r * kept))  # in the tile of the weight's rows
        block = emit.add(emit.times(emit.shift_right(self.row, 3), tile.fold), self.part)  # of 8 rows
        swizzled = above if tile.width == 128 else emit.shift_right(above, 1)
        start = emit.add(emit.times(block, 8 * tile.width), emit.times(above, tile.width))
        start = emit.add(start, emit.times(swizzled, 16))
        self.start = emit.add(start, emit.times(emit.bits_and(self.lane, 3), 4 if tile.format.packed else 2))
        self.below = 8 * tile.fold * tile.width  # from a row's codes to those of the row 8 further

    def pairs(self) -> np.ndarray:
        """[8, 2] of 32 bits: by groups of 8 columns, rows l and l + 8."""
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
        """Pairs of a row's codes in a block of 16 bytes, before zeros and scales: 16-bit floats, by 8 columns."""
        codes, emit = self.tile.format.codes, self.emit
        start = emit.bits_xor(self.start, block << 4)
        if codes in ("int4", "nf4"):
            word = emit.load("w", start, 32, lower * self.below)
            return self.int4_pairs(word) if codes == "int4" else self.nf4_pairs(word)
        found = [emit.load("w", start, 16, lower * self.below + 8 * h) for h in range(2)]
        return [self.int8_pair(x) if codes == "int8" else emit.from_fp8(x) for x in found]

    def int4_pairs(self, word: Any) -> list[Any]:
        """magic + 8 + code."""
        emit, magic = self.emit, _twice(_MAGIC[self.tile.dtype.name] | 8)
        return [emit.bits_xor(emit.bits_and(emit.shift_right(word, 4 * p), _twice(15)), magic) for p in range(4)]

    def nf4_pairs(self, word: Any) -> list[Any]:
        """Pairs (p, p + 1) of one i are looked up together, then sorted into pairs of i."""
        emit = self.emit
        lane = emit.times(self.lane, 4)

        def look_up(byte: int) -> Any:
            shifted = emit.times(word, 1 << 7) if byte == 0 else emit.shift_right(word, 8 * byte - 7)
            return emit.load("table", emit.add(emit.bits_and(shifted, 0xFF << 7), lane), 32)

        found = [look_up(byte) for byte in range(4)]
        return [emit.permute(found[p // 2], found[2 + p // 2], 0x7632 if p % 2 else 0x5410) for p in range(4)]

    def int8_pair(self, codes: Any) -> Any:
        """The codes in bfloat16; in float16 magic + 128 + code."""
        emit = self.emit
        spread = emit.permute(codes, emit.c(0), 0x4140)
        if self.tile.dtype == jnp.float16:
            return emit.bits_xor(spread, _twice(0x6400 | 0x80))
        magic = _twice(_MAGIC["bfloat16"])  # 2^7 + the low 7 bits, less 2^7, or 2^8 for a negative code
        low = emit.bits_xor(emit.bits_and(spread, _twice(0x7F)), magic)
        return emit.subtract(low, emit.bits_xor(emit.bits_and(spread, _twice(0x80)), magic))

    def finisher(self, lower: int, group: int) -> Any:
        """What turns a pair of words() into the pair of the operand: subtracts the zero, multiplies by the scale."""
        emit, fmt = self.emit, self.tile.format
        offset = scale = None
        magic, half = _MAGIC[self.tile.dtype.name], self.tile.dtype == jnp.float16
        biased = {"int4": magic | 8, "int8": (magic | 0x80) if half else 0}.get(fmt.codes, 0)
        if "zeros" in emit.names:
            zero = emit.load("zeros", self.vector_index("zeros", group), 8, lower * 8)
            offset = emit.times(emit.add(zero, emit.c(biased)), 0x10001) if biased else emit.both(emit.float_of(zero))
        elif biased:
            offset = emit.c(_twice(biased))
        if fmt.group is not None:
            at = emit.times(self.vector_index("scales", group), 2)
            scale = emit.both(emit.load("scales", at, "f16", lower * 16))

        def finish(pair: Any) -> Any:
            pair = pair if offset is None else emit.subtract(pair, offset)
            return pair if scale is None else emit.multiply(pair, scale)

        return finish

    def vector_index(self, name: str, group: int) -> Any:
        """Where in scales or zeros a row's are."""
        if self.tile.format.group is None:
            return self.row
        emit, rows = self.emit, self.tile.vector_rows[name]
        at = emit.add(emit.times(self.part, self.tile.groups * rows), self.row)
        return emit.add(at, emit.c(group * rows))


class Emitter:
    """32-bit operations, emitted as MLIR and PTX; of a pair, two 16-bit floats at a time."""

    def __init__(self, dtype: jnp.dtype, pointers: dict[str, ir.Value]) -> None:
        self.names, self.pointers = tuple(pointers), pointers
        self.suffix = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
        self.half = mgpu.utils.dtype_to_ir_type(dtype)
        self.i8, self.i16, self.i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
        self.f16, self.f32 = ir.F16Type.get(), ir.F32Type.get()

    def thread(self) -> ir.Value:
        return mgpu.utils.thread_idx()

    def c(self, value: int) -> ir.Value:
        return mgpu.c(value if value < 2**31 else value - 2**32, self.i32)

    def add(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return arith.addi(a, b)

    def times(self, a: ir.Value, b: int) -> ir.Value:
        return arith.muli(a, self.c(b))

    def bits_and(self, a: ir.Value, b: int) -> ir.Value:
        return arith.andi(a, self.c(b))

    def bits_xor(self, a: ir.Value, b: int) -> ir.Value:
        return arith.xori(a, self.c(b)) if b else a

    def shift_right(self, a: ir.Value, b: int) -> ir.Value:
        return arith.shrui(a, self.c(b)) if b else a

    def load(self, name: str, offset: ir.Value, kind: int | str, more: int = 0) -> ir.Value:
        """`offset` + `more` bytes from an array's begin in shared memory: 32 bits, 16 of them zero-extended, 8
        sign-extended, or a float16 as float32."""
        pointer = mgpu.utils.getelementptr(self.pointers[name], [offset], self.i8)
        pointer = mgpu.utils.getelementptr(pointer, [more], self.i8) if more else pointer
        if kind == "f16":
            return arith.extf(self.f32, llvm.load(self.f16, pointer))
        if kind == 8:
            return arith.extsi(self.i32, llvm.load(self.i8, pointer))
        return arith.extui(self.i32, llvm.load(self.i16, pointer)) if kind == 16 else llvm.load(self.i32, pointer)

    def float_of(self, a: ir.Value) -> ir.Value:
        return arith.sitofp(self.f32, a)

    def both(self, x: ir.Value) -> ir.Value:
        """A float32 rounded, twice."""
        bits = arith.extui(self.i32, arith.bitcast(self.i16, arith.truncf(self.half, x)))
        return self.times(bits, 0x10001)

    def from_fp8(self, values: ir.Value) -> ir.Value:
        """Two e4m3 values as a pair."""
        narrow = arith.trunci(self.i16, values)
        halves = llvm.inline_asm(self.i32, [narrow], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        if self.half == self.f16:
            return halves
        wide = arith.extf(ir.VectorType.get((2,), self.f32), llvm.bitcast(ir.VectorType.get((2,), self.f16), halves))
        return llvm.bitcast(self.i32, arith.truncf(ir.VectorType.get((2,), self.half), wide))

    def permute(self, a: ir.Value, b: ir.Value, selector: int) -> ir.Value:
        """Bytes of a (0 to 3) and b (4 to 7), by the selector's nibbles."""
        return self._asm("prmt.b32 $0, $1, $2, $3;", a, b, self.c(selector))

    def subtract(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._asm(f"sub.rn.{self.suffix} $0, $1, $2;", a, b)

    def multiply(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._asm(f"mul.rn.{self.suffix} $0, $1, $2;", a, b)

    def _asm(self, text: str, *arguments: ir.Value) -> ir.Value:
        return llvm.inline_asm(self.i32, list(arguments), text, "=r" + ",r" * len(arguments))


def _twice(bits: int) -> int:
    """In both halves of 32 bits."""
    return bits << 16 | bits
