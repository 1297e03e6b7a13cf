"""Stores sums and results of warps that each have tokens of their own, each thread what it has."""

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.decode_attention import registers_sm90 as mlir
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.unpack_sm90 import add, div, mul, rem, warp_and_lane
from pallas_kernels.decode_attention.warp_layouts_sm90 import BY_WARP, WGMMA, lane_dims

BY_ROWS = plgpu.Layout.TILED(  # of a head's result: each warp has all of some rows
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def store_sums(stored: Storage, acc: jax.Array, top: jax.Array, total: jax.Array, queries: int, target: Any) -> None:
    """Stores the sums of a warpgroup's warps to `target` [4, columns, D and at least 2]. These are acc [4 * D, columns]
    as dot_v has it for V stored so, and then top and total BY_WARP. Of columns from `queries` on, it stores some or
    none."""
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
    """Stores the first rows of x [columns, D] in 16 bits, BY_ROWS, to `target` [.., D] in global memory. `heads` of
    them go to rows `first` and on, as many to those `apart` further, and so on: each thread what it has."""
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
    """Waits until all warps of the warpgroup are here."""

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    wait()
