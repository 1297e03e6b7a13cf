"""Makes registers of 4 bytes for the warps of decode_attention, and the instructions on them."""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decode_attention.unpack_sm90 import constant

Registers = list[ir.Value]  # of 4 bytes: two float16


def mma(a: Registers, b: Registers, c: list[ir.Value]) -> list[ir.Value]:
    f32 = ir.F32Type.get()
    asm = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    kinds = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    found = llvm.inline_asm(llvm.StructType.get_literal([f32] * 4), [*a, *b, *c], asm, kinds)
    return [llvm.extractvalue(f32, found, [i]) for i in range(4)]


def transposed(pair: ir.Value) -> ir.Value:
    """Transposes 8 x 8 elements, 2 of a row in each lane."""
    return asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", bits(pair), hidden=True)


def within(x: ir.Value, low: Any, high: Any) -> ir.Value:
    low, high = low.registers.item(), high.registers.item()
    compare = arith.CmpIPredicate
    return arith.andi(arith.cmpi(compare.sge, x, low), arith.cmpi(compare.slt, x, high))


def mask(first: ir.Value, second: ir.Value) -> ir.Value:
    """Returns all bits of the even bytes of a word where `first`, and of the odd ones where `second`."""
    parts = [
        arith.select(seen, constant(bits), constant(0))
        for seen, bits in ((first, 0x00FF00FF), (second, 0xFF00FF00))
    ]  # fmt: skip
    return arith.ori(*parts)


def asm(text: str, *operands: ir.Value, kinds: str = "r", hidden: bool = False) -> ir.Value:
    """Emits an instruction of one 4-byte result; `hidden` from what would merge or move it."""
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=r", *kinds * len(operands)])
    return llvm.inline_asm(i32, list(operands), text, constraints, has_side_effects=hidden)


def words(x: ir.Value) -> Registers:
    size = mgpu.utils.bitwidth(x.type) // 32
    words = mgpu.utils.bitcast(x, ir.VectorType.get((size,), ir.IntegerType.get_signless(32)))
    return elements(words)


def elements(x: ir.Value) -> list[ir.Value]:
    return [vector.extract(x, [], ir.DenseI64ArrayAttr.get([i])) for i in range(ir.VectorType(x.type).shape[0])]


def float(x: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(x, ir.F32Type.get())


def bits(x: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(x, ir.IntegerType.get_signless(32))


def doubled(x: ir.Value) -> ir.Value:
    return bits(vector.broadcast(ir.VectorType.get((2,), x.type), x))


def zero() -> ir.Value:
    return mgpu.c(0.0, ir.F32Type.get())


def pairs(numbers: list[list[ir.Value]]) -> list[ir.Value]:
    """Returns results of mma as WGMMA's registers."""
    two = ir.VectorType.get((2,), ir.F32Type.get())
    return [vector.from_elements(two, each[i : i + 2]) for each in numbers for i in (0, 2)]


def array(registers: list[ir.Value], layout: Any, shape: tuple[int, ...]) -> mgpu.FragmentedArray:
    layout = layout.to_mgpu()
    out = np.empty(layout.registers_shape(shape), object)
    out.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)


def numbers(words: Registers) -> list[ir.Value]:
    """Converts pairs of float16 to numbers f32."""
    pairs = [mgpu.utils.bitcast(word, ir.VectorType.get((2,), ir.F16Type.get())) for word in words]
    return [arith.extf(ir.F32Type.get(), x) for pair in pairs for x in elements(pair)]
