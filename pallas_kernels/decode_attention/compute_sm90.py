"""The warpgroups of decode_attention that compute: online softmax over the tiles of their work items."""

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

from pallas_kernels.decode_attention import warp_results_sm90, warps_sm90
from pallas_kernels.decode_attention.config import ROWS
from pallas_kernels.decode_attention.masks_sm90 import bounds_of, visible, without_unused
from pallas_kernels.decode_attention.shape_sm90 import MASKED, Item, Shape, Sum, first_query, kv_head_of, tile_range
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.warps_sm90 import BY_WARP, Queries

Seen = Callable[[jax.Array, jax.Array], jax.Array]  # tokens and their logits, to those that columns see
_BY_ROWS = plgpu.Layout.TILED(  # each warp has all of some rows
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_ONE_BY_ONE = plgpu.Layout.TILED(
    plgpu.Tiling(((8,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(plgpu.Replicated(4), -2),
    vector_dim=-1,
)


def clear_unused(shape: Shape, worker: jax.Array, rows_ref: Any, lengths_ref: Any, out_ref: Any, out_s: Any) -> None:
    """Zeros in the rows of length 0, some by each worker."""
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


def empty_sum(shape: Shape, weights: tuple[int, ...] = ()) -> Sum:
    """The state before any key. `weights`: how many rows of weights are kept apart."""
    if shape.by_warps:
        one, wgmma = ((32, shape.columns), BY_WARP), plgpu.Layout.WGMMA
        total = ((*weights, shape.columns), wgmma) if weights else one
        kinds = ((one, MASKED), (total, 0.0), (((4 * shape.head_dim, shape.columns), wgmma), 0.0))
        return Sum(*(plgpu.layout_cast(jnp.full(size, x, jnp.float32), layout) for (size, layout), x in kinds))

    def full(value: float, rows: tuple[int, ...]) -> jax.Array:
        layout = plgpu.Layout.WGMMA if rows else plgpu.Layout.WGMMA.reduce(0)
        return plgpu.layout_cast(jnp.full((*rows, shape.columns), value, jnp.float32), layout)

    return Sum(full(MASKED, ()), full(0.0, weights), full(0.0, (shape.head_dim,)))


def no_queries(shape: Shape) -> Queries | None:
    """What stands for a head's queries before the first."""
    return warps_sm90.no_queries(shape.k, shape.columns) if shape.by_warps else None


def _add(shape: Shape, a: Sum, b: Sum) -> Sum:
    """The sum of both, their order kept: each factor is a power of two, so that only the addition rounds."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp2(a.top - top), jnp.exp2(b.top - top)
    acc = _scaled(shape, a.acc, of_a) + _scaled(shape, b.acc, of_b)
    return Sum(top, a.total * of_a + b.total * of_b, acc)


def _scaled(shape: Shape, x: jax.Array, factor: jax.Array) -> jax.Array:
    """x [.., columns] times factor [columns], or of each warp [32, columns]."""
    if shape.by_warps:
        return x * warps_sm90.spread(factor, x.shape[0] // 64)
    return x * lax.broadcast_in_dim(factor, x.shape, [1])


def compute_item(
    shape: Shape,
    warpgroup: jax.Array,
    out_ref: Any,
    part_ref: Any,
    trees_ref: Any,
    item: Item,
    state: tuple[jax.Array, jax.Array, jax.Array, Sum, Queries | None],
    *,
    q_raw: Any,
    out_s: Any,
    q_full: Any,
    q_free: Any,
    full: Any,
    free: Any,
    **others: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, Sum, Queries | None]:
    """Online softmax over an item's tiles, of a warpgroup's head, added to what came before; and the result, or a
    partial one, if that's all.

    state: tiles and heads so far, the slot of the next partial result, the sum of the head's splits so far and, by
    warps, its queries in registers.
    """
    tiles, heads, part, before, queries = state
    item = replace(item, head=item.head + warpgroup * shape.of_warpgroup)
    own = ("q_s", "p_s", "reduced", "of_query", "part_s")
    others |= {name: others[name].at[warpgroup] for name in own if name in others}

    def enter() -> Queries | None:
        q_slot = lax.rem(heads, jnp.int32(2))
        plgpu.barrier_wait(q_full.at[q_slot])
        raw = q_raw.at[q_slot, warpgroup]
        if shape.by_warps:
            loaded = warps_sm90.load_queries(shape.k, raw, shape.columns)
        else:
            loaded = None
            _stage_queries(raw, others["q_s"], others["of_query"].at[0])
        plgpu.barrier_arrive(q_free.at[q_slot])
        return loaded

    queries = lax.cond(item.enters, enter, lambda: queries)
    heads = heads + item.enters.astype(jnp.int32)
    first_tile, end_tile = tile_range(shape, item)
    seen = partial(visible, shape, item, bounds_of(shape, item, trees_ref), trees_ref)
    log2_scale = _log2_scale(shape, queries, q_raw.dtype, others)

    def ready(j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where a tile is, once it is there."""
        plgpu.barrier_wait(full.at[slot_of(j)])
        return slot_of(j), warpgroup

    def slot_of(j: jax.Array) -> jax.Array:
        return lax.rem(tiles + j - first_tile, jnp.int32(full.shape[0]))

    def step(j: jax.Array, summed: Sum) -> Sum:
        summed = _by_warpgroup(shape, item, seen, log2_scale, j * shape.tile, ready(j), summed, **others)
        plgpu.barrier_arrive(free.at[slot_of(j)])
        return summed

    def logits_of(j: jax.Array) -> jax.Array:
        return seen(j * shape.tile, _logits_by_warps(shape, item, queries, ready(j), others) * log2_scale)

    def weigh(j: jax.Array, logits: jax.Array, summed: Sum) -> Sum:
        summed = _by_warps(shape, item, logits, j * shape.tile, (slot_of(j), warpgroup), summed, others)
        plgpu.barrier_arrive(free.at[slot_of(j)])
        return summed

    def step_by_warps(j: jax.Array, carry: tuple[jax.Array, Sum]) -> tuple[jax.Array, Sum]:
        return logits_of(j + 1), weigh(j, *carry)  # a warp has no other to fill the waits of one with

    this = empty_sum(shape, (ROWS,))
    if shape.by_warps:
        last = lax.fori_loop(first_tile, end_tile - 1, step_by_warps, (logits_of(first_tile), this))
        this = weigh(end_tile - 1, *last)
        weights = warps_sm90.reduce_warp(this.total, "add")
    else:
        this = lax.fori_loop(first_tile, end_tile, step, this)
        weights = reduce_rows(this.total, "add", others["reduced"], shape)
    this = without_unused(shape, item, Sum(this.top, weights, this.acc))
    alone = jnp.logical_or(item.first, jnp.logical_not(item.begun))
    total = lax.cond(alone, lambda: this, lambda: _add(shape, before, this))
    whole = jnp.logical_and(item.last, item.begun)

    pl.when(whole)(lambda: _store_result(shape, item, total, out_ref, out_s.at[warpgroup]))
    tiles = tiles + end_tile - first_tile
    if not shape.slots:
        return tiles, heads, part, total, queries
    partly = jnp.logical_and(jnp.logical_or(item.end, jnp.logical_not(item.begun)), jnp.logical_not(whole))
    pl.when(partly)(lambda: _store_partial(shape, warpgroup, part, total, part_ref, others))
    return tiles, heads, part + partly.astype(jnp.int32), total, queries


def _store_result(shape: Shape, item: Item, total: Sum, out_ref: Any, out_s: Any) -> None:
    """Writes the result of a head's queries."""
    if shape.by_warps:
        firsts = [first_query(shape, item.row, item.head + i) for i in range(shape.of_warpgroup)]
        rows = warp_results_sm90.Rows(shape.queries, shape.heads, shape.num_heads)
        there = shape.every_head - item.head
        warp_results_sm90.store_results(shape.v, total.acc, 1 / total.total, out_ref, firsts, there, rows)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    first = first_query(shape, item.row, item.head)
    result = _scaled(shape, total.acc, 1 / total.total).astype(out_s.dtype)
    out_s.transpose((1, 0))[...] = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    if shape.width == 1:
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, shape.queries)], out_ref.at[pl.ds(first, shape.queries)])
        return

    @pl.loop(0, shape.width)
    def _row(i: jax.Array) -> None:
        target = out_ref.at[pl.ds(first + i * shape.num_heads, shape.heads)]
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(i * shape.heads, shape.heads)], target)


def _store_partial(
    shape: Shape, warpgroup: jax.Array, part: jax.Array, total: Sum, part_ref: Any, others: dict[str, Any]
) -> None:
    """Writes a split's sums to the slot of a partial result."""
    if shape.by_warps:
        warp_results_sm90.store_sums(shape.v, total.acc, total.top, total.total, part_ref, warpgroup, part)
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    part_s = others["part_s"]
    transposed = plgpu.layout_cast(total.acc, plgpu.Layout.WGMMA_TRANSPOSED)
    part_s.at[:, pl.ds(0, shape.head_dim)].transpose((1, 0))[...] = transposed
    of_query = others["of_query"]
    for i, number in enumerate((total.top, total.total)):
        of_query[1 + i] = number
        part_s[:, shape.head_dim + i] = plgpu.load(of_query.at[1 + i], layout=_ONE_BY_ONE)  # pairs a thread: single
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(part_s.at[pl.ds(0, shape.queries)], part_ref.at[warpgroup, part])


def _log2_scale(shape: Shape, queries: Queries | None, dtype: DTypeLike, others: dict[str, Any]) -> Any:
    """What logits are multiplied by, for weights as powers of two: a number, or by query [ROWS, columns]."""
    scale = shape.scale * math.log2(math.e)
    if queries is not None:
        return warps_sm90.spread(queries.factors * (scale * shape.k.unit), 1)
    if others["q_s"].dtype == dtype:
        return scale
    factors = plgpu.load(others["of_query"].at[0], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False) * scale
    return lax.broadcast_in_dim(factors, (ROWS, shape.columns), [1])


def _by_warpgroup(
    shape: Shape, item: Item, seen: Seen, log2_scale: Any, tokens: jax.Array, at: tuple[jax.Array, jax.Array],
    carry: Sum, *, q_s: Any, p_s: Any, reduced: Any, **others: Any,
) -> Sum:  # fmt: skip
    """`carry` and the 64 tokens from `tokens` on, which a warpgroup finds in slot at[0]."""
    staged = partial(_staged, shape, item, tokens, at, others)
    k_tile = staged(shape.k, "k")
    if not (shape.k.direct or shape.k.in_registers):
        plgpu.commit_smem()

    def logits_of(ref: Any) -> jax.Array:
        plgpu.wgmma(ref, k_tile, q_s.transpose((1, 0)))
        staged(shape.v, "v")  # meanwhile
        return ref[...]

    logits = pl.run_scoped(logits_of, plgpu.ACC((ROWS, shape.columns), jnp.float32))
    logits = seen(tokens, logits * log2_scale)
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
    return Sum(top, _scaled(shape, carry.total, shrink) + weights, _scaled(shape, carry.acc, shrink) + summed)


def _logits_by_warps(
    shape: Shape, item: Item, queries: Queries, at: tuple[jax.Array, jax.Array], others: dict[str, Any]
) -> jax.Array:
    """K Q^T [ROWS, columns] of the tokens in slot at[0], 16 of each warp's head."""
    k = warps_sm90.load_k(shape.k, others["k"].at[at], others["k_scales"].at[at] if shape.k.groups else None)
    return warps_sm90.dot_k(shape.k, k, jnp.minimum(item.high, 0), queries)


def _by_warps(
    shape: Shape, item: Item, logits: jax.Array, tokens: jax.Array, at: tuple[jax.Array, jax.Array], carry: Sum,
    others: dict[str, Any],
) -> Sum:  # fmt: skip
    """`carry` and these tokens, of which `logits` are."""
    v = warps_sm90.load_v(shape.v, others["v"].at[at], others["v_scales"].at[at] if shape.v.groups else None)
    zero = jnp.minimum(item.high, 0)
    bounds = item.low - tokens, item.high - tokens
    values = warps_sm90.convert_v(shape.v, v, zero, bounds)  # while the softmax waits for its own results
    top = lax.round(warps_sm90.reduce_warp(logits, "max"), lax.RoundingMethod.TO_NEAREST_EVEN)
    if shape.v.by_group:  # weights up to 2^3.5 or 2^6.5 keep what float16 has of them times small scales
        top = top - (3 if shape.v.format.dtype == "int4" else 6)
    top = jnp.maximum(carry.top, top)
    p = jnp.exp2(logits - warps_sm90.spread(top, 1)).astype(jnp.float16)
    shrink = jnp.exp2(carry.top - top)
    acc = warps_sm90.dot_v(shape.v, values, v[1], bounds, p, carry.acc, shrink)
    return Sum(top, _scaled(shape, carry.total, shrink) + p.astype(jnp.float32), acc)


def reduce_rows(x: jax.Array, op: str, scratch: Any, shape: Shape) -> jax.Array:
    """x [rows, columns] -> [columns], its sum ("add") or maximum, through a warpgroup's own scratch [256]: a reduction
    of Pallas would use the same for both."""
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((shape.columns,), jnp.float32, layout=layout.reduce(0)),
    )
    def reduced(_: Any, x: Any, scratch: Any) -> Any:
        return x.reduce(op, 0, scratch)

    return reduced(x, scratch)


def _stage_queries(raw: Any, q_s: Any, q_top: Any) -> None:
    """Moves the queries to where wgmma reads them, in its dtype: to fit float16's range, as fractions of their largest
    element, which q_top receives. Rows past the real ones hold anything: their columns are dropped."""
    queries = plgpu.load(raw, layout=_BY_ROWS, optimized=False)
    if q_s.dtype != raw.dtype:
        exact = queries.astype(jnp.float32)
        top = jnp.maximum(jnp.maximum(exact, -exact).max(axis=1), float(jnp.finfo(jnp.float32).tiny))
        q_top[...] = top
        spread = plgpu.layout_cast(lax.broadcast_in_dim(top, exact.shape, [0]), _BY_ROWS)
        queries = (exact / spread).astype(q_s.dtype)
    q_s[...] = queries
    plgpu.commit_smem()


def _staged(
    shape: Shape, item: Item, tokens: jax.Array, at: tuple[jax.Array, jax.Array], tiles_of: dict[str, Any],
    stored: Storage, name: str,
) -> Any:  # fmt: skip
    """Where the product finds its rows of K or V, from token `tokens` on: where they were copied to (slot, warpgroup),
    or converted from there; or these rows in registers."""
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
    """Where a tile's own scales are in each copy."""
    return stored.scale_slice(kv_head_of(shape, item.head), lax.rem(tokens, jnp.int32(shape.page_size)))[1]


def _zero_hidden(item: Item, tokens: jax.Array, v_tile: Any) -> None:
    """Zeros in the values of masked tokens at a split's edges: they may hold anything, and 0 * NaN isn't 0."""

    @pl.when(jnp.logical_or(tokens < item.low, tokens + ROWS > item.high))
    def _edge() -> None:
        values = plgpu.load(v_tile, layout=plgpu.Layout.WGMMA, optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, v_tile.shape, 0, layout=plgpu.Layout.WGMMA) + tokens
        seen = jnp.logical_and(token >= item.low, token < item.high)
        v_tile[...] = jnp.where(seen, values, jnp.zeros_like(values))
