"""Rotates vectors in registers as hadamard.py does, on Hopper.

Sylvester's matrix is a product over the bits of a column's number. For each bit there are the sum and the difference of
two numbers whose columns differ in it. So the order of columns does not matter, as long as it permutes bits. Numbers of
a lane are added without moving, and those of two lanes are exchanged once a bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as mlir_math


def butterflies(numbers: list[ir.Value], lanes: int, apart: int = 1) -> list[ir.Value]:
    """Multiplies a vector's numbers f32 by Sylvester's matrix of entries +-1. Each of `lanes` lanes, `apart` from each
    other, has a power of two of them."""
    numbers, step = list(numbers), 1
    while step < len(numbers):
        for i in range(len(numbers)):
            if not i & step:
                a, b = numbers[i], numbers[i | step]
                numbers[i], numbers[i | step] = arith.addf(a, b), arith.subf(a, b)
        step *= 2
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    lane = arith.remui(mgpu.utils.thread_idx(), mgpu.c(32, i32))
    distance = apart
    while distance < apart * lanes:
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, mgpu.c(distance, i32)), mgpu.c(0, i32))
        sign = arith.select(upper, mgpu.c(-1.0, f32), mgpu.c(1.0, f32))
        numbers = [mlir_math.fma(x, sign, mgpu.utils.shfl_bfly(x, distance)) for x in numbers]
        distance *= 2
    return numbers


def turn(x: jax.Array, layout: Any, size: int, lanes: int, *, apart: int = 1, rows: int = 1) -> jax.Array:
    """Multiplies x f32 in registers of this layout by hadamard(size), as hadamard.turn does. Each vector of `size`
    numbers is in `lanes` lanes that are `apart` from each other. A lane's registers are [.., those of one vector,
    `rows`]."""
    each = layout.to_mgpu().vector_length

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout))
    def turned(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        registers = x.registers.reshape(-1, size // (lanes * each), rows)
        out = np.empty_like(registers)
        for i, j in np.ndindex(len(registers), rows):
            numbers = [
                vector.extract(register, [], ir.DenseI64ArrayAttr.get([e]))
                for register in registers[i, :, j]
                for e in range(each)
            ]
            numbers = butterflies(numbers, lanes, apart)
            for k, register in enumerate(registers[i, :, j]):
                out[i, k, j] = vector.from_elements(register.type, numbers[each * k : each * (k + 1)])
        return mgpu.FragmentedArray(_registers=out.reshape(x.registers.shape), _layout=x.layout, _is_signed=None)

    return turned(x) * float(np.float32(size**-0.5))
