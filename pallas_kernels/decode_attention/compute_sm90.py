"""The warpgroups of decode_attention that compute: online softmax over the tiles of their work items."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.decode_attention import warps_sm90
from pallas_kernels.decode_attention.config import ROWS
from pallas_kernels.decode_attention.masks_sm90 import bounds_of, visible, without_unused
from pallas_kernels.decode_attention.shape_sm90 import MASKED, Item, Shape, Sum, first_query, kv_head_of, tile_range
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.warps_sm90 import BY_ROWS, BY_WARP, Queries
from pallas_kernels.hadamard_sm90 import turn

Seen = Callable[[jax.Array, jax.Array], jax.Array]  # tokens and their logits, to those that columns see
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
        kinds = [(one, MASKED), (total, 0.0), (((4 * shape.head_dim, shape.columns), wgmma), 0.0)]
        if weights and shape.v.by_factor and shape.v.format.zero_point:
            kinds.append((total, 0.0))
        return Sum(*(plgpu.layout_cast(jnp.full(size, x, jnp.float32), layout) for (size, layout), x in kinds))

    def full(value: float, rows: tuple[int, ...]) -> jax.Array:
        layout = plgpu.Layout.WGMMA if rows else plgpu.Layout.WGMMA.reduce(0)
        return plgpu.layout_cast(jnp.full((*rows, shape.columns), value, jnp.float32), layout)

    return Sum(full(MASKED, ()), full(0.0, weights), full(0.0, (shape.head_dim,)))


def no_queries(shape: Shape, dtype: DTypeLike) -> Queries | None:
    """What stands for a head's queries before the first."""
    return warps_sm90.no_queries(shape.k, shape.columns, dtype) if shape.by_warps else None


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
    part_s: Any,
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
    item = replace(item, head=item.head + warpgroup)
    part_s, out_s = part_s.at[warpgroup], out_s.at[warpgroup]
    others |= {name: others[name].at[warpgroup] for name in ("q_s", "p_s", "reduced", "of_query") if name in others}

    def enter() -> Queries | None:
        q_slot = lax.rem(heads, jnp.int32(2))
        plgpu.barrier_wait(q_full.at[q_slot])
        raw = q_raw.at[q_slot, warpgroup]
        if shape.by_warps:
            loaded = warps_sm90.load_queries(shape.k, raw)
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

    def step(j: jax.Array, carry: Sum) -> Sum:
        slot = lax.rem(tiles + j - first_tile, jnp.int32(full.shape[0]))
        plgpu.barrier_wait(full.at[slot])
        summed = attend(log2_scale, j * ROWS, (slot, warpgroup), carry, **others)
        plgpu.barrier_arrive(free.at[slot])
        return summed

    own = lax.fori_loop(first_tile, end_tile, step, empty_sum(shape, (ROWS,)))
    weights = (
        warps_sm90.reduce_warp(own.total, "add")
        if shape.by_warps
        else reduce_rows(own.total, "add", others["reduced"], shape)
    )
    acc = own.acc
    if own.zeros is not None:
        acc = acc + warps_sm90.spread(warps_sm90.reduce_warp(own.zeros, "add"), acc.shape[0] // 64)
    own = without_unused(shape, item, Sum(own.top, weights, acc))
    alone = jnp.logical_or(item.first, jnp.logical_not(item.begun))
    total = lax.cond(alone, lambda: own, lambda: _add(shape, before, own))
    whole = jnp.logical_and(item.last, item.begun)

    pl.when(whole)(lambda: _store_result(shape, item, total, out_ref, out_s, part_s))
    tiles = tiles + end_tile - first_tile
    if not shape.slots:
        return tiles, heads, part, total, queries
    partly = jnp.logical_and(jnp.logical_or(item.end, jnp.logical_not(item.begun)), jnp.logical_not(whole))
    pl.when(partly)(lambda: _store_partial(shape, warpgroup, part, total, part_ref, part_s, others))
    return tiles, heads, part + partly.astype(jnp.int32), total, queries


def _store_result(shape: Shape, item: Item, total: Sum, out_ref: Any, out_s: Any, part_s: Any) -> None:
    """Writes the result of a head's queries."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # and for threads that still read the last sums
    first = first_query(shape, item.row, item.head)
    if shape.by_warps:
        result = _turned_back(shape, _of_warps(shape, total, part_s)).astype(out_s.dtype)
        warps_sm90.store_rows(result, out_ref, first, shape.queries, shape.heads, shape.num_heads)
        return
    result = _scaled(shape, total.acc, 1 / total.total)
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
    """A result [columns, D] BY_ROWS, rotated back where V lies rotated."""
    return turn(x, BY_ROWS, shape.head_dim, lanes=16) if shape.v.format.hadamard else x


def _store_partial(
    shape: Shape, warpgroup: jax.Array, part: jax.Array, total: Sum, part_ref: Any, part_s: Any, others: dict[str, Any]
) -> None:
    """Writes a split's sums to the slot of a partial result."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if shape.by_warps:
        warps_sm90.store_sums(shape.v, total.acc, total.top, total.total, shape.queries, part_s)
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


def _log2_scale(shape: Shape, queries: Queries | None, dtype: DTypeLike, others: dict[str, Any]) -> Any:
    """What logits are multiplied by, for weights as powers of two: a number, or by query [ROWS, columns]."""
    scale = shape.scale * math.log2(math.e)
    if queries is not None:
        return scale if queries[1] is None else warps_sm90.spread(queries[1] * scale, 1)
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


def _by_warps(
    shape: Shape, item: Item, seen: Seen, queries: Queries, log2_scale: Any, tokens: jax.Array,
    at: tuple[jax.Array, jax.Array], carry: Sum, **others: Any,
) -> Sum:  # fmt: skip
    """The same, each warp with 16 of the tokens."""
    operands, zero = [], jnp.minimum(item.high, 0)
    for name, stored, load in (("k", shape.k, warps_sm90.load_k), ("v", shape.v, warps_sm90.load_v)):
        scales = others[f"{name}_scales"].at[at] if stored.groups else None
        operands.append(load(stored, others[name].at[at], scales))
    k, v = operands
    logits = seen(tokens, warps_sm90.dot_k(shape.k, k, zero, queries[0], queries[2]) * log2_scale)
    bounds = item.low - tokens, item.high - tokens
    values = warps_sm90.convert_v(shape.v, v, zero, bounds)  # while the softmax waits for its own results
    top = lax.round(warps_sm90.reduce_warp(logits, "max"), lax.RoundingMethod.TO_NEAREST_EVEN)
    if shape.v.by_factor:  # weights up to 2^6.5 keep what float16 has of them times small scales
        top = top - 6
    top = jnp.maximum(carry.top, top)
    p = jnp.exp2(logits - warps_sm90.spread(top, 1)).astype(jnp.float16)
    shrink = jnp.exp2(carry.top - top)
    acc = warps_sm90.dot_v(values, warps_sm90.weighted(shape.v, v, bounds, p), carry.acc, shrink)
    zeros = carry.zeros
    if zeros is not None:
        zeros = _scaled(shape, zeros, shrink) + warps_sm90.zeros_of(shape.v, v, bounds, p)
    return Sum(top, _scaled(shape, carry.total, shrink) + p.astype(jnp.float32), acc, zeros)


def _of_warps(shape: Shape, total: Sum, part_s: Any) -> jax.Array:
    """The result of a head [columns, D]: the sums of all warps together, in their order."""
    warps_sm90.store_sums(shape.v, total.acc, total.top, total.total, shape.queries, part_s)
    warps_sm90.wait_for_warps()
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


def _stage_queries(shape: Shape, raw: Any, q_s: Any, q_top: Any) -> None:
    """Moves the queries to where wgmma reads them, rotated where K is, in its dtype: to fit float16's range, as
    fractions of their largest element, which q_top receives. Rows past the real ones hold anything: their columns are
    dropped."""
    queries = plgpu.load(raw, layout=BY_ROWS, optimized=False)
    exact = queries.astype(jnp.float32)
    if shape.k.format.hadamard:
        exact = turn(exact, BY_ROWS, shape.head_dim, lanes=16)
        queries = exact.astype(q_s.dtype)
    if q_s.dtype != raw.dtype:
        top = jnp.maximum(jnp.maximum(exact, -exact).max(axis=1), float(jnp.finfo(jnp.float32).tiny))
        q_top[...] = top
        spread = plgpu.layout_cast(lax.broadcast_in_dim(top, exact.shape, [0]), BY_ROWS)
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
