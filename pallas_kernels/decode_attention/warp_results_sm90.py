"""What warps_sm90 sums up, from registers to global memory: the results of heads, or what is added up later."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.decode_attention.config import WARPS
from pallas_kernels.decode_attention.registers_sm90 import (
    Registers,
    as_bits,
    element_at,
    elements_of,
    instruction,
    less,
)
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.unpack_sm90 import add, constant, div, mul, rem, warp_and_lane
from pallas_kernels.decode_attention.warps_sm90 import BY_WARP, WGMMA, lane_dims, units


class Rows(NamedTuple):
    """Where a head's queries are among the results: `heads` rows one after the other, as many that are `apart` further,
    .."""

    queries: int
    heads: int
    apart: int


def store_results(
    stored: Storage, acc: jax.Array, factor: jax.Array, target: Any, firsts: list[jax.Array], there: jax.Array,
    rows: Rows,
) -> None:  # fmt: skip
    """acc [4 * D, columns] as dot_v has it for V stored so, times factor [32, columns] BY_WARP, to `target` [.., D] of
    16 bits in global memory: of each warp to its rows from firsts[warp] on, if it is one of the first `there`."""
    columns, head_dim, splat = acc.shape[1], stored.head_dim, plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(WGMMA, BY_WARP, (splat,) * WARPS, splat, plgpu.RefType()))
    def store(_: Any, acc: Any, factor: Any, firsts: Any, there: Any, target: ir.Value) -> None:
        warp, lane = warp_and_lane()
        first = firsts[0].registers.item()
        for i in range(1, WARPS):
            first = arith.select(less(warp, constant(i)), first, firsts[i].registers.item())
        limit = arith.select(less(warp, there.registers.item()), constant(rows.queries), constant(0))
        kind = ir.MemRefType(target.type).element_type
        name = "bf16x2" if isinstance(kind, ir.BF16Type) else "f16x2"
        for column, dim, numbers in _of_lane(stored, acc, columns, rows.queries):
            query = add(mul(rem(lane, 4), 2), column)
            place = query
            if rows.queries != rows.heads:
                place = add(mul(div(query, rows.heads), rows.apart), rem(query, rows.heads))
            of_column = elements_of(factor.registers.flat[column // 8])[column % 2]
            exact = [arith.mulf(x, of_column) for x in numbers]
            words = [instruction(f"cvt.rn.{name}.f32 $0, $1, $2;", exact[i + 1], exact[i], kinds="f") for i in (0, 2)]
            at = add(mul(add(first, place), head_dim), add(mul(div(lane, 4), lane_dims(stored, 8)), dim))
            _store_if(query, limit, element_at(target, at, kind), words)

    store(acc, factor, tuple(firsts), there, target)


def store_sums(
    stored: Storage, acc: jax.Array, top: jax.Array, total: jax.Array, target: Any, warpgroup: jax.Array,
    slot: jax.Array,
) -> None:  # fmt: skip
    """A warpgroup's sums to `target` [4 times warpgroups, slots, queries, D and PAD] in global memory: acc [4 * D,
    columns] as dot_v has it for V stored so, and then top and total BY_WARP."""
    columns, splat = acc.shape[1], plgpu.Layout.WG_SPLAT(())
    _, slots, queries, width = target.shape

    @plgpu.inline_mgpu(arg_types=(WGMMA, BY_WARP, BY_WARP, splat, splat, plgpu.RefType()))
    def store(_: Any, acc: Any, top: Any, total: Any, warpgroup: Any, slot: Any, target: ir.Value) -> None:
        warp, lane = warp_and_lane()
        sums = add(mul(warpgroup.registers.item(), WARPS), warp)
        first = mul(add(mul(sums, slots), slot.registers.item()), queries)
        f32, limit = ir.F32Type.get(), constant(queries)
        for column, dim, numbers in _of_lane(stored, acc, columns, queries):
            query = add(mul(rem(lane, 4), 2), column)
            begin = mul(add(first, query), width)
            at = add(begin, add(mul(div(lane, 4), lane_dims(stored, 8)), dim))
            _store_if(query, limit, element_at(target, at, f32), [as_bits(x) for x in numbers])
            if dim == 0:
                both = [elements_of(x.registers.flat[column // 8])[column % 2] for x in (top, total)]
                words = [as_bits(x) for x in (*both, *both)]
                _store_if(query, limit, element_at(target, add(begin, stored.head_dim), f32), words)

    store(acc, top, total, warpgroup, slot, target)


def _of_lane(stored: Storage, acc: Any, columns: int, queries: int) -> Iterator[tuple[int, int, list[ir.Value]]]:
    """What a lane has of acc [4 * D, columns]: (column, dim, numbers), four dims of a column each. Its columns are 2t
    later, its dims g times lane_dims."""
    rows, dims = acc.registers.reshape(-1, columns // 8, 2), lane_dims(stored, 8)
    of_half = [mgpu.c(unit, ir.F32Type.get()) for unit in units(stored)]
    for n, e in np.ndindex(columns // 8, 2):
        for i in range(0, len(rows) if 8 * n + e < queries else 0, 2):
            numbers = [elements_of(rows[i + j, n, half])[e] for j in (0, 1) for half in (0, 1)]
            if stored.by_group:
                numbers = [arith.mulf(x, of_half[at % 2]) for at, x in enumerate(numbers)]
            yield 8 * n + e, i // (dims // 2) * 8 * dims + i % (dims // 2) * 2, numbers


def _store_if(x: ir.Value, limit: ir.Value, where: ir.Value, words: Registers) -> None:
    """Two or four words to global memory, if x < limit."""
    names = ", ".join(f"${i}" for i in range(3, 3 + len(words)))
    text = f"{{ .reg .pred p; setp.lt.u32 p, $0, $1; @p st.global.v{len(words)}.b32 [$2], {{{names}}}; }}"
    kinds = ",".join(["r,r,l", *"r" * len(words)])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [x, limit, where, *words], text, kinds, has_side_effects=True)
