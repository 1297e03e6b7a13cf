"""Converts what is stored in 8 or 4 bits to float16 in registers. A byte that is put under the exponent of 1024 is 1024
more than its value. wgmma takes its left operand from registers in any order of the dims, as long as its right operand
has the same. So the order in which they are stored costs nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

# Registers of 4 bytes: a warp has 16 rows of 8 bytes (as stores to shared memory like it) or 8 of 16 (as wgmma does).
BY_16_ROWS = plgpu.Layout.TILED(plgpu.Tiling(((64, 8), (16, 8), (4,))), (-5,), (-3, -2), -1)
BY_8_ROWS = plgpu.Layout.WGMMA_8BIT

# Flips the sign bit of each code, puts it under the exponent, and subtracts 1024. Where there are no zeros, it also
# subtracts what the flip added. A zero point stands for the lowest code.
_FLIPPED = {"int8": "xor.b32 v, v, 0x80808080;", "int4": "lop3.b32 v, v, 0x0f0f0f0f, 0x08080808, 0x6a;"}
_SURPLUS = {"int8": 0x64806480, "int4": 0x64086408}
_ZEROED = 0x64006400


class Grouping(NamedTuple):
    """Describes the groups of a row's dims."""

    group: int  # dims that share a scale
    groups: int
    numbers: int  # scales, and zeros after them where there are any

    @property
    def zeros(self) -> bool:
        return self.numbers > self.groups


def to_float16(values: jax.Array, dtype: str, layout: Any, zeros: bool = False) -> list[jax.Array]:
    """Converts bytes [rows, columns] in registers: int8 codes or fp8 numbers, or int4's even and then its odd ones.
    With `zeros` codes are counted from the lowest one."""
    if dtype not in _FLIPPED:
        return [lax.bitcast_convert_type(values, jnp.dtype(dtype)).astype(jnp.float16)]
    count = 2 if dtype == "int4" else 1

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=(plgpu.ShapeDtypeStruct(values.shape, jnp.float16, layout=layout),) * count,
    )
    def unpack(_: Any, stored: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
        def part(number: int) -> mgpu.FragmentedArray:
            registers = np.empty_like(stored.registers)
            for at, register in np.ndenumerate(stored.registers):
                registers[at] = _codes(register, dtype, number, _ZEROED if zeros else _SURPLUS[dtype])
            return mgpu.FragmentedArray(_registers=registers, _layout=stored.layout, _is_signed=None)

        return tuple(part(number) for number in range(count))

    return list(unpack(values))


def _codes(register: ir.Value, dtype: str, part: int, surplus: int) -> ir.Value:
    """Returns vector<4xf16>: the codes of 4 bytes, or of their low (part 0) or high nibbles, less the surplus."""
    i32 = ir.IntegerType.get_signless(32)
    shift = f"shr.b32 v, $2, {4 * part};" if part else "mov.b32 v, $2;"
    pair = llvm.inline_asm(
        llvm.StructType.get_literal([i32, i32]),
        [mgpu.utils.bitcast(register, i32)],
        f"""
        {{
        .reg .b32 v, low, high, surplus;
        {shift}
        {_FLIPPED[dtype]}
        prmt.b32 low, v, 0x64646464, 0x4140;
        prmt.b32 high, v, 0x64646464, 0x4342;
        mov.b32 surplus, {surplus:#x};
        sub.f16x2 $0, low, surplus;
        sub.f16x2 $1, high, surplus;
        }}
        """,
        "=r,=r,r",
    )
    two = ir.VectorType.get((2,), ir.F16Type.get())
    return mgpu.utils.vector_concat([mgpu.utils.bitcast(llvm.extractvalue(i32, pair, [i]), two) for i in range(2)])


def scaled(grouping: Grouping, parts: list[jax.Array], scales: Any) -> list[jax.Array]:
    """Multiplies codes in registers BY_16_ROWS by their groups' scales [rows * numbers] in shared memory, and adds
    zeros."""
    count, layout = len(parts), BY_16_ROWS
    shape = parts[0].shape

    @plgpu.inline_mgpu(
        arg_types=((layout,) * count, plgpu.RefType()),
        return_type=(plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=layout),) * count,
    )
    def multiply(_: Any, codes: tuple[mgpu.FragmentedArray, ...], scales: ir.Value) -> tuple[mgpu.FragmentedArray, ...]:
        warp, lane = warp_and_lane()
        row = add(mul(warp, 16), div(lane, 2))
        numbers_of = _numbers(scales, row, rem(lane, 2), 2, grouping)
        out = tuple(np.empty_like(x.registers) for x in codes)
        for i, at in enumerate(np.ndindex(out[0].shape)):  # 8 bytes of a row, half of them in each of two lanes
            numbers = [x(8 * count * i, 8 * count) for x in numbers_of]
            for x, registers in zip(codes, out):
                register: Any = x.registers[at]
                registers[at] = _times(register, numbers)
        return tuple(mgpu.FragmentedArray(_registers=x, _layout=codes[0].layout, _is_signed=None) for x in out)

    return list(multiply(tuple(parts), scales))


def operand(grouping: Grouping, parts: list[jax.Array], scales: Any) -> jax.Array:
    """Makes wgmma's left operand of what registers BY_8_ROWS hold, times the scales and plus the zeros if there are
    any. Its dims are in the order of `operand_order`."""
    count, (rows, width) = len(parts), parts[0].shape
    arguments = (tuple(parts),) if scales is None else (tuple(parts), scales)

    @plgpu.inline_mgpu(
        arg_types=((BY_8_ROWS,) * count, *(plgpu.RefType(),) * (len(arguments) - 1)),
        return_type=plgpu.ShapeDtypeStruct((rows, width * count), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def arrange(_: Any, codes: tuple[mgpu.FragmentedArray, ...], *scales: ir.Value) -> mgpu.FragmentedArray:
        warp, lane = warp_and_lane()
        first_row = add(mul(warp, 16), div(lane, 4))
        numbers_of = [_numbers(x, add(first_row, 8 * i), rem(lane, 4), 4, grouping) for x in scales for i in (0, 1)]
        layout = plgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(layout.registers_shape((rows, width * count)), object)
        flat = registers.reshape(-1, 2)  # 8 dims, two halves of a warp's 16 rows
        of_codes = [x.registers.reshape(-1, 2) for x in codes]  # 16 bytes, the same halves
        for block, half in np.ndindex(of_codes[0].shape):
            numbers = [x(16 * count * block, 16 * count) for x in numbers_of[half]] if scales else []
            for i, x in enumerate(of_codes):
                for j in range(2):
                    register: Any = x[block, half]
                    pair = mgpu.utils.vector_slice(register, slice(2 * j, 2 * j + 2))
                    flat[(block * count + i) * 2 + j, half] = _times(pair, numbers)
        return mgpu.FragmentedArray(_registers=flat.reshape(registers.shape), _layout=layout, _is_signed=None)

    return arrange(*arguments)


def operand_order(x: jax.Array, dtype: str) -> jax.Array:
    """Orders the dims [.., D] as `operand` has them: a thread's 4 bytes are two runs of 2, 8 dims apart."""
    nibbles = 2 if dtype == "int4" else 1
    runs = x.reshape(*x.shape[:-1], -1, 4, 2, 2, nibbles)  # 16 bytes: 4 threads, 2 runs, 2 bytes
    return jnp.moveaxis(runs, (-1, -3), (-4, -3)).reshape(x.shape)


def _times(codes: ir.Value, numbers: list[ir.Value]) -> ir.Value:
    """Multiplies codes by a scale and, as one operation, adds a zero; or leaves them as they are."""
    wide = [vector.broadcast(codes.type, x) for x in numbers]
    return math.fma(codes, *wide) if len(wide) == 2 else arith.mulf(codes, *wide) if wide else codes


def _numbers(
    scales: ir.Value, row: ir.Value, lane: ir.Value, lanes: int, grouping: Grouping
) -> list[Callable[[int, int], ir.Value]]:
    """Returns the scale, and the zero if there is one, of a row's `size` dims from `first` on. Each of `lanes` lanes
    has its share of them."""
    base = mul(row, grouping.numbers)
    begins = [base, add(base, grouping.groups)] if grouping.zeros else [base]
    return [_shared(scales, begin, lane, lanes, grouping.group, grouping.groups) for begin in begins]


def _shared(
    scales: ir.Value, base: ir.Value, lane: ir.Value, lanes: int, group: int, groups: int
) -> Callable[[int, int], ir.Value]:
    f16 = ir.F16Type.get()
    pointer = mgpu.utils.memref_ptr(scales)
    several = min(groups, 8)
    found: dict[int, ir.Value] = {}

    def load(kind: ir.Type, index: ir.Value, alignment: int) -> ir.Value:
        at = llvm.getelementptr(pointer.type, pointer, [index], [-2147483648], f16, llvm.GEPNoWrapFlags.none)
        return llvm.load(kind, at, alignment=alignment)

    def scale(first: int, size: int) -> ir.Value:
        if size > group:  # lanes have different ones
            each = size // group
            return load(f16, add(add(base, first // group), div(lane, lanes // each)), 2)
        number = first // group
        begin = number // several * several
        if begin not in found:
            found[begin] = load(ir.VectorType.get((several,), f16), add(base, begin), 2 * several)
        return vector.extract(found[begin], [], ir.DenseI64ArrayAttr.get([number - begin]))

    return scale


def warp_and_lane() -> tuple[ir.Value, ir.Value]:
    thread = rem(mgpu.utils.thread_idx(), 128)
    return div(thread, 32), rem(thread, 32)


def constant(value: int) -> ir.Value:
    return mgpu.c(value if value < 1 << 31 else value - (1 << 32), ir.IntegerType.get_signless(32))


def add(x: ir.Value, y: ir.Value | int) -> ir.Value:
    return arith.addi(x, constant(y) if isinstance(y, int) else y)


def mul(x: ir.Value, y: int) -> ir.Value:
    return arith.muli(x, constant(y))


def div(x: ir.Value, y: int) -> ir.Value:
    return arith.divui(x, constant(y))


def rem(x: ir.Value, y: int) -> ir.Value:
    return arith.remui(x, constant(y))
