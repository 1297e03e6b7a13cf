"""The warpgroup of decode_attention that computes: online softmax over the tiles of its work items."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import ROWS
from pallas_kernels.decode_attention.shape_sm90 import MASKED, Item, Shape, Sum, first_query, tile_range
from pallas_kernels.decode_attention.storage_sm90 import Storage

_ONE_BY_ONE = plgpu.Layout.TILED(
    plgpu.Tiling(((8,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(plgpu.Replicated(4), -2),
    vector_dim=-1,
)
_BY_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


def clear_unused(shape: Shape, worker: jax.Array, rows_ref: Any, lengths_ref: Any, out_ref: Any, out_s: Any) -> None:
    """Zeros in the rows of length 0, some by each worker."""
    out_s[...] = jnp.zeros(out_s.shape, out_s.dtype)
    plgpu.commit_smem()
    zeros = math.gcd(shape.num_heads, shape.queries)

    @pl.loop(worker, shape.rows, step=shape.config.workers)
    def _row(used: jax.Array) -> None:
        @pl.when(lengths_ref[used] == 0)
        def _clear() -> None:
            row = rows_ref[used]

            @pl.loop(0, shape.num_heads // zeros)
            def _some(i: jax.Array) -> None:
                rows = pl.ds(row * shape.num_heads + i * zeros, zeros)
                plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, zeros)], out_ref.at[rows])

    plgpu.wait_smem_to_gmem(0)


def empty_sum(shape: Shape, weights: tuple[int, ...] = ()) -> Sum:
    """Of no keys. `weights`: how many rows of weights are kept apart."""

    def full(value: float, rows: tuple[int, ...]) -> jax.Array:
        layout = plgpu.Layout.WGMMA if rows else plgpu.Layout.WGMMA.reduce(0)
        return plgpu.layout_cast(jnp.full((*rows, shape.columns), value, jnp.float32), layout)

    return Sum(full(MASKED, ()), full(0.0, weights), full(0.0, (shape.head_dim,)))


def _add(a: Sum, b: Sum) -> Sum:
    """The sum of both, their order kept: each factor is a power of two, so that only the addition rounds."""
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp2(a.top - top), jnp.exp2(b.top - top)
    return Sum(top, a.total * of_a + b.total * of_b, _scaled(a.acc, of_a) + _scaled(b.acc, of_b))


def _scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x [.., columns] times factor [columns]."""
    return x * lax.broadcast_in_dim(factor, x.shape, [1])


def compute_item(
    shape: Shape,
    warpgroup: jax.Array,
    out_ref: Any,
    part_ref: Any,
    item: Item,
    state: tuple[jax.Array, jax.Array, jax.Array, jax.Array, Sum],
    *,
    q_raw: Any,
    q_s: Any,
    p_s: Any,
    out_s: Any,
    part_s: Any,
    of_query: Any,
    reduced: Any,
    q_full: Any,
    q_free: Any,
    full: Any,
    free: Any,
    **others: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Sum]:
    """Online softmax over a warpgroup's share of an item's tiles, added to what came before; and the result, or a
    partial one, if that's all.

    state: tiles and heads so far, the slot of the next partial result, results so far, and the sum of the head's
    splits so far.
    """
    tile, columns = shape.config.tile, shape.columns
    tiles, heads, part, wholes, before = state
    q_s, p_s, part_s, of_query, reduced = (x.at[warpgroup] for x in (q_s, p_s, part_s, of_query, reduced))

    @pl.when(item.enters)
    def _queries() -> None:
        q_slot = lax.rem(heads, jnp.int32(2))
        plgpu.barrier_wait(q_full.at[q_slot])
        _stage_queries(q_raw.at[q_slot], q_s, of_query.at[0])
        plgpu.barrier_arrive(q_free.at[q_slot])

    heads = heads + item.enters.astype(jnp.int32)
    first_tile, end_tile = tile_range(shape, item)
    log2_scale: Any = shape.scale * math.log2(math.e)
    if q_s.dtype != q_raw.dtype:
        factors = plgpu.load(of_query.at[0], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False) * log2_scale
        log2_scale = lax.broadcast_in_dim(factors, (ROWS, columns), [1])

    def step(j: jax.Array, carry: Sum) -> Sum:
        slot = lax.rem(tiles + j - first_tile, jnp.int32(full.shape[0]))
        tokens = j * tile + warpgroup * ROWS  # the first of this warpgroup's
        plgpu.barrier_wait(full.at[slot])
        staged = partial(_staged, shape, item, tokens, (slot, warpgroup), others)
        k_tile = staged(shape.k, "k")
        if not (shape.k.direct or shape.k.in_registers):
            plgpu.commit_smem()

        def logits_of(ref: Any) -> tuple[jax.Array, jax.Array | None]:
            plgpu.wgmma(ref, k_tile, q_s.transpose((1, 0)))
            v = staged(shape.v, "v")  # meanwhile
            return ref[...], v if shape.v.in_registers else None

        logits, v = pl.run_scoped(logits_of, plgpu.ACC((ROWS, columns), jnp.float32))
        logits = logits * log2_scale
        token = plgpu.broadcasted_iota(jnp.int32, (ROWS, columns), 0, layout=plgpu.Layout.WGMMA) + tokens
        logits = jnp.where(jnp.logical_and(token >= item.low, token < item.high), logits, MASKED)
        top = lax.round(reduce_rows(logits, "max", reduced, shape), lax.RoundingMethod.TO_NEAREST_EVEN)
        top = jnp.maximum(carry.top, top)
        p = jnp.exp2(logits - lax.broadcast_in_dim(top, logits.shape, [1])).astype(p_s.dtype)
        p_s.transpose((1, 0))[...] = p
        if v is None:
            v_tile = others["v"].at[slot, warpgroup] if shape.v.direct else others["v_tile"].at[warpgroup]
            _zero_hidden(item, tokens, v_tile)
            v = v_tile.transpose((1, 0))
        plgpu.commit_smem()

        def values_of(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, v, p_s.transpose((1, 0)))
            return ref[...]

        summed = pl.run_scoped(values_of, plgpu.ACC((shape.head_dim, columns), jnp.float32))
        plgpu.barrier_arrive(free.at[slot])
        shrink = jnp.exp2(carry.top - top)
        weights = p.astype(jnp.float32)  # as they were multiplied: their rounding cancels
        return Sum(top, _scaled(carry.total, shrink) + weights, _scaled(carry.acc, shrink) + summed)

    own = lax.fori_loop(first_tile, end_tile, step, empty_sum(shape, (ROWS,)))
    own = Sum(own.top, reduce_rows(own.total, "add", reduced, shape), own.acc)
    alone = jnp.logical_or(item.first, jnp.logical_not(item.begun))
    before = jax.tree.map(lambda x, y: jnp.where(alone, x, y), empty_sum(shape), before)
    total = _add(before, own)
    whole = jnp.logical_and(item.last, item.begun)

    @pl.when(jnp.logical_and(whole, warpgroup == 0))
    def _whole() -> None:
        everything = total if shape.config.computing == 1 else _add(total, _receive(shape, **others))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        result = _scaled(everything.acc, 1 / everything.total)
        out_s.transpose((1, 0))[...] = plgpu.layout_cast(result.astype(out_s.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        queries = pl.ds(first_query(shape, item.row, item.head), shape.queries)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, shape.queries)], out_ref.at[queries])

    if shape.config.computing == 2:

        @pl.when(jnp.logical_and(whole, warpgroup == 1))
        def _help() -> None:
            _send(shape, total, wholes, **others)

    tiles, wholes = tiles + end_tile - first_tile, wholes + whole.astype(jnp.int32)
    if not shape.slots:
        return tiles, heads, part, wholes, total
    partly = jnp.logical_and(jnp.logical_or(item.end, jnp.logical_not(item.begun)), jnp.logical_not(whole))

    @pl.when(partly)
    def _part() -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        transposed = plgpu.layout_cast(total.acc, plgpu.Layout.WGMMA_TRANSPOSED)
        part_s.at[:, pl.ds(0, shape.head_dim)].transpose((1, 0))[...] = transposed
        for i, number in enumerate((total.top, total.total)):
            of_query[1 + i] = number
            part_s[:, shape.head_dim + i] = plgpu.load(of_query.at[1 + i], layout=_ONE_BY_ONE)  # pairs a thread: single
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(part_s.at[pl.ds(0, shape.queries)], part_ref.at[warpgroup, part])

    return tiles, heads, part + partly.astype(jnp.int32), wholes, total


def _send(
    shape: Shape, total: Sum, count: jax.Array, *, other_s: Any, other_full: Any, other_free: Any, **_: Any
) -> None:
    """What the second warpgroup has summed, to the first: the `count`-th time."""

    @pl.when(count > 0)
    def _wait() -> None:
        plgpu.barrier_wait(other_free)

    other_s[pl.ds(0, shape.head_dim)] = total.acc
    other_s[shape.head_dim] = total.top
    other_s[shape.head_dim + 1] = total.total
    plgpu.barrier_arrive(other_full)


def _receive(shape: Shape, *, other_s: Any, other_full: Any, other_free: Any, **_: Any) -> Sum:
    plgpu.barrier_wait(other_full)
    acc = plgpu.load(other_s.at[pl.ds(0, shape.head_dim)], layout=plgpu.Layout.WGMMA, optimized=False)
    top, total = (
        plgpu.load(other_s.at[shape.head_dim + i], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        for i in range(2)
    )
    plgpu.barrier_arrive(other_free)
    return Sum(top, total, acc)


def reduce_rows(x: jax.Array, op: str, scratch: Any, shape: Shape) -> jax.Array:
    """x [rows, columns] -> [columns], its sum ("add") or maximum, through a warpgroup's own scratch [256]: a reduction
    of Pallas would use the same for both."""
    if shape.k.interpreted:
        return x.sum(axis=0) if op == "add" else x.max(axis=0)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((shape.columns,), jnp.float32, layout=layout.reduce(0)),
    )
    def reduce(_: Any, x: Any, scratch: Any) -> Any:
        return x.reduce(op, 0, scratch)

    return reduce(x, scratch)


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
        kv_head = item.head if shape.chunks == 1 else item.head // shape.chunks
        scales = tiles_of[f"{name}_scales"].at[at]
        packed = None if stored.packed else tiles_of[f"{name}_packed"].at[at[1]]
        _, shift = stored.scale_slice(kv_head, lax.rem(tokens, jnp.int32(shape.page_size)))
    source = (tiles_of[name].at[at], scales, packed, shift)
    if stored.in_registers:
        return stored.read_k(*source) if name == "k" else stored.read_v(*source, tokens, item.low, item.high)
    target = tiles_of[f"{name}_tile"].at[at[1]]
    target[...] = stored.read(*source)
    return target


def _zero_hidden(item: Item, tokens: jax.Array, v_tile: Any) -> None:
    """Zeros in the values of masked tokens at a split's edges: they may hold anything, and 0 * NaN isn't 0."""

    @pl.when(jnp.logical_or(tokens < item.low, tokens + ROWS > item.high))
    def _edge() -> None:
        values = plgpu.load(v_tile, layout=plgpu.Layout.WGMMA, optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, v_tile.shape, 0, layout=plgpu.Layout.WGMMA) + tokens
        seen = jnp.logical_and(token >= item.low, token < item.high)
        v_tile[...] = jnp.where(seen, values, jnp.zeros_like(values))
