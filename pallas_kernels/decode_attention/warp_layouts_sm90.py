"""Lays out tokens, queries and sums in the registers of warps that each have tokens of their own.

mma.m16n8k16 by lane (g = lane / 4, t = lane % 4) has A's rows g and g + 8, columns 2t, 2t + 1, and 8 on. It has B's
rows 2t, 2t + 1, and 8 on, column g. It has C's rows g and g + 8, columns 2t and 2t + 1. A sum over dims or tokens may
take them in any order. So a lane multiplies what it loads in one piece.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.decode_attention import registers_sm90 as mlir
from pallas_kernels.decode_attention.storage_sm90 import Storage

WGMMA = plgpu.Layout.WGMMA  # of one block of 64 rows: mma's C of four warps
BY_WARP = plgpu.Layout.TILED(plgpu.Tiling(((32, 8), (8, 8), (2,))), (-5,), (-3, -2), -1)  # of C's columns, by warp


def lane_dims(stored: Storage, lanes: int) -> int:
    """Returns how many dims one after the other a lane has of a row that `lanes` of them share, in turns."""
    return _chunk(stored, lanes) * nibbles(stored)


def k_layout(stored: Storage) -> Any:
    """Lays out stored rows [64, ..]: lanes have pieces of rows g and g + 8 of a warp's 16."""
    chunk = _chunk(stored, 4)
    width = 4 * chunk
    return plgpu.Layout.TILED(plgpu.Tiling(((64, width), (16, width), (8, width), (chunk,))), (-7,), (-3, -2), -1)


def v_layout(stored: Storage) -> Any:
    """Lays out stored rows [64, ..]: lanes have piece g of rows 2t, 2t + 1, 2t + 8 and 2t + 9."""
    chunk = _chunk(stored, 8)
    width = 8 * chunk
    return plgpu.Layout.TILED(plgpu.Tiling(((64, width), (16, width), (8, width), (2, chunk))), (-8,), (-3, -4), -1)


def q_layout(stored: Storage) -> Any:
    """Lays out queries [columns, D] float16: of query g the dims that k_layout has."""
    dims = lane_dims(stored, 4)
    return plgpu.Layout.TILED(plgpu.Tiling(((8, 4 * dims), (dims,), (8,))), (plgpu.Replicated(4),), (-4, -3), -1)


def _chunk(stored: Storage, lanes: int) -> int:
    """Returns the bytes of a row that a lane loads at once."""
    return min(16, stored.row // lanes)


def nibbles(stored: Storage) -> int:
    return 2 if stored.format.dtype == "int4" else 1


def reduce_warp(x: jax.Array, op: str) -> jax.Array:
    """Reduces x [64, columns] to [32, columns] BY_WARP: the sum ("add") or maximum over each warp's rows."""
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
    """Spreads x [32, columns] BY_WARP to [64 * blocks, columns]: the same in all rows that a warp has."""
    rows, columns = 64 * blocks, x.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(BY_WARP,), return_type=plgpu.ShapeDtypeStruct((rows, columns), jnp.float32, layout=WGMMA)
    )
    def repeat(_: Any, x: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return mlir.array([each for each in x.registers.flat for _ in range(2)] * blocks, WGMMA, (rows, columns))

    return repeat(x)
