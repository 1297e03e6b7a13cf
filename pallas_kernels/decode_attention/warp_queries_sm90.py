"""Loads a head's queries into the registers of warps that each have tokens of their own. They are in float16, divided
to fit its range, and rotated where K is. Their order is that of K's decoded codes."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.decode_attention import registers_sm90 as mlir
from pallas_kernels.decode_attention.registers_sm90 import Registers
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.unpack_sm90 import add, constant, mul, rem, warp_and_lane
from pallas_kernels.decode_attention.warp_layouts_sm90 import BY_WARP, nibbles, q_layout
from pallas_kernels.hopper.hadamard_sm90 import butterflies

# [columns, D], what each was divided by (None: nothing), and the sum of each (None: where no zero asks for it).
Queries = tuple[jax.Array, jax.Array | None, jax.Array | None]


def no_queries(stored: Storage, columns: int, dtype: DTypeLike) -> Queries:
    """Returns zeros as load_queries returns them, of queries [columns, D] of `dtype`."""
    zeros = plgpu.layout_cast(jnp.zeros((columns, stored.head_dim), jnp.float16), q_layout(stored))
    of_each = plgpu.layout_cast(jnp.zeros((32, columns), jnp.float32), BY_WARP)
    return zeros, of_each if _to_fit(stored, dtype) else None, of_each if takes_sums(stored) else None


def _to_fit(stored: Storage, dtype: DTypeLike) -> bool:
    """Returns whether queries are divided to fit float16's range."""
    return dtype == jnp.bfloat16 or stored.format.hadamard


def takes_sums(stored: Storage) -> bool:
    """Returns whether logits take the sums of queries."""
    return stored.by_factor and stored.format.zero_point


def load_queries(stored: Storage, queries: Any) -> Queries:
    """Loads queries [columns, D] from shared memory in q_layout, rotated where K is. Each lane's dims are in the order
    in which `converted` pairs those of K. bfloat16 is divided to fit float16's range, by the power of two [32, columns]
    BY_WARP under its largest element. Only what is far smaller loses bits."""
    array = plgpu.load(queries, layout=q_layout(stored), optimized=False)
    columns, to_fit = array.shape[0], _to_fit(stored, array.dtype)
    if not (stored.groups or to_fit):
        return array, None, None
    of_each = plgpu.ShapeDtypeStruct((32, columns), jnp.float32, layout=BY_WARP)
    kinds = [plgpu.ShapeDtypeStruct(array.shape, jnp.float16, layout=q_layout(stored))]
    kinds += [of_each] * (to_fit + takes_sums(stored))

    @plgpu.inline_mgpu(arg_types=(q_layout(stored),), return_type=tuple(kinds))
    def prepare(_: Any, x: mgpu.FragmentedArray) -> tuple[mgpu.FragmentedArray, ...]:
        registers: list[ir.Value] = []
        factors: list[ir.Value] = []
        sums: list[ir.Value] = []
        for of_query in x.registers.reshape(columns // 8, -1):  # a lane has dims of one in eight
            words = [w for register in of_query for w in mlir.words(register)]
            if to_fit:
                words, exponent = _fitted(words, array.dtype == jnp.bfloat16, stored.format.hadamard)
                factors.append(_of_columns(arith.shli(exponent, constant(23))))
            if takes_sums(stored):
                sums.append(_of_columns(mlir.bits(_sum_of(words))))
            if stored.groups:
                words = _paired(words, 2 * nibbles(stored))
            for i in range(0, len(words), 4):
                four = vector.from_elements(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)), words[i : i + 4])
                registers.append(mgpu.utils.bitcast(four, ir.VectorType.get((8,), ir.F16Type.get())))
        out = (mlir.array(registers, q_layout(stored), array.shape),)
        return (*out, *(mlir.array(some, BY_WARP, (32, columns)) for some in (factors, sums) if some))

    found = prepare(array)
    return found[0], found[1] if to_fit else None, found[-1] if takes_sums(stored) else None


def _fitted(words: Registers, bfloat16: bool, rotated: bool) -> tuple[Registers, ir.Value]:
    """Returns a lane's share of a query as pairs of float16 between -4 and 4, and the exponent of what divided them.
    Takes pairs in 16 bits, of which four lanes have a query, rotated or not. The exponent has float32's bias."""
    if bfloat16:
        pairs = [(arith.shli(word, constant(16)), arith.andi(word, constant(0xFFFF0000))) for word in words]
        numbers = [mlir.float(x) for pair in pairs for x in pair]
    else:
        numbers = mlir.numbers(words)
    if rotated:
        norm = mgpu.c(float(np.float32((4 * len(numbers)) ** -0.5)), ir.F32Type.get())
        numbers = [arith.mulf(x, norm) for x in butterflies(numbers, 4)]
        text, sizes, first_bit = "max.u32 $0, $1, $2;", [mlir.bits(x) for x in numbers], 23
        sizes = [arith.andi(x, constant(0x7FFFFFFF)) for x in sizes]
    else:
        text, first_bit = "max.bf16x2 $0, $1, $2;", 7
        sizes = [arith.andi(x, constant(0x7FFF7FFF)) for x in words]

    def largest(x: ir.Value, y: ir.Value) -> ir.Value:
        return mlir.asm(text, x, y)

    top = reduce(largest, sizes)
    for distance in (1, 2):
        top = largest(top, mgpu.utils.shfl_bfly(top, distance))
    if not rotated:
        top = largest(top, mlir.asm("prmt.b32 $0, $1, $2, $3;", top, top, constant(0x1032)))
    exponent = arith.andi(arith.shrui(top, constant(first_bit)), constant(0xFF))
    exponent = mlir.asm("max.u32 $0, $1, $2;", exponent, constant(1))  # neither 2^e nor 2^-e is subnormal
    exponent = mlir.asm("min.u32 $0, $1, $2;", exponent, constant(253))
    inverse = mlir.float(arith.shli(arith.subi(constant(254), exponent), constant(23)))
    numbers = [arith.mulf(x, inverse) for x in numbers]
    both = zip(numbers[1::2], numbers[::2])
    return [mlir.asm("cvt.rn.f16x2.f32 $0, $1, $2;", *pair, kinds="f") for pair in both], exponent


def _sum_of(words: Registers) -> ir.Value:
    """Returns the sum f32 of pairs of float16 that four lanes have."""
    total = reduce(arith.addf, mlir.numbers(words))
    for distance in (1, 2):
        total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
    return total


def _of_columns(x: ir.Value) -> ir.Value:
    """Turns what lanes have of query g into pairs of float32 of queries 2t and 2t + 1."""
    _, lane = warp_and_lane()
    first = mul(rem(lane, 4), 8)
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    both = [mlir.float(mlir.asm(text, x, add(first, 4 * e), hidden=True)) for e in (0, 1)]
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), both)


def _paired(words: Registers, size: int) -> Registers:
    """Pairs neighbouring dims, `size` words of them at a time, as `converted` pairs codes."""
    return [
        mlir.asm("prmt.b32 $0, $1, $2, $3;", words[i + j], words[i + j + size // 2], constant(selector))
        for i in range(0, len(words), size)
        for j in range(size // 2)
        for selector in (0x5410, 0x7632)
    ]
