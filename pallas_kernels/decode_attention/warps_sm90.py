"""Attention in which each warp has 16 tokens of a tile, all that it needs in registers, and a sum of its own.

For K and V of 8 and 4 bits, which would otherwise wait for each other's conversions: products are mma.sync, tokens are
the rows of K Q^T and the columns of V^T P. A sum over dims may take them in any order, and so may one over tokens: what
a lane loads in one piece is what it multiplies. Rows of V^T are any dims too: `store_sums` knows them.

mma.m16n8k16 by lane (g = lane / 4, t = lane % 4): A has rows g and g + 8, columns 2t, 2t + 1, and 8 on; B rows 2t,
2t + 1, and 8 on, column g; C rows g and g + 8, columns 2t and 2t + 1.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from pallas_kernels.decode_attention import registers_sm90 as mlir
from pallas_kernels.decode_attention.registers_sm90 import Registers
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.unpack_sm90 import add, constant, div, mul, rem, warp_and_lane
from pallas_kernels.hadamard_sm90 import butterflies

WGMMA = plgpu.Layout.WGMMA  # of one block of 64 rows: mma's C of four warps
BY_WARP = plgpu.Layout.TILED(plgpu.Tiling(((32, 8), (8, 8), (2,))), (-5,), (-3, -2), -1)  # of C's columns, by warp
BY_ROWS = plgpu.Layout.TILED(  # of a head's result: each warp has all of some rows
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
# [columns, D], what each was divided by (None: nothing), and the sum of each (None: where no zero asks for it).
Queries = tuple[jax.Array, jax.Array | None, jax.Array | None]
Stored = tuple[jax.Array, Any]  # a warpgroup's tokens in registers, and where their scales are (None: none)


def lane_dims(stored: Storage, lanes: int) -> int:
    """How many dims one after the other a lane has of a row that `lanes` of them share, in turns."""
    return _chunk(stored, lanes) * _nibbles(stored)


def k_layout(stored: Storage) -> Any:
    """Stored rows [64, ..]: lanes have pieces of rows g and g + 8 of a warp's 16."""
    chunk = _chunk(stored, 4)
    width = 4 * chunk
    return plgpu.Layout.TILED(plgpu.Tiling(((64, width), (16, width), (8, width), (chunk,))), (-7,), (-3, -2), -1)


def v_layout(stored: Storage) -> Any:
    """The same, of rows 2t, 2t + 1, 2t + 8 and 2t + 9: piece g."""
    chunk = _chunk(stored, 8)
    width = 8 * chunk
    return plgpu.Layout.TILED(plgpu.Tiling(((64, width), (16, width), (8, width), (2, chunk))), (-8,), (-3, -4), -1)


def q_layout(stored: Storage) -> Any:
    """Queries [columns, D] float16: of query g the dims that k_layout has."""
    dims = lane_dims(stored, 4)
    return plgpu.Layout.TILED(plgpu.Tiling(((8, 4 * dims), (dims,), (8,))), (plgpu.Replicated(4),), (-4, -3), -1)


def reduce_warp(x: jax.Array, op: str) -> jax.Array:
    """x [64, columns] -> [32, columns] BY_WARP: the sum ("add") or maximum over each warp's rows."""
    columns = x.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct((32, columns), jnp.float32, layout=BY_WARP)
    )
    def combined(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        combine = arith.addf if op == "add" else arith.maximumf
        out = []
        for low, high in x.registers.reshape(-1, 2):
            both = combine(low, high)
            numbers = []
            for i in range(2):
                number = vector.extract(both, [], ir.DenseI64ArrayAttr.get([i]))
                for distance in (16, 8, 4):
                    number = combine(number, mgpu.utils.shfl_bfly(number, distance))
                numbers.append(number)
            out.append(vector.from_elements(both.type, numbers))
        return mlir.array(out, BY_WARP, (32, columns))

    return combined(x)


def spread(x: jax.Array, blocks: int) -> jax.Array:
    """x [32, columns] BY_WARP -> [64 * blocks, columns]: the same in all rows that a warp has."""
    rows, columns = 64 * blocks, x.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(BY_WARP,), return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=WGMMA)
    )
    def repeat(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return mlir.array([each for each in x.registers.flat for _ in range(2)] * blocks, WGMMA, (rows, columns))

    return repeat(x)


def no_queries(stored: Storage, columns: int, dtype: DTypeLike) -> Queries:
    """Zeros as load_queries returns them, of queries [columns, D] of `dtype`."""
    zeros = plgpu.layout_cast(jnp.zeros((columns, stored.head_dim), jnp.float16), q_layout(stored))
    of_each = plgpu.layout_cast(jnp.zeros((32, columns), jnp.float32), BY_WARP)
    return zeros, of_each if _to_fit(stored, dtype) else None, of_each if _sums(stored) else None


def _to_fit(stored: Storage, dtype: DTypeLike) -> bool:
    """Whether queries are divided to fit float16's range."""
    return dtype == jnp.bfloat16 or stored.format.hadamard


def _sums(stored: Storage) -> bool:
    """Whether logits take the sums of queries."""
    return stored.by_factor and stored.format.zero_point


def load_queries(stored: Storage, queries: Any) -> Queries:
    """Queries [columns, D] in shared memory in q_layout, each lane's dims in the order in which `_converted` pairs
    those of K, and rotated where K is. Those of bfloat16 are divided, to fit float16's range, by the power of two
    [32, columns] BY_WARP under their largest element: no bit is lost but of what is far smaller."""
    array = plgpu.load(queries, layout=q_layout(stored), optimized=False)
    columns, to_fit = array.shape[0], _to_fit(stored, array.dtype)
    if not (stored.groups or to_fit):
        return array, None, None
    of_each = plgpu.ShapeDtypeStruct((32, columns), jnp.float32, layout=BY_WARP)
    kinds = [plgpu.ShapeDtypeStruct(array.shape, jnp.float16, layout=q_layout(stored))]
    kinds += [of_each] * (to_fit + _sums(stored))

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
            if _sums(stored):
                sums.append(_of_columns(mlir.bits(_sum_of(words))))
            if stored.groups:
                words = _paired(words, 2 * _nibbles(stored))
            for i in range(0, len(words), 4):
                four = vector.from_elements(ir.VectorType.get((4,), ir.IntegerType.get_signless(32)), words[i : i + 4])
                registers.append(mgpu.utils.bitcast(four, ir.VectorType.get((8,), ir.F16Type.get())))
        out = (mlir.array(registers, q_layout(stored), array.shape),)
        return (*out, *(mlir.array(some, BY_WARP, (32, columns)) for some in (factors, sums) if some))

    found = prepare(array)
    return found[0], found[1] if to_fit else None, found[-1] if _sums(stored) else None


def _fitted(words: Registers, bfloat16: bool, rotated: bool) -> tuple[Registers, ir.Value]:
    """Pairs in 16 bits, a lane's share of a query that four have, rotated or not, as pairs of float16 between -4 and 4;
    and the exponent of the power of two that they were divided by, with float32's bias."""
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
    """The sum f32 of pairs of float16 that four lanes have."""
    total = reduce(arith.addf, mlir.numbers(words))
    for distance in (1, 2):
        total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
    return total


def _of_columns(x: ir.Value) -> ir.Value:
    """What lanes have of query g, as pairs of float32 of queries 2t and 2t + 1."""
    _, lane = warp_and_lane()
    first = mul(rem(lane, 4), 8)
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    both = [mlir.float(mlir.asm(text, x, add(first, 4 * e), hidden=True)) for e in (0, 1)]
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), both)


def _paired(words: Registers, size: int) -> Registers:
    """Pairs of neighbouring dims, `size` words of them at a time, as _converted pairs codes."""
    return [
        mlir.asm("prmt.b32 $0, $1, $2, $3;", words[i + j], words[i + j + size // 2], constant(selector))
        for i in range(0, len(words), size)
        for j in range(size // 2)
        for selector in (0x5410, 0x7632)
    ]


def load_k(stored: Storage, values: Any, scales: Any) -> Stored:
    """Rows [64, ..] of K in shared memory, and where their scales are."""
    return plgpu.load(values, layout=k_layout(stored), optimized=False), scales


def load_v(stored: Storage, values: Any, scales: Any) -> Stored:
    """The same of V."""
    return plgpu.load(values, layout=v_layout(stored), optimized=False), scales


def dot_k(
    stored: Storage, k: Stored, zero: jax.Array, queries: jax.Array, sums_of: jax.Array | None = None
) -> jax.Array:
    """K [64, D] times what load_queries made, queries and their sums -> [64, columns]. `zero` is one that the compiler
    cannot know: constants that it knows, it loads again for each instruction."""
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
        convert = partial(_converted, stored, zero.registers.item())
        first = add(mul(warp, 16), div(lane, 4))
        rows = values.registers.reshape(-1, 2)  # pieces of a row, two rows
        of_rows = [_scales(stored, x, add(first, 8 * i), rem(lane, 4), 4) for x in scales for i in (0, 1)]
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
                size = 2 * _nibbles(stored)  # pairs of dims of a word
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
            middles = [_middle(stored, *numbers) for numbers in rows_of]
            of_queries = [mlir.elements(x) for x in sums_of[0].registers.flat]
            totals = [
                [math.fma(middles[i // 2], of_query[i % 2], x) for i, x in enumerate(each)]
                for of_query, each in zip(of_queries, totals)
            ]
        return mlir.array(mlir.pairs(totals), WGMMA, (64, columns))

    return dot(values, queries, zero, sums_given, refs)


def _middle(stored: Storage, scale: ir.Value, zero: ir.Value) -> ir.Value:
    """What the code 0 stands for, f32: codes around it add up to less than those from 0 on, so that less cancels."""
    return math.fma(scale, mgpu.c(float(stored.middle), ir.F32Type.get()), zero)


def convert_v(stored: Storage, v: Stored, zero: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
    """V's tokens as operands of dot_v: float16 [64, D], the registers of one mma after the other. Tokens before
    bounds[0], and from bounds[1] on, are zero, whatever they hold, or (stored.by_factor) left to `weighted`."""
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
        of_tokens = [_scales(stored, x, token, piece, 8) for x in scales for token in tokens]
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
                    dims.append([x for word in mixed for x in _converted(stored, zero.registers.item(), word, numbers)])
                for k in range(0, len(dims[0]), 2):
                    out += [dims[0][k], dims[0][k + 1], dims[1][k], dims[1][k + 1]]
        two = ir.VectorType.get((2,), ir.F16Type.get())
        return mlir.array([mgpu.utils.bitcast(x, two) for x in out], WGMMA, (64, stored.head_dim))

    return convert(values, zero, *bounds, *refs)


def weighted(stored: Storage, v: Stored, bounds: tuple[jax.Array, jax.Array], weights: jax.Array) -> jax.Array:
    """Weights [64, columns] float16, where tokens have a single scale times that: zero outside of the bounds."""
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
            found, *_ = _scales(stored, scales, token, div(lane, 4), 8)(0, 0)
            factors.append(mlir.doubled(arith.select(mlir.within(token, low, high), found, nothing)))
        out = [
            mgpu.utils.bitcast(mlir.asm("mul.f16x2 $0, $1, $2;", mlir.bits(x), y), x.type)
            for pair in weights.registers.reshape(-1, 2)
            for x, y in zip(pair, factors)
        ]
        return mlir.array(out, WGMMA, weights.shape)

    return weigh(weights, *bounds, v[1])


def zeros_of(stored: Storage, v: Stored, bounds: tuple[jax.Array, jax.Array], weights: jax.Array) -> jax.Array:
    """Weights [64, columns] float16 times what code 0 stands for, where tokens have a single zero, f32: over all tokens
    it is what each dim of the result lacks. Zero outside of the bounds."""
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
            found = _scales(stored, scales, token, div(lane, 4), 8)(0, 0)
            middle = _middle(stored, *(arith.extf(kind, x) for x in found))
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
    """acc [4 * D, columns] times factor [32, columns] BY_WARP, and weights [64, columns] float16 times what convert_v
    made."""
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


def store_sums(stored: Storage, acc: jax.Array, top: jax.Array, total: jax.Array, queries: int, target: Any) -> None:
    """The sums of a warpgroup's warps to `target` [4, columns, D and at least 2]: acc [4 * D, columns] as dot_v has it
    for V stored so, and then top and total BY_WARP. Of columns from `queries` on, some or none."""
    columns, dims = acc.shape[1], lane_dims(stored, 8)
    width = target.shape[-1]

    @plgpu.inline_mgpu(arg_types=(WGMMA, BY_WARP, BY_WARP, plgpu.RefType()))
    def store(_: Any, acc: Any, top: Any, total: Any, target: ir.Value) -> None:
        warp, lane = warp_and_lane()
        pointer = mgpu.utils.memref_ptr(target)
        rows = acc.registers.reshape(-1, columns // 8, 2)
        for n, e in np.ndindex(columns // 8, 2):
            if 8 * n + e >= queries:
                continue
            query = add(mul(rem(lane, 4), 2), 8 * n + e)
            begin = mul(add(mul(warp, columns), query), width)
            mine = add(begin, mul(div(lane, 4), dims))
            for i in range(0, len(rows), 2):
                at = add(mine, i // (dims // 2) * 8 * dims + i % (dims // 2) * 2)
                numbers = [mlir.elements(rows[i + j, n, half])[e] for j in (0, 1) for half in (0, 1)]
                _store(pointer, at, numbers)
            _store(pointer, add(begin, stored.head_dim), [mlir.elements(x.registers.flat[n])[e] for x in (top, total)])

    store(acc, top, total, target)


def _store(pointer: ir.Value, at: ir.Value, numbers: list[ir.Value]) -> None:
    f32 = ir.F32Type.get()
    where = llvm.getelementptr(pointer.type, pointer, [at], [-2147483648], f32, llvm.GEPNoWrapFlags.none)
    several = vector.from_elements(ir.VectorType.get((len(numbers),), f32), numbers)
    llvm.store(several, where, alignment=4 * len(numbers))


def store_rows(x: jax.Array, target: Any, first: jax.Array, queries: int, heads: int, apart: int) -> None:
    """The first rows of x [columns, D] in 16 bits, BY_ROWS, to `target` [.., D] in global memory: `heads` of them to
    rows `first` and on, as many to those that are `apart` further, ..: each thread what it has."""
    head_dim, splat = x.shape[1], plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(BY_ROWS, splat, plgpu.RefType()))
    def store(_: Any, x: Any, first: Any, target: ir.Value) -> None:
        warp, lane = warp_and_lane()
        pointer, own = mgpu.utils.memref_ptr(target), add(mul(warp, 2), div(lane, 16))
        registers = x.registers.reshape(-1, head_dim // 64)
        text = f"{{ .reg .pred p; setp.lt.u32 p, $0, {queries}; @p st.global.v2.b32 [$1], {{$2, $3}}; }}"
        for n, i in np.ndindex(*registers.shape):
            row = add(own, 8 * n)
            place = row if queries == heads else add(mul(div(row, heads), apart), rem(row, heads))
            at = add(mul(add(place, first.registers.item()), head_dim), add(mul(rem(lane, 16), 4), 64 * i))
            kind = ir.VectorType(registers[n, i].type).element_type
            where = llvm.getelementptr(pointer.type, pointer, [at], [-2147483648], kind, llvm.GEPNoWrapFlags.none)
            operands = [row, where, *mlir.words(registers[n, i])]
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,l,r,r", has_side_effects=True)

    store(x, first, target)


def wait_for_warps() -> None:
    """Until all warps of the warpgroup are here."""

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    wait()


def _chunk(stored: Storage, lanes: int) -> int:
    """Bytes of a row that a lane loads at once."""
    return min(16, stored.row // lanes)


def _nibbles(stored: Storage) -> int:
    return 2 if stored.format.dtype == "int4" else 1


def _scales(
    stored: Storage, scales: ir.Value, token: ir.Value, share: ir.Value, lanes: int
) -> Callable[[int, int], list[ir.Value]]:
    """The float16 scale, and the zero if there is one, of a token's dims that word `i` of the lane's piece in `block`
    holds."""
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
        number = 4 * _nibbles(stored) * i // group if several > 1 else 0
        return [vector.extract(x, [], ir.DenseI64ArrayAttr.get([number])) for x in found[block]]

    return of_word


def _converted(stored: Storage, zero: ir.Value, word: ir.Value, numbers: Registers) -> Registers:
    """What a word holds, in pairs of float16 that are two bytes apart (fp8: neighbours), times a pair of scales and
    plus one of zeros; without scales, codes."""
    if not stored.groups:
        halves = (arith.trunci(ir.IntegerType.get_signless(16), x) for x in (word, arith.shrui(word, constant(16))))
        return [mlir.asm("cvt.rn.f16x2.e4m3x2 $0, $1;", x, kinds="h") for x in halves]
    out = _codes(word, stored.format.dtype, numbers, zero)
    for _ in range(stored.repeat - 1):
        again = _codes(mlir.asm("mov.b32 $0, $1;", word, hidden=True), stored.format.dtype, numbers, zero)
        out = [mlir.asm("max.f16x2 $0, $1, $2;", x, y) for x, y in zip(out, again)]
    return out


def _codes(word: ir.Value, dtype: str, numbers: Registers, zero: ir.Value) -> Registers:
    """A code of 8 or 4 bits under the exponent of 1024, its sign bit flipped, is 1024 and 128 or 8 more than its value;
    one in the high nibble 16 times that. Where zeros are added, which stand for the lowest code, that is 0."""
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
