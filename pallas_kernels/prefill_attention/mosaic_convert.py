"""Stored K and V to registers, for the Hopper kernel of prefill_attention."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, vector

from pallas_kernels.kv_pages import FP8, KVFormat
from pallas_kernels.prefill_attention.mosaic_plan import Plan

SIDE = 64  # tokens that are in registers at once
RUN = 8  # consecutive columns of a thread: they share a scale, as groups are multiples of 8


def width(plan: Plan) -> int:
    """Columns that are in registers at once."""
    return 64 if plan.config.converters == 1 else min(plan.head_dim, 128)


def layout_of(plan: Plan) -> Any:
    """The layout of [SIDE, width] registers that store to swizzled blocks 16 bytes a thread, RUN columns."""
    return plgpu.Layout.SMEM_GMEM_COPY((SIDE, width(plan)), plan.dtype, 128)


def load_converted(raw: Any, scales: Any, fmt: KVFormat, plan: Plan, row: int, column: int) -> jax.Array:
    """f32 [SIDE, width], or with 2 converters the kernel's dtype, of a block as stored: raw [T, D] or packed [T, D/2],
    scales f16 [pages, run * G] or None."""
    layout, shape = layout_of(plan), (SIDE, width(plan))
    if fmt.dtype in ("float16", "bfloat16"):
        part = raw.at[pl.ds(row, SIDE), pl.ds(column, width(plan))]
        return plgpu.load(part, layout=layout).astype(jnp.float32)
    refs = (raw,) if scales is None else (raw, scales)
    alone = plan.config.converters == 2
    dtype = plan.dtype if alone else jnp.float32

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(refs), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    )
    def load(_: Any, raw: ir.Value, scales: ir.Value | None = None) -> mgpu.FragmentedArray:
        registers_of = layout.to_mgpu()
        registers = np.empty(registers_of.registers_shape(shape), object)
        for at, (i, j) in zip(np.ndindex(registers.shape), registers_of.thread_idxs(shape)):
            token, first = _add(i, row), _add(j, column)
            if scales is not None and alone:
                registers[at] = _load_products(raw, fmt, token, first, _load_scale(scales, fmt, plan, token, first))
                continue
            run = _load_run(raw, fmt, token, first)
            if scales is not None:
                scale = _load_scale(scales, fmt, plan, token, first)
                run = arith.mulf(run, vector.broadcast(ir.VectorType.get((RUN,), ir.F32Type.get()), scale))
            registers[at] = run
        array = mgpu.FragmentedArray(_registers=registers, _layout=registers_of, _is_signed=None)
        return array.astype(mgpu.utils.dtype_to_ir_type(dtype))

    return load(*refs)


def _index(value: int) -> ir.Value:
    return mgpu.c(value, ir.IndexType.get())


def _add(x: ir.Value, value: int) -> ir.Value:
    return arith.addi(x, _index(value)) if value else x


def _load_run(raw: ir.Value, fmt: KVFormat, token: ir.Value, first: ir.Value) -> ir.Value:
    """vector<RUN x f32>: the codes or values of RUN columns from `first` on."""
    i8, i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 16, 32))
    f16, f32 = ir.F16Type.get(), ir.F32Type.get()
    floats = ir.VectorType.get((RUN,), f32)
    if fmt.dtype == "int8":
        codes = vector.load(ir.VectorType.get((RUN,), i8), raw, [token, first], alignment=RUN)
        return arith.sitofp(floats, arith.extsi(ir.VectorType.get((RUN,), i32), codes))

    def elements(vec: ir.Value, count: int) -> list[ir.Value]:
        return [_element(vec, i) for i in range(count)]

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


def _load_words(raw: ir.Value, token: ir.Value, first: ir.Value, count: int) -> list[ir.Value]:
    """`count` words of a row, from byte `first` on."""
    i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    loaded = vector.load(ir.VectorType.get((4 * count,), i8), raw, [token, first], alignment=4 * count)
    words = vector.bitcast(ir.VectorType.get((count,), i32), loaded)
    return [_element(words, i) for i in range(count)]


def _element(vec: ir.Value, i: int) -> ir.Value:
    return vector.extract(vec, [], ir.DenseI64ArrayAttr.get([i]))


def _load_products(raw: ir.Value, fmt: KVFormat, token: ir.Value, first: ir.Value, scale: ir.Value) -> ir.Value:
    """vector<RUN x f32>: code times scale of RUN columns from `first` on.

    The conversion instruction is slow, and the exponential's unit does it. So a code, made unsigned, goes into the
    mantissa of a power of two, 2^e + code + bias, and an FMA takes 2^e + bias off again, times the scale. All of it is
    exact: a scale has 11 bits, and so few powers are taken that products have at most 24.
    """
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()

    def shift(word: ir.Value, left: int) -> ir.Value:
        return (arith.shli if left > 0 else arith.shrui)(word, mgpu.c(abs(left), i32))

    def mantissa(word: ir.Value, bit: int) -> ir.Value:  # 2^(23 - bit) + the nibble at that bit
        masked = arith.andi(word, mgpu.c(15 << bit, i32))
        return arith.ori(masked, mgpu.c((127 + 23 - bit) << 23, i32))

    numbers: list[tuple[ir.Value, int]]  # as bits of floats, and what they are too large by
    if fmt.dtype == "int8":
        words = [arith.xori(word, mgpu.c(0x80808080 - (1 << 32), i32)) for word in _load_words(raw, token, first, 2)]
        power = mgpu.c(0x47000000, i32)  # 2^15: a mantissa's second byte counts ones
        prmt = "prmt.b32 $0, $1, $2, 0x74{}4;"
        numbers = [
            (llvm.inline_asm(i32, [word, power], prmt.format(byte), "=r,r,r"), (1 << 15) + 128)
            for word in words
            for byte in range(4)
        ]
    else:  # int4: two a byte, the even column in the low nibble
        (word,) = _load_words(raw, token, arith.divui(first, _index(2)), 1)
        word = arith.xori(word, mgpu.c(0x88888888 - (1 << 32), i32))
        shifted = [shift(word, left) for left in (8, -4, -16)]  # each has three nibbles at bits 8, 12 and 16
        at = [8 + n % 3 * 4 for n in range(RUN)]
        numbers = [(mantissa(shifted[n // 3], bit), (1 << (23 - bit)) + 8) for n, bit in enumerate(at)]

    excess = {large: arith.mulf(scale, mgpu.c(-float(large), f32)) for large in {large for _, large in numbers}}
    products = [math.fma(arith.bitcast(f32, bits), scale, excess[large]) for bits, large in numbers]
    return vector.from_elements(ir.VectorType.get((RUN,), f32), products)


def _load_scale(scales: ir.Value, fmt: KVFormat, plan: Plan, token: ir.Value, first: ir.Value) -> ir.Value:
    """f32: the scale that the columns from `first` on share."""
    assert fmt.group is not None
    size, groups = _index(plan.run), _index(fmt.groups(plan.head_dim))
    page, offset = arith.divui(token, size), arith.remui(token, size)
    at = arith.addi(arith.muli(offset, groups), arith.divui(first, _index(fmt.group)))
    return arith.extf(ir.F32Type.get(), memref.load(scales, [page, at]))
