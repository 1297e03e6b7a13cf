"""Registers of a thread: single instructions, and what they hold taken apart and put together."""

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

Registers = list[ir.Value]  # of 4 bytes: two float16


def element_at(ref: ir.Value, at: ir.Value, kind: ir.Type) -> ir.Value:
    pointer = mgpu.utils.memref_ptr(ref)
    return llvm.getelementptr(pointer.type, pointer, [at], [-2147483648], kind, llvm.GEPNoWrapFlags.none)


def mma(a: Registers, b: Registers, c: list[ir.Value]) -> list[ir.Value]:
    f32 = ir.F32Type.get()
    asm = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    kinds = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    found = llvm.inline_asm(llvm.StructType.get_literal([f32] * 4), [*a, *b, *c], asm, kinds)
    return [llvm.extractvalue(f32, found, [i]) for i in range(4)]


def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return llvm.inline_asm(ir.F32Type.get(), [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f")


def transposed(pair: ir.Value) -> ir.Value:
    """8 x 8 elements, 2 of a row in each lane, transposed."""
    return instruction("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", as_bits(pair), hidden=True)


def less(x: ir.Value, y: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def instruction(text: str, *operands: ir.Value, kinds: str = "r", hidden: bool = False) -> ir.Value:
    """An instruction of one 4-byte result; `hidden` from what would merge or move it."""
    i32 = ir.IntegerType.get_signless(32)
    constraints = ",".join(["=r", *kinds * len(operands)])
    return llvm.inline_asm(i32, list(operands), text, constraints, has_side_effects=hidden)


def words_of(x: ir.Value) -> Registers:
    """The 4-byte words of a vector, or a half of one."""
    size = mgpu.utils.bitwidth(x.type) // 32
    if size == 0:
        half = mgpu.utils.bitcast(x, ir.IntegerType.get_signless(16))
        return [arith.extui(ir.IntegerType.get_signless(32), half)]
    words = mgpu.utils.bitcast(x, ir.VectorType.get((size,), ir.IntegerType.get_signless(32)))
    return elements_of(words)


def elements_of(x: ir.Value) -> list[ir.Value]:
    return [vector.extract(x, [], ir.DenseI64ArrayAttr.get([i])) for i in range(ir.VectorType(x.type).shape[0])]


def as_float(x: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(x, ir.F32Type.get())


def as_bits(x: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(x, ir.IntegerType.get_signless(32))


def doubled(x: ir.Value) -> ir.Value:
    return as_bits(vector.broadcast(ir.VectorType.get((2,), x.type), x))


def zero_float() -> ir.Value:
    return mgpu.c(0.0, ir.F32Type.get())


def in_pairs(numbers: list[list[ir.Value]]) -> list[ir.Value]:
    """Results of mma as WGMMA's registers."""
    two = ir.VectorType.get((2,), ir.F32Type.get())
    return [vector.from_elements(two, each[i : i + 2]) for each in numbers for i in (0, 2)]


def array_of(registers: list[ir.Value], layout: Any, shape: tuple[int, ...]) -> mgpu.FragmentedArray:
    layout = layout.to_mgpu()
    out = np.empty(layout.registers_shape(shape), object)
    out.reshape(-1)[:] = registers
    return mgpu.FragmentedArray(_registers=out, _layout=layout, _is_signed=None)
