"""Converts stored K and V to registers, for the Hopper kernel of prefill_attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from pallas_kernels.formats.kv_formats import FP8, LARGEST_CODE, KVFormat
from pallas_kernels.prefill_attention.plan_sm90 import Plan

SIDE = 64  # tokens that are in registers at once, and columns
RUN = 8  # consecutive columns of a thread: they share a scale, as groups are multiples of 8


def layout_of(plan: Plan) -> Any:
    """Returns the layout of [SIDE, SIDE] registers that store to swizzled blocks 16 bytes a thread, RUN columns."""
    return plgpu.Layout.SMEM_GMEM_COPY((SIDE, SIDE), plan.dtype, 128)


def load_converted(raw: Any, scales: Any, fmt: KVFormat, plan: Plan, row: int, column: int) -> jax.Array:
    """Loads f32 [SIDE, SIDE] of a block as stored: raw [T, D] or packed [T, D/2]. scales are f16 [pages, run * G] (with
    zeros 2G) or None."""
    layout, shape = layout_of(plan), (SIDE, SIDE)
    if fmt.dtype in ("float16", "bfloat16"):
        part = raw.at[pl.ds(row, SIDE), pl.ds(column, SIDE)]
        return plgpu.load(part, layout=layout).astype(jnp.float32)
    refs = (raw,) if scales is None else (raw, scales)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(refs), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout)
    )
    def load(_: Any, raw: ir.Value, scales: ir.Value | None = None) -> mgpu.FragmentedArray:
        registers_of = layout.to_mgpu()
        registers = np.empty(registers_of.registers_shape(shape), object)
        for at, (i, j) in zip(np.ndindex(registers.shape), registers_of.thread_idxs(shape)):
            token, first = _add(i, row), _add(j, column)
            run = _load_run(raw, fmt, token, first)
            if scales is not None:
                numbers = [vector.broadcast(run.type, x) for x in _load_numbers(scales, fmt, plan, token, first)]
                run = math.fma(run, *numbers) if fmt.zero_point else arith.mulf(run, *numbers)
            registers[at] = run
        return mgpu.FragmentedArray(_registers=registers, _layout=registers_of, _is_signed=None)

    return load(*refs)


def _index(value: int) -> ir.Value:
    return mgpu.c(value, ir.IndexType.get())


def _add(x: ir.Value, value: int) -> ir.Value:
    return arith.addi(x, _index(value)) if value else x


def _load_run(raw: ir.Value, fmt: KVFormat, token: ir.Value, first: ir.Value) -> ir.Value:
    """Returns vector<RUN x f32>: the codes or values of RUN columns from `first` on."""
    i8, i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
    f16, f32 = ir.F16Type.get(), ir.F32Type.get()
    floats = ir.VectorType.get((RUN,), f32)

    def elements(vec: ir.Value, count: int) -> list[ir.Value]:
        return [_element(vec, i) for i in range(count)]

    if fmt.dtype == "int8":
        codes = vector.load(ir.VectorType.get((RUN,), i8), raw, [token, first], alignment=RUN)
        words = elements(vector.bitcast(ir.VectorType.get((RUN // 4,), i32), codes), RUN // 4)
        return vector.from_elements(floats, [code for word in words for code in _codes(word)])

    if fmt.dtype == "int4":  # two a byte, the even column in the low nibble
        pairs = vector.load(
            ir.VectorType.get((RUN // 2,), i8), raw, [token, arith.divui(first, _index(2))], alignment=RUN // 2
        )
        (word,) = elements(vector.bitcast(ir.VectorType.get((1,), i32), pairs), 1)
        top = mgpu.c(28, i32)
        nibbles = [arith.shrsi(arith.shli(word, mgpu.c(28 - 4 * k, i32)), top) for k in range(RUN)]
        return vector.from_elements(floats, [arith.sitofp(f32, nibble) for nibble in nibbles])

    assert fmt.dtype == FP8, fmt
    values = vector.load(ir.VectorType.get((RUN,), i8), raw, [token, first], alignment=RUN)
    halves = []
    for pair in elements(vector.bitcast(ir.VectorType.get((RUN // 2,), i16), values), RUN // 2):
        both = llvm.inline_asm(i32, [pair], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        halves += elements(llvm.bitcast(ir.VectorType.get((2,), f16), both), 2)
    return arith.extf(floats, vector.from_elements(ir.VectorType.get((RUN,), f16), halves))


def _codes(word: ir.Value) -> list[ir.Value]:
    """Returns the four codes of a word in f32. A byte that is put under the exponent of 2^23 is 2^23 more than its
    value. That is faster than the instruction that converts an integer."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    flipped = arith.xori(word, mgpu.c(-0x7F7F7F80, i32))  # 128 more than each code
    more = mgpu.c(2.0**23 + 128, f32)
    bits = [llvm.inline_asm(i32, [flipped], f"prmt.b32 $0, $1, 0x4b000000, 0x744{k};", "=r,r") for k in range(4)]
    return [arith.subf(arith.bitcast(f32, each), more) for each in bits]


def _element(vec: ir.Value, i: int) -> ir.Value:
    return vector.extract(vec, [], ir.DenseI64ArrayAttr.get([i]))


def _load_numbers(scales: ir.Value, fmt: KVFormat, plan: Plan, token: ir.Value, first: ir.Value) -> list[ir.Value]:
    """Returns the scale f32 that the columns from `first` on share and, with zeros, what the code 0 stands for."""
    assert fmt.group is not None
    f32, size = ir.F32Type.get(), _index(plan.run)
    page, offset = arith.divui(token, size), arith.remui(token, size)
    begin = arith.muli(offset, _index(fmt.numbers(plan.head_dim)))
    at = arith.addi(begin, arith.divui(first, _index(fmt.group)))
    scale = arith.extf(f32, memref.load(scales, [page, at]))
    if not fmt.zero_point:
        return [scale]
    zero = arith.extf(f32, memref.load(scales, [page, _add(at, fmt.groups(plan.head_dim))]))
    return [scale, math.fma(scale, mgpu.c(float(LARGEST_CODE[fmt.dtype] + 1), f32), zero)]
