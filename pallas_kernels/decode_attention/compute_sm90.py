"""Computes decode_attention in its warpgroups: online softmax over the tiles of their work items."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.decode_attention import warp_queries_sm90, warps_sm90
from pallas_kernels.decode_attention.config import ROWS
from pallas_kernels.decode_attention.masks_sm90 import bounds_of, visible, without_unused
from pallas_kernels.decode_attention.shape_sm90 import Item, Shape, Sum, kv_head_of, tile_range
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.sums_sm90 import (
    add_sums,
    empty_sum,
    scaled,
    store_partial,
    store_result,
    sum_of_sinks,
    with_sinks,
)
from pallas_kernels.decode_attention.warp_layouts_sm90 import reduce_warp, spread
from pallas_kernels.decode_attention.warp_queries_sm90 import Queries
from pallas_kernels.decode_attention.warp_stores_sm90 import BY_ROWS
from pallas_kernels.hopper.hadamard_sm90 import turn
from pallas_kernels.hopper.logits_sm90 import LOG2_E, capped

Seen = Callable[[jax.Array, jax.Array], jax.Array]  # tokens and their logits, to those that columns see


def clear_unused(shape: Shape, worker: jax.Array, rows_ref: Any, lengths_ref: Any, out_ref: Any, out_s: Any) -> None:
    """Zeroes the rows of length 0, some by each worker."""
    out_s[...] = jnp.zeros(out_s.shape, out_s.dtype)
    plgpu.commit_smem()
    queries = shape.num_heads * shape.width
    zeros = math.gcd(queries, shape.queries)

    @pl.loop(worker, shape.rows, step=shape.config.workers)
    def _row(used: jax.Array) -> None:
        @pl.when(lengths_ref[used] == 0)
        def _clear() -> None:
            row = rows_ref[used]

            @pl.loop(0, queries // zeros)
            def _some(i: jax.Array) -> None:
                rows = pl.ds(row * queries + i * zeros, zeros)
                plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, zeros)], out_ref.at[rows])

    plgpu.wait_smem_to_gmem(0)


def no_queries(shape: Shape, dtype: DTypeLike) -> Queries | None:
    """Returns what stands for a head's queries before the first."""
    return warp_queries_sm90.no_queries(shape.k, shape.columns, dtype) if shape.by_warps else None


def compute_item(
    shape: Shape,
    warpgroup: jax.Array,
    out_ref: Any,
    part_ref: Any,
    trees_ref: Any,
    sinks_ref: Any,
    item: Item,
    state: tuple[jax.Array, jax.Array, jax.Array, Sum, Queries | None],
    *,
    q_raw: Any,
    out_s: Any,
    part_s: Any,
    q_full: Any,
    q_free: Any,
    full: Any,
    free: Any,
    **others: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, Sum, Queries | None]:
    """Runs online softmax over an item's tiles, of a warpgroup's head, added to what came before. Stores the result, or
    a partial one, if that's all. `state` has tiles and heads so far, and the slot of the next partial result. It has
    the sum of the head's splits so far and, by warps, its queries in registers."""
    tiles, heads, part, before, queries = state
    item = replace(item, head=item.head + warpgroup)
    part_s, out_s = part_s.at[warpgroup], out_s.at[warpgroup]
    others |= {name: others[name].at[warpgroup] for name in ("q_s", "p_s", "reduced", "of_query") if name in others}

    def enter() -> Queries | None:
        q_slot = lax.rem(heads, jnp.int32(2))
        plgpu.barrier_wait(q_full.at[q_slot])
        raw = q_raw.at[q_slot, warpgroup]
        if shape.by_warps:
            loaded = warp_queries_sm90.load_queries(shape.k, raw)
        else:
            loaded = None
            _stage_queries(shape, raw, others["q_s"], others["of_query"].at[0])
        plgpu.barrier_arrive(q_free.at[q_slot])
        return loaded

    queries = lax.cond(item.enters, enter, lambda: queries)
    heads = heads + item.enters.astype(jnp.int32)
    first_tile, end_tile = tile_range(item)
    seen = partial(visible, shape, item, bounds_of(shape, item, trees_ref), trees_ref)
    attend = partial(_by_warpgroup, shape, item, seen)
    if shape.by_warps:
        attend = partial(_by_warps, shape, item, seen, queries)
    log2_scale = _log2_scale(shape, queries, q_raw.dtype, others)
    sinks = None if sinks_ref is None else sum_of_sinks(shape, item, sinks_ref)  # long before they are waited for

    def step(j: jax.Array, carry: Sum) -> Sum:
        slot = lax.rem(tiles + j - first_tile, jnp.int32(full.shape[0]))
        plgpu.barrier_wait(full.at[slot])
        summed = attend(log2_scale, j * ROWS, (slot, warpgroup), carry, **others)
        plgpu.barrier_arrive(free.at[slot])
        return summed

    own = lax.fori_loop(first_tile, end_tile, step, empty_sum(shape, (ROWS,)))
    weights = (
        reduce_warp(own.total, "add") if shape.by_warps else reduce_rows(own.total, "add", others["reduced"], shape)
    )
    acc = own.acc
    if own.zeros is not None:
        acc = acc + spread(reduce_warp(own.zeros, "add"), acc.shape[0] // 64)
    own = with_sinks(shape, item, sinks, without_unused(shape, item, Sum(own.top, weights, acc)))
    alone = jnp.logical_or(item.first, jnp.logical_not(item.begun))
    total = lax.cond(alone, lambda: own, lambda: add_sums(shape, before, own))
    whole = jnp.logical_and(item.last, item.begun)

    pl.when(whole)(lambda: store_result(shape, item, total, out_ref, out_s, part_s))
    tiles = tiles + end_tile - first_tile
    if not shape.slots:
        return tiles, heads, part, total, queries
    partly = jnp.logical_and(jnp.logical_or(item.end, jnp.logical_not(item.begun)), jnp.logical_not(whole))
    pl.when(partly)(lambda: store_partial(shape, warpgroup, part, total, part_ref, part_s, others))
    return tiles, heads, part + partly.astype(jnp.int32), total, queries


def _log2_scale(shape: Shape, queries: Queries | None, dtype: DTypeLike, others: dict[str, Any]) -> Any:
    """Returns what logits are multiplied by, for weights as powers of two: a number, or by query [ROWS, columns]."""
    scale = shape.scale * LOG2_E
    if queries is not None:
        return scale if queries[1] is None else spread(queries[1] * scale, 1)
    if others["q_s"].dtype == dtype:
        return scale
    factors = plgpu.load(others["of_query"].at[0], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False) * scale
    return lax.broadcast_in_dim(factors, (ROWS, shape.columns), [1])


def _by_warpgroup(
    shape: Shape, item: Item, seen: Seen, log2_scale: Any, tokens: jax.Array, at: tuple[jax.Array, jax.Array],
    carry: Sum, *, q_s: Any, p_s: Any, reduced: Any, **others: Any,
) -> Sum:  # fmt: skip
    """Adds the 64 tokens from `tokens` on to `carry`; a warpgroup finds them in slot at[0]."""
    staged = partial(_staged, shape, item, tokens, at, others)
    k_tile = staged(shape.k, "k")
    if not (shape.k.direct or shape.k.in_registers):
        plgpu.commit_smem()

    def logits_of(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, k_tile, q_s.transpose((1, 0)))
        staged(shape.v, "v")  # meanwhile
        return ref[...]

    logits = pl.run_scoped(logits_of, plgpu.ACC((ROWS, shape.columns), jnp.float32))
    logits = seen(tokens, capped(logits * log2_scale, shape.softcap))
    top = lax.round(reduce_rows(logits, "max", reduced, shape), lax.RoundingMethod.TO_NEAREST_EVEN)
    top = jnp.maximum(carry.top, top)
    p = jnp.exp2(logits - lax.broadcast_in_dim(top, logits.shape, [1])).astype(p_s.dtype)
    p_s.transpose((1, 0))[...] = p
    v_tile = others["v"].at[at] if shape.v.direct else others["v_tile"].at[at[1]]
    _zero_hidden(item, tokens, v_tile)
    plgpu.commit_smem()

    def values_of(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, v_tile.transpose((1, 0)), p_s.transpose((1, 0)))
        return ref[...]

    summed = pl.run_scoped(values_of, plgpu.ACC((shape.head_dim, shape.columns), jnp.float32))
    shrink = jnp.exp2(carry.top - top)
    weights = p.astype(jnp.float32)  # as they were multiplied: their rounding cancels
    return Sum(top, scaled(shape, carry.total, shrink) + weights, scaled(shape, carry.acc, shrink) + summed)


def _by_warps(
    shape: Shape, item: Item, seen: Seen, queries: Queries, log2_scale: Any, tokens: jax.Array,
    at: tuple[jax.Array, jax.Array], carry: Sum, **others: Any,
) -> Sum:  # fmt: skip
    """Adds the 64 tokens from `tokens` on to `carry`, each warp 16 of them."""
    operands, zero = [], jnp.minimum(item.high, 0)
    for name, stored, load in (("k", shape.k, warps_sm90.load_k), ("v", shape.v, warps_sm90.load_v)):
        scales = others[f"{name}_scales"].at[at] if stored.groups else None
        operands.append(load(stored, others[name].at[at], scales))
    k, v = operands
    logits = warps_sm90.dot_k(shape.k, k, zero, queries[0], queries[2]) * log2_scale
    logits = seen(tokens, capped(logits, shape.softcap))
    bounds = item.low - tokens, item.high - tokens
    values = warps_sm90.convert_v(shape.v, v, zero, bounds)  # while the softmax waits for its own results
    top = lax.round(reduce_warp(logits, "max"), lax.RoundingMethod.TO_NEAREST_EVEN)
    if shape.v.by_factor:  # weights up to 2^6.5 keep what float16 has of them times small scales
        top = top - 6
    top = jnp.maximum(carry.top, top)
    p = jnp.exp2(logits - spread(top, 1)).astype(jnp.float16)
    shrink = jnp.exp2(carry.top - top)
    acc = warps_sm90.dot_v(values, warps_sm90.weighted(shape.v, v, bounds, p), carry.acc, shrink)
    zeros = carry.zeros
    if zeros is not None:
        zeros = scaled(shape, zeros, shrink) + warps_sm90.zeros_of(shape.v, v, bounds, p)
    return Sum(top, scaled(shape, carry.total, shrink) + p.astype(jnp.float32), acc, zeros)


def reduce_rows(x: jax.Array, op: str, scratch: Any, shape: Shape) -> jax.Array:
    """Returns the sum ("add") or maximum of x [rows, columns]: [columns]. It goes through a warpgroup's own scratch
    [256]. A reduction of Pallas would use the same scratch for both."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((shape.columns,), jnp.float32, layout=layout.reduce(0)),
    )
    def reduced(_: Any, x: Any, scratch: Any) -> Any:
        return x.reduce(op, 0, scratch)

    return reduced(x, scratch)


def _stage_queries(shape: Shape, raw: Any, q_s: Any, q_top: Any) -> None:
    """Moves the queries to where wgmma reads them, in its dtype, and rotated where K is. To fit float16's range they
    are fractions of their largest element, which q_top receives. Rows past the real ones hold anything: their columns
    are dropped."""
    queries = plgpu.load(raw, layout=BY_ROWS, optimized=False)
    exact = queries.astype(jnp.float32)
    if shape.k.format.hadamard:
        exact = turn(exact, BY_ROWS, shape.head_dim, lanes=16)
        queries = exact.astype(q_s.dtype)
    if q_s.dtype != raw.dtype:
        top = jnp.maximum(jnp.maximum(exact, -exact).max(axis=1), float(jnp.finfo(jnp.float32).tiny))
        q_top[...] = top
        of_rows = plgpu.layout_cast(lax.broadcast_in_dim(top, exact.shape, [0]), BY_ROWS)
        queries = (exact / of_rows).astype(q_s.dtype)
    q_s[...] = queries
    plgpu.commit_smem()


def _staged(
    shape: Shape, item: Item, tokens: jax.Array, at: tuple[jax.Array, jax.Array], tiles_of: dict[str, Any],
    stored: Storage, name: str,
) -> Any:  # fmt: skip
    """Returns where the product finds its rows of K or V, from token `tokens` on. That is where they were copied to
    (slot, warpgroup), or converted from there; or these rows in registers."""
    if stored.direct:
        return tiles_of[name].at[at]
    scales = packed = None
    shift = jnp.int32(0)
    if stored.groups:
        scales = tiles_of[f"{name}_scales"].at[at]
        packed = None if stored.packed else tiles_of[f"{name}_packed"].at[at[1]]
        shift = _scale_shift(shape, item, tokens, stored)
    source = (tiles_of[name].at[at], scales, packed, shift)
    if stored.in_registers:
        return stored.read_k(*source)
    target = tiles_of[f"{name}_tile"].at[at[1]]
    target[...] = stored.read(*source)
    return target


def _scale_shift(shape: Shape, item: Item, tokens: jax.Array, stored: Storage) -> jax.Array:
    """Returns where a tile's own scales are in each copy."""
    return stored.scale_slice(kv_head_of(shape, item.head), lax.rem(tokens, jnp.int32(shape.page_size)))[1]


def _zero_hidden(item: Item, tokens: jax.Array, v_tile: Any) -> None:
    """Zeroes the values of masked tokens at a split's edges: they may hold anything, and 0 * NaN isn't 0."""

    @pl.when(jnp.logical_or(tokens < item.low, tokens + ROWS > item.high))
    def _edge() -> None:
        values = plgpu.load(v_tile, layout=plgpu.Layout.WGMMA, optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, v_tile.shape, 0, layout=plgpu.Layout.WGMMA) + tokens
        seen = jnp.logical_and(token >= item.low, token < item.high)
        v_tile[...] = jnp.where(seen, values, jnp.zeros_like(values))
