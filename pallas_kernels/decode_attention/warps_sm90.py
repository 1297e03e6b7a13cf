"""Computes attention in which each warp has 16 tokens of a tile, all that it needs in registers, and its own sum.

It is for K and V of 8 and 4 bits, which would otherwise wait for each other's conversions. Matmuls are mma.sync. Tokens
are the rows of K Q^T and the columns of V^T P (warp_layouts_sm90.py). Rows of V^T are any dims, in the order in which
lanes have them: `store_sums` knows it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, vector

from pallas_kernels.decode_attention import registers_sm90 as mlir
from pallas_kernels.decode_attention.registers_sm90 import Registers
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.unpack_sm90 import add, constant, div, mul, rem, warp_and_lane
from pallas_kernels.decode_attention.warp_codes_sm90 import converted, middle_of, scales_of
from pallas_kernels.decode_attention.warp_layouts_sm90 import (
    BY_WARP,
    WGMMA,
    k_layout,
    lane_dims,
    nibbles,
    q_layout,
    v_layout,
)

Stored = tuple[jax.Array, Any]  # a warpgroup's tokens in registers, and where their scales are (None: none)


def load_k(stored: Storage, values: Any, scales: Any) -> Stored:
    """Loads rows [64, ..] of K from shared memory, and finds where their scales are."""
    return plgpu.load(values, layout=k_layout(stored), optimized=False), scales


def load_v(stored: Storage, values: Any, scales: Any) -> Stored:
    """Loads rows [64, ..] of V from shared memory, and finds where their scales are."""
    return plgpu.load(values, layout=v_layout(stored), optimized=False), scales


def dot_k(
    stored: Storage, k: Stored, zero: jax.Array, queries: jax.Array, sums_of: jax.Array | None = None
) -> jax.Array:
    """Multiplies K [64, D] by what load_queries made, queries and their sums: [64, columns]. `zero` is one that the
    compiler cannot know: it loads constants that it knows again for each instruction."""
    values, scales = k
    columns, dims = queries.shape[0], lane_dims(stored, 4)
    refs, sums_given = () if scales is None else (scales,), () if sums_of is None else (sums_of,)
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(
            k_layout(stored),
            q_layout(stored),
            splat,
            (BY_WARP,) * len(sums_given),
            (plgpu.RefType(),) * len(refs),
        ),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=WGMMA),
    )
    def dot(_: Any, values: Any, queries: Any, zero: Any, sums_of: Any, scales: Any) -> mgpu.FragmentedArray:
        warp, lane = warp_and_lane()
        convert = partial(converted, stored, zero.registers.item())
        first = add(mul(warp, 16), div(lane, 4))
        rows = values.registers.reshape(-1, 2)  # pieces of a row, two rows
        of_rows = [scales_of(stored, x, add(first, 8 * i), rem(lane, 4), 4) for x in scales for i in (0, 1)]
        b = queries.registers.reshape(columns // 8, len(rows), dims // 8)
        sums = [[[mlir.zero()] * 4 for _ in range(2)] for _ in range(columns // 8)]  # two chains: mma takes long
        step = 0
        for block, pair in enumerate(rows):
            words = [mlir.words(x) for x in pair]
            of_queries = [[w for x in b[n, block] for w in mlir.words(x)] for n in range(columns // 8)]
            for i in range(len(words[0])):
                a = []
                for row in range(2):
                    numbers = of_rows[row](block, i) if scales and not stored.by_factor else []
                    a.append(convert(words[row][i], [mlir.doubled(x) for x in numbers]))
                size = 2 * nibbles(stored)  # pairs of dims of a word
                operands = [q[size * i : size * (i + 1)] for q in of_queries]
                for k in range(0, size, 2):
                    fragment = [a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]]
                    for n, operand in enumerate(operands):
                        sums[n][step % 2] = mlir.mma(fragment, operand[k : k + 2], sums[n][step % 2])
                    step += 1
        totals = [[arith.addf(x, y) for x, y in zip(*both)] for both in sums]
        if stored.by_factor:
            rows_of = [[arith.extf(ir.F32Type.get(), x) for x in of_row(0, 0)] for of_row in of_rows]
            totals = [[arith.mulf(x, rows_of[i // 2][0]) for i, x in enumerate(each)] for each in totals]
        if sums_of:
            middles = [middle_of(stored, *numbers) for numbers in rows_of]
            of_queries = [mlir.elements(x) for x in sums_of[0].registers.flat]
            totals = [
                [math.fma(middles[i // 2], of_query[i % 2], x) for i, x in enumerate(each)]
                for of_query, each in zip(of_queries, totals)
            ]
        return mlir.array(mlir.pairs(totals), WGMMA, (64, columns))

    return dot(values, queries, zero, sums_given, refs)


def convert_v(stored: Storage, v: Stored, zero: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Converts V's tokens to operands of dot_v: float16 [64, D], the registers of one mma after the other. Tokens
    before bounds[0], and from bounds[1] on, are zero, whatever they hold. With stored.by_factor `weighted` does that.
    """
    values, scales = v
    splat, refs = plgpu.Layout.WG_SPLAT(()), () if scales is None or stored.by_factor else (scales,)

    @plgpu.inline_mgpu(
        arg_types=(v_layout(stored), *(splat,) * 3, *(plgpu.RefType(),) * len(refs)),
        return_type=plgpu.ShapeDtypeStruct((64, stored.head_dim), jnp.float16, layout=WGMMA),
    )
    def convert(_: Any, values: Any, zero: Any, low: Any, high: Any, *scales: ir.Value) -> mgpu.FragmentedArray:
        warp, lane = warp_and_lane()
        first = add(mul(warp, 16), mul(rem(lane, 4), 2))
        tokens = [add(first, i) for i in (0, 1, 8, 9)]
        seen = [mlir.within(token, low, high) for token in tokens]
        piece, nothing = div(lane, 4), mgpu.c(0.0, ir.F16Type.get())
        of_tokens = [scales_of(stored, x, token, piece, 8) for x in scales for token in tokens]
        masks = [mlir.mask(*seen[i : i + 2]) for i in (0, 2)]
        out = []
        for block, rows in enumerate(values.registers.reshape(-1, 4)):
            words = [mlir.words(x) for x in rows]
            for i in range(len(words[0])):
                dims: list[Registers] = []  # of two tokens each
                for pair in (0, 2):
                    numbers = []  # scales of both, and zeros if there are any
                    for some in zip(*(of_token(block, i) for of_token in of_tokens[pair : pair + 2])):
                        both = [arith.select(seen[pair + j], x, nothing) for j, x in enumerate(some)]
                        numbers.append(mlir.bits(vector.from_elements(ir.VectorType.get((2,), ir.F16Type.get()), both)))
                    mixed = [
                        mlir.asm("prmt.b32 $0, $1, $2, $3;", words[pair][i], words[pair + 1][i], constant(selector))
                        for selector in ((0x5410, 0x7632) if stored.groups else (0x5140, 0x7362))
                    ]
                    if not stored.groups:
                        mixed = [arith.andi(x, masks[pair // 2]) for x in mixed]
                    dims.append([x for word in mixed for x in converted(stored, zero.registers.item(), word, numbers)])
                for k in range(0, len(dims[0]), 2):
                    out += [dims[0][k], dims[0][k + 1], dims[1][k], dims[1][k + 1]]
        two = ir.VectorType.get((2,), ir.F16Type.get())
        return mlir.array([mgpu.utils.bitcast(x, two) for x in out], WGMMA, (64, stored.head_dim))

    return convert(values, zero, *bounds, *refs)


def weighted(stored: Storage, v: Stored, bounds: tuple[jax.Array, jax.Array], weights: jax.Array) -> jax.Array:
    """Multiplies weights [64, columns] float16 by a token's scale, where it has a single one. They are zero out of
    bounds."""
    if not stored.by_factor:
        return weights
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, splat, splat, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(weights.shape, jnp.float16, layout=WGMMA),
    )
    def weigh(_: Any, weights: Any, low: Any, high: Any, scales: ir.Value) -> mgpu.FragmentedArray:
        warp, lane = warp_and_lane()
        own, nothing = add(mul(warp, 16), div(lane, 4)), mgpu.c(0.0, ir.F16Type.get())
        factors = []
        for token in (own, add(own, 8)):
            found, *_ = scales_of(stored, scales, token, div(lane, 4), 8)(0, 0)
            factors.append(mlir.doubled(arith.select(mlir.within(token, low, high), found, nothing)))
        out = [
            mgpu.utils.bitcast(mlir.asm("mul.f16x2 $0, $1, $2;", mlir.bits(x), y), x.type)
            for pair in weights.registers.reshape(-1, 2)
            for x, y in zip(pair, factors)
        ]
        return mlir.array(out, WGMMA, weights.shape)

    return weigh(weights, *bounds, v[1])


def zeros_of(stored: Storage, v: Stored, bounds: tuple[jax.Array, jax.Array], weights: jax.Array) -> jax.Array:
    """Multiplies weights [64, columns] float16 by what code 0 stands for, where tokens have a single zero, f32. Over
    all tokens it is what each dim of the result lacks. It is zero outside of the bounds."""
    splat, f32 = plgpu.Layout.WG_SPLAT(()), jnp.float32

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, splat, splat, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(weights.shape, f32, layout=WGMMA),
    )
    def weigh(_: Any, weights: Any, low: Any, high: Any, scales: ir.Value) -> mgpu.FragmentedArray:
        warp, lane = warp_and_lane()
        own, kind = add(mul(warp, 16), div(lane, 4)), ir.F32Type.get()
        middles = []
        for token in (own, add(own, 8)):
            found = scales_of(stored, scales, token, div(lane, 4), 8)(0, 0)
            middle = middle_of(stored, *(arith.extf(kind, x) for x in found))
            middles.append(arith.select(mlir.within(token, low, high), middle, mlir.zero()))
        two = ir.VectorType.get((2,), kind)
        out = [
            arith.mulf(arith.extf(two, x), vector.broadcast(two, y))
            for pair in weights.registers.reshape(-1, 2)
            for x, y in zip(pair, middles)
        ]
        return mlir.array(out, WGMMA, weights.shape)

    return weigh(weights, *bounds, v[1])


def dot_v(v: jax.Array, weights: jax.Array, acc: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns acc [4 * D, columns] times factor [32, columns] BY_WARP, plus V by the weights [64, columns] float16.
    convert_v made V."""
    columns = weights.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA, WGMMA, BY_WARP),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=WGMMA),
    )
    def dot(_: Any, v: Any, weights: Any, acc: Any, factor: Any) -> mgpu.FragmentedArray:
        b = [[mlir.transposed(x) for x in pair] for pair in weights.registers.reshape(columns // 8, 2)]
        factors = [mlir.elements(x) for x in factor.registers.flat]
        c = [
            [[arith.mulf(x, factors[n][i % 2]) for i, x in enumerate(mlir.elements(low) + mlir.elements(high))]
             for n, (low, high) in enumerate(row)]
            for row in acc.registers.reshape(-1, columns // 8, 2)
        ]  # fmt: skip
        fragments = [mlir.bits(x) for x in v.registers.flat]
        for row, of_row in enumerate(c):
            for n, operand in enumerate(b):
                of_row[n] = mlir.mma(fragments[4 * row : 4 * row + 4], operand, of_row[n])
        return mlir.array(mlir.pairs([numbers for row in c for numbers in row]), WGMMA, acc.shape)

    return dot(v, weights, acc, factor)
