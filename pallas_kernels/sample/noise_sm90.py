"""Makes noise.py's bits on Hopper, and from them the logarithm of E: four tokens of a thread from one Philox."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.sample.block_sm90 import PIECE_LAYOUT
from pallas_kernels.sample.config import VECTOR
from pallas_kernels.sample.noise import BUMPS, MULTIPLIERS, ROUNDS

SMALL = 0.25  # below it, -log(1 - v) is v times this polynomial in v, off by 2^-22.5; in ascending powers
POLYNOMIAL = (0.99999994, 0.50001049, 0.33285666, 0.25779939, 0.14391524, 0.33979723)
LN_2 = float(np.log(2))


def log2_exponentials(keys: Sequence[jax.Array], ids: jax.Array, wanted: jax.Array | None = None) -> jax.Array:
    """Returns log2(E) of tokens i32[128, 4] for a row's four keys u32: f32[128, 4]. Where `wanted` bool[128, 4] is
    given, a thread that wants none of its four tokens computes nothing and gives infinity."""
    splat = plgpu.Layout.WG_SPLAT(())
    chosen = () if wanted is None else (jnp.where(wanted, jnp.int32(1), jnp.int32(0)),)

    @plgpu.inline_mgpu(
        arg_types=(splat,) * len(keys) + (PIECE_LAYOUT,) * (1 + len(chosen)),
        return_type=plgpu.ShapeDtypeStruct(ids.shape, jnp.float32, layout=PIECE_LAYOUT),
    )
    def draw(_: Any, *arguments: Any) -> mgpu.FragmentedArray:
        *words, ids = (x.registers.item() for x in arguments[: len(keys) + 1])
        asked = [x.registers.item() for x in arguments[len(keys) + 1 :]]
        out = _unless_idle(asked[0], words, ids) if asked else _draw(words, ids)
        registers = np.full_like(arguments[len(keys)].registers, out)
        return mgpu.FragmentedArray(_registers=registers, _layout=PIECE_LAYOUT.to_mgpu(), _is_signed=None)

    return draw(*(jax.lax.bitcast_convert_type(x, jnp.int32) for x in keys), ids, *chosen)


def _unless_idle(wanted: ir.Value, words: Sequence[ir.Value], ids: ir.Value) -> ir.Value:
    """Runs _draw where any element of `wanted` vector<4xi32> is not 0."""
    some = _element(wanted, 0)
    for i in range(1, VECTOR):
        some = arith.ori(some, _element(wanted, i))
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ne, some, _int(0)), [_floats()], has_else=True)  # type: ignore[call-arg]
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([_draw(words, ids)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([vector.from_elements(_floats(), [_float(float("inf"))] * VECTOR)])
    return branch.result


def _draw(words: Sequence[ir.Value], ids: ir.Value) -> ir.Value:
    """Returns log2(E) vector<4xf32> of the four tokens vector<4xi32> that share a counter."""
    seed, sample, index, purpose = words
    quad = arith.shrui(_element(ids, 0), _int(2))
    random = _philox([quad, index, purpose, _int(0)], [seed, sample])
    return vector.from_elements(_floats(), [_log2(_exponential(x)) for x in random])


def _philox(counter: Sequence[ir.Value], key: Sequence[ir.Value]) -> list[ir.Value]:
    a, b, c, d = counter
    first, second = key
    for number in range(ROUNDS):
        if number:
            first, second = (arith.addi(k, _int(bump)) for k, bump in zip((first, second), BUMPS))
        (high, low), (high_2, low_2) = (_product(x, m) for x, m in zip((a, c), MULTIPLIERS))
        a, b, c, d = _xor(high_2, b, first), low_2, _xor(high, d, second), low
    return [a, b, c, d]


def _product(x: ir.Value, multiplier: int) -> tuple[ir.Value, ir.Value]:
    i64 = ir.IntegerType.get_signless(64)
    product = arith.muli(arith.extui(i64, x), mgpu.c(multiplier, i64))
    return arith.trunci(x.type, arith.shrui(product, mgpu.c(32, i64))), arith.trunci(x.type, product)


def _exponential(random: ir.Value) -> ir.Value:
    """Returns E f32 of bits i32; see noise.gumbel. The fast logarithm is inexact near 1, hence the polynomial."""
    upper = arith.cmpi(arith.CmpIPredicate.slt, random, _int(0))
    folded = arith.xori(random, arith.shrsi(random, _int(31)))
    v = _fma(arith.sitofp(ir.F32Type.get(), folded), _float(2.0**-32), _float(2.0**-33))
    polynomial = _float(POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        polynomial = _fma(polynomial, v, _float(coefficient))
    rest = arith.select(upper, v, arith.subf(_float(1.0), v))
    small = arith.cmpi(arith.CmpIPredicate.ult, random, _int(int(SMALL * 2**32)))
    return arith.select(small, arith.mulf(polynomial, v), arith.mulf(_log2(rest), _float(-LN_2)))


def _log2(x: ir.Value) -> ir.Value:
    return llvm.inline_asm(x.type, [x], "lg2.approx.ftz.f32 $0, $1;", "=f,f", has_side_effects=False)


def _fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return mlir_math.fma(a, b, c)


def _xor(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return arith.xori(arith.xori(a, b), c)


def _element(x: ir.Value, i: int) -> ir.Value:
    return vector.extract(x, [], [i])


def _int(value: int) -> ir.Value:
    return mgpu.c(value - 2**32 if value >= 2**31 else value, ir.IntegerType.get_signless(32))


def _float(value: float) -> ir.Value:
    return mgpu.c(value, ir.F32Type.get())


def _floats() -> ir.Type:
    return ir.VectorType.get((VECTOR,), ir.F32Type.get())
