"""Adds up a head's splits in decode_attention, and stores results and partial ones."""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.shape_sm90 import MASKED, Item, Shape, Sum, first_query
from pallas_kernels.decode_attention.warp_layouts_sm90 import BY_WARP, spread
from pallas_kernels.decode_attention.warp_stores_sm90 import BY_ROWS, store_rows, store_sums, wait_for_warps
from pallas_kernels.hopper.hadamard_sm90 import turn
from pallas_kernels.hopper.logits_sm90 import sinks_of

_ONE_BY_ONE = plgpu.Layout.TILED(
    plgpu.Tiling(((8,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(plgpu.Replicated(4), -2),
    vector_dim=-1,
)


def empty_sum(shape: Shape, weights: tuple[int, ...] = ()) -> Sum:
    """Returns the state before any key. `weights`: how many rows of weights are kept apart."""
    if shape.by_warps:
        one, wgmma = ((32, shape.columns), BY_WARP), plgpu.Layout.WGMMA
        total = ((*weights, shape.columns), wgmma) if weights else one
        kinds = [(one, MASKED), (total, 0.0), (((4 * shape.head_dim, shape.columns), wgmma), 0.0)]
        if weights and shape.v.by_factor and shape.v.format.zero_point:
            kinds.append((total, 0.0))
        return Sum(*(plgpu.layout_cast(jnp.full(size, x, jnp.float32), layout) for (size, layout), x in kinds))

    def full(value: float, rows: tuple[int, ...]) -> jax.Array:
        layout = plgpu.Layout.WGMMA if rows else plgpu.Layout.WGMMA.reduce(0)
        return plgpu.layout_cast(jnp.full((*rows, shape.columns), value, jnp.float32), layout)

    return Sum(full(MASKED, ()), full(0.0, weights), full(0.0, (shape.head_dim,)))


def sum_of_sinks(shape: Shape, item: Item, sinks_ref: Any) -> Sum:
    """Returns the sum of what a head's queries have as sinks [H], whose values are zero: by warps it is the first
    one's."""
    empty, layout = empty_sum(shape), BY_WARP if shape.by_warps else plgpu.Layout.WGMMA.reduce(0)
    iota = partial(plgpu.broadcasted_iota, jnp.int32, empty.top.shape, layout=layout)
    head = lax.rem(iota(empty.top.ndim - 1), jnp.int32(shape.heads))
    sinks = sinks_of(sinks_ref, first_query(shape, jnp.int32(0), item.head), head, shape.heads)
    top = lax.round(sinks, lax.RoundingMethod.TO_NEAREST_EVEN)
    total = jnp.exp2(sinks - top)
    if shape.by_warps:
        first = iota(0) < empty.top.shape[0] // 4
        top, total = jnp.where(first, top, MASKED), jnp.where(first, total, 0.0)
    return Sum(top, total, empty.acc)


def with_sinks(shape: Shape, item: Item, sinks: Sum | None, own: Sum) -> Sum:
    """Returns the sum of a split, after the head's sinks if the split is the first. So they are in one partial result,
    wherever the head is cut."""
    return own if sinks is None else lax.cond(item.first, lambda: add_sums(shape, sinks, own), lambda: own)


def add_sums(shape: Shape, a: Sum, b: Sum) -> Sum:
    """Adds both, their order kept: each factor is a power of two, so that only the addition rounds."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp2(a.top - top), jnp.exp2(b.top - top)
    acc = scaled(shape, a.acc, of_a) + scaled(shape, b.acc, of_b)
    return Sum(top, a.total * of_a + b.total * of_b, acc)


def scaled(shape: Shape, x: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies x [.., columns] by factor [columns], or by that of each warp [32, columns]."""
    if shape.by_warps:
        return x * spread(factor, x.shape[0] // 64)
    return x * lax.broadcast_in_dim(factor, x.shape, [1])


def store_result(shape: Shape, item: Item, total: Sum, out_ref: Any, out_s: Any, part_s: Any) -> None:
    """Writes the result of a head's queries."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for threads that still read the last sums
    first = first_query(shape, item.row, item.head)
    if shape.by_warps:
        result = _turned_back(shape, _of_warps(shape, total, part_s)).astype(out_s.dtype)
        store_rows(result, out_ref, first, shape.queries, shape.heads, shape.num_heads)
        return
    result = scaled(shape, total.acc, 1 / total.total)
    if shape.v.format.hadamard:  # whose dims are spread over warps here, and in each warp there
        part = part_s.at[:, pl.ds(0, shape.head_dim)]
        part.transpose((1, 0))[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        result = _turned_back(shape, plgpu.load(part, layout=BY_ROWS, optimized=False))
        out_s[...] = result.astype(out_s.dtype)
    else:
        result = result.astype(out_s.dtype)
        out_s.transpose((1, 0))[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    if shape.width == 1:
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, shape.queries)], out_ref.at[pl.ds(first, shape.queries)])
        return

    @pl.loop(0, shape.width)
    def _row(i: jax.Array) -> None:
        target = out_ref.at[pl.ds(first + i * shape.num_heads, shape.heads)]
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(i * shape.heads, shape.heads)], target)


def _turned_back(shape: Shape, x: jax.Array) -> jax.Array:
    """Rotates a result [columns, D] BY_ROWS back where V lies rotated."""
    return turn(x, BY_ROWS, shape.head_dim, lanes=16) if shape.v.format.hadamard else x


def store_partial(
    shape: Shape, warpgroup: jax.Array, part: jax.Array, total: Sum, part_ref: Any, part_s: Any, others: dict[str, Any]
) -> None:
    """Writes a split's sums to the slot of a partial result."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if shape.by_warps:
        store_sums(shape.v, total.acc, total.top, total.total, shape.queries, part_s)
        plgpu.commit_smem()
        for warp in range(4):
            sums = part_s.at[warp, pl.ds(0, shape.queries)]
            plgpu.copy_smem_to_gmem(sums, part_ref.at[warpgroup * 4 + warp, part])
        return
    transposed = plgpu.layout_cast(total.acc, plgpu.Layout.WGMMA_TRANSPOSED)
    part_s.at[:, pl.ds(0, shape.head_dim)].transpose((1, 0))[...] = transposed
    of_query = others["of_query"]
    for i, number in enumerate((total.top, total.total)):
        of_query[1 + i] = number
        part_s[:, shape.head_dim + i] = plgpu.load(of_query.at[1 + i], layout=_ONE_BY_ONE)  # pairs a thread: single
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(part_s.at[pl.ds(0, shape.queries)], part_ref.at[warpgroup, part])


def _of_warps(shape: Shape, total: Sum, part_s: Any) -> jax.Array:
    """Returns the result of a head [columns, D]: the sums of all warps together, in their order."""
    store_sums(shape.v, total.acc, total.top, total.total, shape.queries, part_s)
    wait_for_warps()
    parts = [part_s.at[i] for i in range(4)]

    def number(part: Any, i: int) -> jax.Array:
        return plgpu.load(part.at[:, shape.head_dim + i], layout=BY_ROWS.reduce(1), optimized=False)

    def wide(x: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (shape.columns, shape.head_dim), [0]), BY_ROWS)

    tops = [number(part, 0) for part in parts]
    factors = [jnp.exp2(top - reduce(jnp.maximum, tops)) for top in tops]
    weights = reduce(jnp.add, [number(part, 1) * factor for part, factor in zip(parts, factors)])
    accs = [plgpu.load(part.at[:, pl.ds(0, shape.head_dim)], layout=BY_ROWS, optimized=False) for part in parts]
    return reduce(jnp.add, [x * wide(factor) for x, factor in zip(accs, factors)]) * wide(1 / weights)
