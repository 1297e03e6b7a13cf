"""Converts a lane's words of K and V as stored to pairs of float16, with scales and zeros or without."""

from collections.abc import Callable

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.decode_attention import registers_sm90 as mlir
from pallas_kernels.decode_attention.registers_sm90 import Registers
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.unpack_sm90 import add, constant, div, mul
from pallas_kernels.decode_attention.warp_layouts_sm90 import lane_dims, nibbles


def scales_of(
    stored: Storage, scales: ir.Value, token: ir.Value, share: ir.Value, lanes: int
) -> Callable[[int, int], list[ir.Value]]:
    """Returns a token's float16 scale, and its zero if there is one, for word `i` of the lane's piece in `block`."""
    f16, group, groups = ir.F16Type.get(), stored.format.group or 0, stored.groups
    dims = lane_dims(stored, lanes)
    pointer, several = mgpu.utils.memref_ptr(scales), max(1, dims // group)
    base = mul(token, stored.numbers)
    found: dict[int, list[ir.Value]] = {}

    def of_word(block: int, i: int) -> list[ir.Value]:
        begin = block * lanes * dims
        if block not in found:
            own = mul(share, several) if group <= dims else div(share, group // dims)
            at = add(base, add(own, begin // group))
            if group >= lanes * dims:
                at = add(base, begin // group)
            for first in range(0, stored.numbers, groups):
                place = add(at, first)
                where = llvm.getelementptr(pointer.type, pointer, [place], [-2147483648], f16, llvm.GEPNoWrapFlags.none)
                loaded = llvm.load(ir.VectorType.get((several,), f16), where, alignment=2 * several)
                found.setdefault(block, []).append(loaded)
        number = 4 * nibbles(stored) * i // group if several > 1 else 0
        return [vector.extract(x, [], ir.DenseI64ArrayAttr.get([number])) for x in found[block]]

    return of_word


def middle_of(stored: Storage, scale: ir.Value, zero: ir.Value) -> ir.Value:
    """Returns what the code 0 stands for, f32. Codes around it add up to less than those from 0 on, so that less
    cancels."""
    return math.fma(scale, mgpu.c(float(stored.middle), ir.F32Type.get()), zero)


def converted(stored: Storage, zero: ir.Value, word: ir.Value, numbers: Registers) -> Registers:
    """Returns what a word holds, in pairs of float16 that are two bytes apart (fp8: neighbours). They are times a pair
    of scales and plus one of zeros; without scales, they are codes."""
    if not stored.groups:
        halves = (arith.trunci(ir.IntegerType.get_signless(16), x) for x in (word, arith.shrui(word, constant(16))))
        return [mlir.asm("cvt.rn.f16x2.e4m3x2 $0, $1;", x, kinds="h") for x in halves]
    out = _codes(word, stored.format.dtype, numbers, zero)
    for _ in range(stored.repeat - 1):
        again = _codes(mlir.asm("mov.b32 $0, $1;", word, hidden=True), stored.format.dtype, numbers, zero)
        out = [mlir.asm("max.f16x2 $0, $1, $2;", x, y) for x, y in zip(out, again)]
    return out


def _codes(word: ir.Value, dtype: str, numbers: Registers, zero: ir.Value) -> Registers:
    """Returns codes as float16. A code has 8 or 4 bits. Under the exponent of 1024, its sign bit flipped, it is 1024
    and 128 or 8 more than its value. One in the high nibble is 16 times that. Where zeros are added, which stand for
    the lowest code, the 128 or 8 is 0."""
    out, from_lowest = [], len(numbers) == 2
    for bytes_of in (word, arith.shrui(word, constant(8))):

        def under_exponent(bits: int, exponent: int, bytes_of: ir.Value = bytes_of) -> ir.Value:
            return arith.xori(arith.andi(bytes_of, arith.ori(zero, constant(bits))), constant(exponent))

        if dtype == "int8":
            surplus = 0x64006400 if from_lowest else 0x64806480
            out.append(mlir.asm("sub.f16x2 $0, $1, $2;", under_exponent(0x00FF00FF, 0x64806480), constant(surplus)))
            continue
        low, high = under_exponent(0x000F000F, 0x64086408), under_exponent(0x00F000F0, 0x64806480)
        surplus, minus = (0x64006400, 0xD400D400) if from_lowest else (0x64086408, 0xD480D480)  # minus 64 or 72
        out.append(mlir.asm("sub.f16x2 $0, $1, $2;", low, constant(surplus)))
        out.append(mlir.asm("fma.rn.f16x2 $0, $1, $2, $3;", high, constant(0x2C002C00), constant(minus)))
    text = {0: None, 1: "mul.f16x2 $0, $1, $2;", 2: "fma.rn.f16x2 $0, $1, $2, $3;"}[len(numbers)]
    return out if text is None else [mlir.asm(text, x, *numbers) for x in out]
