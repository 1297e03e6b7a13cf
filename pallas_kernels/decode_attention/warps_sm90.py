"""Attention in which each warp has a head of its own, 16 tokens of it in a tile, and all that it needs in registers.

For K and V of 8 and 4 bits, which would otherwise wait for each other's conversions: products are mma.sync, tokens are
the rows of K Q^T and the columns of V^T P. A sum over dims may take them in any order, and so may one over tokens: what
a lane loads in one piece is what it multiplies. Rows of V^T are any dims too: `_of_lane` knows them.

mma.m16n8k16 by lane (g = lane / 4, t = lane % 4): A has rows g and g + 8, columns 2t, 2t + 1, and 8 on; B rows 2t,
2t + 1, and 8 on, column g; C rows g and g + 8, columns 2t and 2t + 1.
"""

from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decode_attention.config import WARPS
from pallas_kernels.decode_attention.registers_sm90 import (
    Registers,
    array_of,
    as_bits,
    as_float,
    doubled,
    element_at,
    elements_of,
    fma,
    in_pairs,
    instruction,
    less,
    mma,
    transposed,
    words_of,
    zero_float,
)
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.unpack_sm90 import add, constant, div, mul, rem, warp_and_lane

WGMMA = plgpu.Layout.WGMMA  # of one block of 64 rows: mma's C of four warps
BY_WARP = plgpu.Layout.TILED(plgpu.Tiling(((32, 8), (8, 8), (2,))), (-5,), (-3, -2), -1)  # of C's columns, by warp
Stored = tuple[jax.Array, Any]  # a warpgroup's tokens in registers, and where their scales are (None: none)


class Queries(NamedTuple):
    """A head's of each warp, in registers."""

    values: jax.Array  # [4 * columns, D] in q_layout
    factors: jax.Array  # [32, columns] BY_WARP: what each was divided by, a power of two
    bias: jax.Array | None  # [32, G * columns] BY_WARP: their products with what codes by group are too large by


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


def q_layout(stored: Storage, columns: int) -> Any:
    """Queries [4 * columns, D] float16, a warp's after the other's: of query g the dims that k_layout has."""
    dims = lane_dims(stored, 4)
    tiles = ((WARPS * columns, 4 * dims), (columns, 4 * dims), (8, dims))
    if dims <= 8:
        return plgpu.Layout.TILED(plgpu.Tiling(tiles), (-6,), (-2, -3), -1)
    return plgpu.Layout.TILED(plgpu.Tiling((*tiles, (8,))), (-7,), (-3, -4), -1)


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
        return array_of(out, BY_WARP, (32, columns))

    return combined(x)


def spread(x: jax.Array, blocks: int) -> jax.Array:
    """x [32, columns] BY_WARP -> [64 * blocks, columns]: the same in all rows that a warp has."""
    rows, columns = 64 * blocks, x.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(BY_WARP,), return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=WGMMA)
    )
    def repeat(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return array_of([each for each in x.registers.flat for _ in range(2)] * blocks, WGMMA, (rows, columns))

    return repeat(x)


def no_queries(stored: Storage, columns: int) -> Queries:
    """Zeros as load_queries returns them."""

    def zeros(shape: tuple[int, int], dtype: DTypeLike, layout: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros(shape, dtype), layout)

    values = zeros((WARPS * columns, stored.head_dim), jnp.float16, q_layout(stored, columns))
    bias = zeros((32, stored.groups * columns), jnp.float32, BY_WARP) if stored.by_group else None
    return Queries(values, zeros((32, columns), jnp.float32, BY_WARP), bias)


def load_queries(stored: Storage, queries: Any, columns: int) -> Queries:
    """Queries [4 times up to `columns`, D] in shared memory, a warp's after the other's, each lane's dims in the order
    in which `_converted` pairs those of K; missing ones are the last again. They are divided, to fit float16's range,
    by the power of two under their largest element: no bit is lost but of what is far smaller."""
    count, head_dim, dims = queries.shape[0] // WARPS, stored.head_dim, lane_dims(stored, 4)
    shape, size = (WARPS * columns, head_dim), min(dims, 8)
    kinds = [
        plgpu.ShapeDtypeStruct(shape, jnp.float16, layout=q_layout(stored, columns)),
        plgpu.ShapeDtypeStruct((32, columns), jnp.float32, layout=BY_WARP),
    ]
    if stored.by_group:
        kinds.append(plgpu.ShapeDtypeStruct((32, stored.groups * columns), jnp.float32, layout=BY_WARP))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=tuple(kinds))
    def load(_: Any, ref: ir.Value) -> tuple[mgpu.FragmentedArray, ...]:
        warp, lane = warp_and_lane()
        kind = ir.MemRefType(ref.type).element_type
        out = np.empty((head_dim // (4 * dims), columns // 8, dims // size), object)
        factors, every = [], []
        for n in range(columns // 8):  # a lane has dims of one in eight
            query = add(div(lane, 4), 8 * n)
            if count % 8:
                query = arith.select(less(query, constant(count)), query, constant(count - 1))
            begin = add(mul(add(mul(warp, count), query), head_dim), mul(rem(lane, 4), dims))
            words: Registers = []
            for block, i in np.ndindex(out.shape[0], out.shape[2]):
                where = element_at(ref, add(begin, block * 4 * dims + size * i), kind)
                words += words_of(llvm.load(ir.VectorType.get((size,), kind), where, alignment=2 * size))
            words, exponent = _fitted(words, kind)
            factors.append(_of_columns(arith.shli(exponent, constant(23))))
            if stored.groups:
                words = _paired(words, 2 * _nibbles(stored))
            if stored.by_group and _nibbles(stored) == 2:  # for codes that are 16 times as large
                words = [instruction("mul.f16x2 $0, $1, $2;", x, constant(0x2C002C00)) if i % 2 else x for i, x in
                         enumerate(words)]  # fmt: skip
            every.append(words)
            for at, (block, i) in enumerate(np.ndindex(out.shape[0], out.shape[2])):
                kept = ir.VectorType.get((size // 2,), ir.IntegerType.get_signless(32))
                some = vector.from_elements(kept, words[size // 2 * at : size // 2 * (at + 1)])
                out[block, n, i] = mgpu.utils.bitcast(some, ir.VectorType.get((size,), ir.F16Type.get()))
        arrays = [array_of(list(out.flat), q_layout(stored, columns), shape), array_of(factors, BY_WARP, (32, columns))]
        if stored.by_group:
            low, high = _surplus(stored)
            bias: list[Any] = []
            for group, words in product(range(stored.groups), every):
                total, share = [zero_float()] * 4, len(words) // stored.groups
                for i in range(group * share, (group + 1) * share, 2):
                    total = mma([low, low, high, high], words[i : i + 2], total)
                bias.append(vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), total[:2]))
            arrays.append(array_of(bias, BY_WARP, (32, stored.groups * columns)))
        return tuple(arrays)

    values, factors, *bias = load(queries)
    return Queries(values, factors, bias[0] if bias else None)


def _surplus(stored: Storage) -> Registers:
    """What codes by group are too large by, negative, in pairs: of int8 and int4's low nibbles, and of high ones, which
    are 16 times as large."""
    if _nibbles(stored) == 1:
        return [constant(0x80808080)] * 2
    return [constant(0x80088008), constant(0x80808080)]


def _fitted(words: Registers, kind: ir.Type) -> tuple[Registers, ir.Value]:
    """Pairs of bfloat16 or float16, a lane's share of a query that four have, as pairs of float16 between -4 and 4; and
    the exponent of the power of two that they were divided by, with float32's bias."""
    brain = isinstance(kind, ir.BF16Type)
    name, bits, surplus, most = ("bf16x2", 7, 0, 253) if brain else ("f16x2", 10, 127 - 15, 29)

    def largest(x: ir.Value, y: ir.Value) -> ir.Value:
        return instruction(f"max.{name} $0, $1, $2;", x, y)

    top = reduce(largest, [arith.andi(x, constant(0x7FFF7FFF)) for x in words])
    for distance in (1, 2):
        top = largest(top, mgpu.utils.shfl_bfly(top, distance))
    top = largest(top, instruction("prmt.b32 $0, $1, $2, $3;", top, top, constant(0x1032)))
    exponent = arith.andi(arith.shrui(top, constant(bits)), constant((1 << (15 - bits)) - 1))
    exponent = instruction("max.u32 $0, $1, $2;", exponent, constant(1))  # neither 2^e nor 2^-e is subnormal
    exponent = instruction("min.u32 $0, $1, $2;", exponent, constant(most))
    if not brain:
        inverse = arith.shli(arith.subi(constant(30), exponent), constant(10))
        inverse = instruction("prmt.b32 $0, $1, $2, $3;", inverse, inverse, constant(0x1010))
        return [instruction("mul.f16x2 $0, $1, $2;", x, inverse) for x in words], add(exponent, surplus)
    inverse = as_float(arith.shli(arith.subi(constant(254), exponent), constant(23)))
    out = []
    for word in words:
        low, high = arith.shli(word, constant(16)), arith.andi(word, constant(0xFFFF0000))
        both = [arith.mulf(as_float(x), inverse) for x in (high, low)]
        out.append(instruction("cvt.rn.f16x2.f32 $0, $1, $2;", *both, kinds="f"))
    return out, exponent


def _of_columns(x: ir.Value) -> ir.Value:
    """What lanes have of query g, as pairs of float32 of queries 2t and 2t + 1."""
    _, lane = warp_and_lane()
    first = mul(rem(lane, 4), 8)
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    both = [as_float(instruction(text, x, add(first, 4 * e), hidden=True)) for e in (0, 1)]
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), both)


def _paired(words: Registers, size: int) -> Registers:
    """Pairs of neighbouring dims, `size` words of them at a time, as _converted pairs codes."""
    return [
        instruction("prmt.b32 $0, $1, $2, $3;", words[i + j], words[i + j + size // 2], constant(selector))
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


def dot_k(stored: Storage, k: Stored, zero: jax.Array, queries: Queries) -> jax.Array:
    """K [64, D] times what load_queries made -> [64, columns], in units of `stored.unit`. `zero` is one that the
    compiler cannot know: constants that it knows, it loads again for each instruction."""
    values, scales = k
    columns, dims = queries.factors.shape[1], lane_dims(stored, 4)
    refs = () if scales is None else (scales,)
    biases = () if queries.bias is None else (queries.bias,)
    splat = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(
            k_layout(stored), q_layout(stored, columns), splat, (BY_WARP,) * len(biases),
            (plgpu.RefType(),) * len(refs),
        ),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=WGMMA),
    )  # fmt: skip
    def dot(_: Any, values: Any, queries: Any, zero: Any, bias: Any, scales: Any) -> mgpu.FragmentedArray:
        warp, lane = warp_and_lane()
        convert = partial(_converted, stored, zero.registers.item())
        first = add(mul(warp, 16), div(lane, 4))
        rows = values.registers.reshape(-1, 2)  # pieces of a row, two rows
        b = queries.registers.reshape(len(rows), columns // 8, -1)
        of_scales = []
        if scales and not stored.by_group:
            of_scales = [_scales(stored, scales[0], add(first, 8 * i), rem(lane, 4), 4) for i in (0, 1)]
        # By group sums of its own; else two chains: mma takes long.
        chains = max(2, stored.groups) if stored.by_group else 2
        sums = [[[zero_float()] * 4 for _ in range(chains)] for _ in range(columns // 8)]
        for n, group in np.ndindex(columns // 8, stored.groups if stored.by_group else 0):
            sums[n][group] = elements_of(bias[0].registers.flat[group * (columns // 8) + n]) * 2
        step = 0
        for block, pair in enumerate(rows):
            words = [words_of(x) for x in pair]
            of_queries = [[w for x in b[block, n] for w in words_of(x)] for n in range(columns // 8)]
            for i in range(len(words[0])):
                a = []
                for row in range(2):
                    scale = doubled(of_scales[row](block, i)) if of_scales else None
                    a.append(convert(words[row][i], scale))
                size = 2 * _nibbles(stored)  # pairs of dims of a word
                operands = [q[size * i : size * (i + 1)] for q in of_queries]
                for k in range(0, size, 2):
                    fragment = [a[0][k], a[1][k], a[0][k + 1], a[1][k + 1]]
                    chain = step % 2
                    if stored.groups > 1 and stored.by_group:
                        chain = block * 4 * dims // (stored.format.group or 1)
                    for n, operand in enumerate(operands):
                        sums[n][chain] = mma(fragment, operand[k : k + 2], sums[n][chain])
                    step += 1
        if stored.groups > 1 and stored.by_group:
            factors = [_row_scales(stored, scales[0], add(first, 8 * i)) for i in (0, 1)]
            totals = [
                [reduce(lambda so_far, g: fma(each[g][i], factors[i // 2][g], so_far), range(1, stored.groups),
                        arith.mulf(each[0][i], factors[i // 2][0])) for i in range(4)]
                for each in sums
            ]  # fmt: skip
        else:
            totals = [[arith.addf(x, y) for x, y in zip(*both)] for both in sums]
            if stored.by_group:
                factors = [_row_scales(stored, scales[0], add(first, 8 * i)) for i in (0, 1)]
                totals = [[arith.mulf(x, factors[i // 2][0]) for i, x in enumerate(each)] for each in totals]
        return array_of(in_pairs(totals), WGMMA, (64, columns))

    return dot(values, queries.values, zero, biases, refs)


def convert_v(stored: Storage, v: Stored, zero: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> jax.Array:
    """V's tokens as operands of dot_v: float16 [64, D], the registers of one mma after the other. Tokens of a warp
    before bounds[0], and from bounds[1] on, are zero, whatever they hold, or (stored.by_group) left to dot_v."""
    values, scales = v
    splat, refs = plgpu.Layout.WG_SPLAT(()), () if scales is None or stored.by_group else (scales,)

    @plgpu.inline_mgpu(
        arg_types=(v_layout(stored), *(splat,) * 3, *(plgpu.RefType(),) * len(refs)),
        return_type=plgpu.ShapeDtypeStruct((64, stored.head_dim), jnp.float16, layout=WGMMA),
    )
    def convert(_: Any, values: Any, zero: Any, low: Any, high: Any, *scales: ir.Value) -> mgpu.FragmentedArray:
        warp, lane = warp_and_lane()
        first = add(mul(warp, 16), mul(rem(lane, 4), 2))
        tokens = [add(first, i) for i in (0, 1, 8, 9)]
        seen = _seen(lane, low, high)
        piece, nothing = div(lane, 4), mgpu.c(0.0, ir.F16Type.get())
        of_scales = [_scales(stored, x, token, piece, 8) for x in scales for token in tokens]
        masks = [_mask(*seen[i : i + 2]) for i in (0, 2)]
        # A word of two tokens each: pairs of bytes of each token, or (fp8) bytes of both in turns.
        selectors: tuple[int, ...] = (0x5410, 0x7632) if stored.groups else (0x5140, 0x7362)
        if _chunk(stored, 8) == 2:
            selectors = selectors[:1]
        out = []
        for block, rows in enumerate(values.registers.reshape(-1, 4)):
            words = [words_of(x) for x in rows]
            for i in range(len(words[0])):
                dims: list[Registers] = []  # of two tokens each
                for pair in (0, 2):
                    scale = None
                    if scales:
                        both = [arith.select(seen[pair + j], of_scales[pair + j](block, i), nothing) for j in (0, 1)]
                        scale = as_bits(vector.from_elements(ir.VectorType.get((2,), ir.F16Type.get()), both))
                    mixed = [
                        instruction("prmt.b32 $0, $1, $2, $3;", words[pair][i], words[pair + 1][i], constant(selector))
                        for selector in selectors
                    ]
                    if not stored.groups:
                        mixed = [arith.andi(x, masks[pair // 2]) for x in mixed]
                    dims.append([x for word in mixed for x in _converted(stored, zero.registers.item(), word, scale)])
                for k in range(0, len(dims[0]), 2):
                    out += [dims[0][k], dims[0][k + 1], dims[1][k], dims[1][k + 1]]
        two = ir.VectorType.get((2,), ir.F16Type.get())
        return array_of([mgpu.utils.bitcast(x, two) for x in out], WGMMA, (64, stored.head_dim))

    return convert(values, zero, *bounds, *refs)


def dot_v(
    stored: Storage, v: jax.Array, scales: Any, bounds: tuple[jax.Array, jax.Array], weights: jax.Array,
    acc: jax.Array, factor: jax.Array,
) -> jax.Array:  # fmt: skip
    """acc [4 * D, columns] times factor [32, columns] BY_WARP, and weights [64, columns] float16 times what convert_v
    made, in `units`. By group weights are multiplied by the tokens' scales, or within the bounds' complement by 0."""
    columns, splat = weights.shape[1], plgpu.Layout.WG_SPLAT(())
    refs = (scales,) if stored.by_group else ()

    @plgpu.inline_mgpu(
        arg_types=(WGMMA, WGMMA, WGMMA, BY_WARP, splat, splat, *(plgpu.RefType(),) * len(refs)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=WGMMA),
    )
    def dot(
        _: Any, v: Any, weights: Any, acc: Any, factor: Any, low: Any, high: Any, *scales: ir.Value
    ) -> mgpu.FragmentedArray:
        b = [[[transposed(x) for x in pair] for pair in weights.registers.reshape(columns // 8, 2)]]
        factors = [elements_of(x) for x in factor.registers.flat]
        acc_rows = acc.registers.reshape(-1, columns // 8, 2)
        fragments = [as_bits(x) for x in v.registers.flat]
        of_row, surplus = [0] * len(acc_rows), None
        if scales:
            pairs = _scales_of_pairs(stored, scales[0], low, high)  # by group, of two tokens each
            b = [
                [[instruction("mul.f16x2 $0, $1, $2;", *both) for both in zip(operand, of_group)] for operand in b[0]]
                for of_group in pairs
            ]
            of_row = [i * len(b) // len(acc_rows) for i in range(len(acc_rows))]
            a = _surplus(stored) * 2
            surplus = [[mma(a, operand, [zero_float()] * 4) for operand in of_group] for of_group in b]
        out = []
        for row, group in enumerate(of_row):
            for n in range(columns // 8):
                numbers = elements_of(acc_rows[row, n, 0]) + elements_of(acc_rows[row, n, 1])
                if surplus is None:
                    c = [arith.mulf(x, factors[n][i % 2]) for i, x in enumerate(numbers)]
                else:
                    c = [fma(x, factors[n][i % 2], surplus[group][n][i]) for i, x in enumerate(numbers)]
                out.append(mma(fragments[4 * row : 4 * row + 4], b[group][n], c))
        return array_of(in_pairs(out), WGMMA, acc.shape)

    return dot(v, weights, acc, factor, *bounds, *refs)


def units(stored: Storage) -> tuple[float, float]:
    """Of the sums' rows g and g + 8 of a warp."""
    return (stored.unit, stored.unit / 16) if stored.by_group and _nibbles(stored) == 2 else (stored.unit,) * 2


def _chunk(stored: Storage, lanes: int) -> int:
    """Bytes of a row that a lane loads at once: as many as it can, or those of a product of one group."""
    if stored.by_group and stored.groups > 1:
        return 4 if lanes == 4 else 4 // _nibbles(stored)
    return min(16, stored.row // lanes)


def _nibbles(stored: Storage) -> int:
    return 2 if stored.format.dtype == "int4" else 1


def _scales(
    stored: Storage, scales: ir.Value, token: ir.Value, share: ir.Value, lanes: int
) -> Callable[[int, int], ir.Value]:
    """The float16 scale of a token's dims that word `i` of the lane's piece in `block` holds."""
    f16, group, groups = ir.F16Type.get(), stored.format.group or 0, stored.groups
    dims = lane_dims(stored, lanes)
    pointer, several = mgpu.utils.memref_ptr(scales), max(1, dims // group)
    base = mul(token, groups)
    found: dict[int, ir.Value] = {}

    def scale(block: int, i: int) -> ir.Value:
        begin = block * lanes * dims
        if block not in found:
            own = mul(share, several) if group <= dims else div(share, group // dims)
            at = add(base, add(own, begin // group))
            if group >= lanes * dims:
                at = add(base, begin // group)
            where = llvm.getelementptr(pointer.type, pointer, [at], [-2147483648], f16, llvm.GEPNoWrapFlags.none)
            found[block] = llvm.load(ir.VectorType.get((several,), f16), where, alignment=2 * several)
        number = 4 * _nibbles(stored) * i // group if several > 1 else 0
        return vector.extract(found[block], [], ir.DenseI64ArrayAttr.get([number]))

    return scale


def _row_scales(stored: Storage, scales: ir.Value, token: ir.Value) -> list[ir.Value]:
    """A token's scales of all groups, as float32."""
    f16 = ir.F16Type.get()
    where = element_at(scales, mul(token, stored.groups), f16)
    found = llvm.load(ir.VectorType.get((stored.groups,), f16), where, alignment=2 * stored.groups)
    return [arith.extf(ir.F32Type.get(), x) for x in elements_of(found)]


def _scales_of_pairs(stored: Storage, scales: ir.Value, low: Any, high: Any) -> list[Registers]:
    """The scales of a lane's tokens by group: of 2t and 2t + 1, of 2t + 8 and 2t + 9. Zero outside of the bounds."""
    warp, lane = warp_and_lane()
    first, i32 = add(mul(warp, 16), mul(rem(lane, 4), 2)), ir.IntegerType.get_signless(32)
    found = []
    for i, seen in zip((0, 1, 8, 9), _seen(lane, low, high)):
        where = element_at(scales, mul(add(first, i), stored.groups), ir.F16Type.get())
        kind = ir.IntegerType.get_signless(16) if stored.groups == 1 else ir.VectorType.get((stored.groups // 2,), i32)
        words = llvm.load(kind, where, alignment=2 * stored.groups)
        words = [arith.extui(i32, words)] if stored.groups == 1 else elements_of(words)
        found.append([arith.select(seen, x, constant(0)) for x in words])
    return [
        [instruction("prmt.b32 $0, $1, $2, $3;", found[i][group // 2], found[i + 1][group // 2],
              constant((0x5410, 0x7632)[group % 2])) for i in (0, 2)]
        for group in range(stored.groups)
    ]  # fmt: skip


def _seen(lane: ir.Value, low: Any, high: Any) -> list[ir.Value]:
    """Which of a lane's tokens 2t, 2t + 1, 2t + 8 and 2t + 9 are within the bounds."""
    return [_within(add(mul(rem(lane, 4), 2), i), low, high) for i in (0, 1, 8, 9)]


def _converted(stored: Storage, zero: ir.Value, word: ir.Value, scale: ir.Value | None) -> Registers:
    """What a word holds, in pairs of float16 that are two bytes apart (fp8: neighbours), times a pair of scales; by
    group codes as fractions of `unit`, too large by `_surplus`."""
    dtype = stored.format.dtype
    if not stored.groups:
        halves = (arith.trunci(ir.IntegerType.get_signless(16), x) for x in (word, arith.shrui(word, constant(16))))
        return [instruction("cvt.rn.f16x2.e4m3x2 $0, $1;", x, kinds="h") for x in halves]
    codes = partial(_fractions, dtype) if scale is None else partial(_codes, dtype, scale)
    out = codes(word, zero)
    for _ in range(stored.repeat - 1):
        again = codes(instruction("mov.b32 $0, $1;", word, hidden=True), zero)
        out = [instruction("max.f16x2 $0, $1, $2;", x, y) for x, y in zip(out, again)]
    return out


def _fractions(dtype: str, word: ir.Value, zero: ir.Value) -> Registers:
    """A code of 8 or 4 bits, its sign bit flipped, is 128 or 8 more than its value, and as the mantissa of a subnormal
    float16 that times 2^-24; in the high nibble 16 times that. Tensor cores multiply these exactly."""
    kept = (0x00FF00FF,) if dtype == "int8" else (0x000F000F, 0x00F000F0)
    flipped = (0x00800080,) if dtype == "int8" else (0x00080008, 0x00800080)
    return [
        arith.xori(arith.andi(bytes_of, arith.ori(zero, constant(bits))), constant(sign))
        for bytes_of in (word, arith.shrui(word, constant(8)))
        for bits, sign in zip(kept, flipped)
    ]


def _codes(dtype: str, scale: ir.Value, word: ir.Value, zero: ir.Value) -> Registers:
    """A code of 8 or 4 bits under the exponent of 1024, its sign bit flipped, is 1024 and 128 or 8 more than its value;
    one in the high nibble 16 times that."""
    out = []
    for bytes_of in (word, arith.shrui(word, constant(8))):

        def under_exponent(bits: int, exponent: int, bytes_of: ir.Value = bytes_of) -> ir.Value:
            return arith.xori(arith.andi(bytes_of, arith.ori(zero, constant(bits))), constant(exponent))

        if dtype == "int8":
            out.append(
                instruction("sub.f16x2 $0, $1, $2;", under_exponent(0x00FF00FF, 0x64806480), constant(0x64806480))
            )
            continue
        low, high = under_exponent(0x000F000F, 0x64086408), under_exponent(0x00F000F0, 0x64806480)
        out.append(instruction("sub.f16x2 $0, $1, $2;", low, constant(0x64086408)))
        sixteenth, minus_72 = constant(0x2C002C00), constant(0xD480D480)
        out.append(instruction("fma.rn.f16x2 $0, $1, $2, $3;", high, sixteenth, minus_72))
    return [instruction("mul.f16x2 $0, $1, $2;", x, scale) for x in out]


def _within(x: ir.Value, low: Any, high: Any) -> ir.Value:
    low, high = low.registers.item(), high.registers.item()
    compare = arith.CmpIPredicate
    return arith.andi(arith.cmpi(compare.sge, x, low), arith.cmpi(compare.slt, x, high))


def _mask(first: ir.Value, second: ir.Value) -> ir.Value:
    """All bits of the even bytes of a word where `first`, and of the odd ones where `second`."""
    parts = [
        arith.select(seen, constant(bits), constant(0))
        for seen, bits in ((first, 0x00FF00FF), (second, 0xFF00FF00))
    ]  # fmt: skip
    return arith.ori(*parts)
