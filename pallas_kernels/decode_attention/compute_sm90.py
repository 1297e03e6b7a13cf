"""The warpgroup of decode_attention that computes: online softmax over the tiles of its work items."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.shape_sm90 import MASKED, Item, Shape, first_query, tile_range
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


def clear_unused(shape: Shape, worker: jax.Array, lengths_ref: Any, out_ref: Any, out_s: Any) -> None:
    """Zeros in the rows of length 0, some by each worker."""
    out_s[...] = jnp.zeros(out_s.shape, out_s.dtype)
    plgpu.commit_smem()
    zeros = math.gcd(shape.num_heads, shape.queries)

    @pl.loop(worker, shape.rows, step=shape.config.workers)
    def _row(row: jax.Array) -> None:
        @pl.when(lengths_ref[row] == 0)
        def _clear() -> None:
            @pl.loop(0, shape.num_heads // zeros)
            def _some(i: jax.Array) -> None:
                rows = pl.ds(row * shape.num_heads + i * zeros, zeros)
                plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, zeros)], out_ref.at[rows])

    plgpu.wait_smem_to_gmem(0)


def compute_item(
    shape: Shape,
    out_ref: Any,
    part_ref: Any,
    count: jax.Array,
    item: Item,
    tiles: jax.Array,
    *,
    q_raw: Any,
    q_s: Any,
    q_top: Any,
    p_s: Any,
    out_s: Any,
    part_s: Any,
    weight_s: Any,
    q_full: Any,
    q_free: Any,
    full: Any,
    free: Any,
    **tiles_of: Any,
) -> jax.Array:
    """Online softmax over an item's tiles."""
    tile, columns, head_dim = shape.config.tile, shape.columns, shape.head_dim
    q_slot = lax.rem(count, jnp.int32(2))
    plgpu.barrier_wait(q_full.at[q_slot])
    _stage_queries(q_raw.at[q_slot], q_s, q_top)
    plgpu.barrier_arrive(q_free.at[q_slot])
    first_tile, end_tile = tile_range(shape, item)
    column = plgpu.Layout.WGMMA.reduce(0)
    top = plgpu.layout_cast(jnp.full((columns,), MASKED, jnp.float32), column)
    total = plgpu.layout_cast(jnp.zeros((tile, columns), jnp.float32), plgpu.Layout.WGMMA)
    acc = plgpu.layout_cast(jnp.zeros((head_dim, columns), jnp.float32), plgpu.Layout.WGMMA)
    log2_scale: Any = shape.scale * math.log2(math.e)
    if q_s.dtype != q_raw.dtype:
        factors = plgpu.load(q_top, layout=column, optimized=False) * log2_scale
        log2_scale = lax.broadcast_in_dim(factors, (tile, columns), [1])

    def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, acc = carry
        slot = lax.rem(tiles + j - first_tile, jnp.int32(shape.stages))
        plgpu.barrier_wait(full.at[slot])
        k_tile = _staged(shape, shape.k, "k", item, j, slot, tiles_of)
        if not shape.k.direct:
            plgpu.commit_smem()

        def logits_of(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, k_tile, q_s.transpose((1, 0)))
            _staged(shape, shape.v, "v", item, j, slot, tiles_of)  # meanwhile
            return ref[...]

        logits = pl.run_scoped(logits_of, plgpu.ACC((tile, columns), jnp.float32)) * log2_scale
        token = plgpu.broadcasted_iota(jnp.int32, (tile, columns), 0, layout=plgpu.Layout.WGMMA) + j * tile
        logits = jnp.where(jnp.logical_and(token >= item.low, token < item.high), logits, MASKED)
        new_top = jnp.maximum(top, logits.max(axis=0))
        shrink = jnp.exp2(top - new_top)
        p = jnp.exp2(logits - lax.broadcast_in_dim(new_top, logits.shape, [1]))
        total = total * lax.broadcast_in_dim(shrink, total.shape, [1]) + p
        p_s.transpose((1, 0))[...] = p.astype(p_s.dtype)
        v_tile = tiles_of["v"].at[slot] if shape.v.direct else tiles_of["v_tile"]
        _zero_hidden(shape, item, j, v_tile)
        plgpu.commit_smem()

        def values_of(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, v_tile.transpose((1, 0)), p_s.transpose((1, 0)))
            return ref[...]

        summed = pl.run_scoped(values_of, plgpu.ACC((head_dim, columns), jnp.float32))
        plgpu.barrier_arrive(free.at[slot])
        return new_top, total, acc * lax.broadcast_in_dim(shrink, acc.shape, [1]) + summed

    top, total, acc = lax.fori_loop(first_tile, end_tile, step, (top, total, acc))
    weight = total.sum(axis=0)
    acc = acc / lax.broadcast_in_dim(weight, acc.shape, [1])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(item.splits == 1)
    def _whole() -> None:
        out_s.transpose((1, 0))[...] = plgpu.layout_cast(acc.astype(out_s.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        queries = pl.ds(first_query(shape, item), shape.queries)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, shape.queries)], out_ref.at[queries])

    if shape.slots:

        @pl.when(item.splits > 1)
        def _part() -> None:
            transposed = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
            part_s.at[:, pl.ds(0, head_dim)].transpose((1, 0))[...] = transposed
            weight_s[...] = top + jnp.log2(weight)
            part_s[:, head_dim] = plgpu.load(weight_s, layout=_ONE_BY_ONE)  # from pairs a thread to single ones
            plgpu.commit_smem()
            queries = pl.ds(first_query(shape, item) - item.row * shape.num_heads, shape.queries)
            plgpu.copy_smem_to_gmem(part_s.at[pl.ds(0, shape.queries)], part_ref.at[item.slot, queries])

    return tiles + end_tile - first_tile


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
    shape: Shape, stored: Storage, name: str, item: Item, j: jax.Array, slot: jax.Array, tiles_of: dict[str, Any]
) -> Any:
    """Where the product finds a tile of K or V: where it was copied to, or converted from there."""
    if stored.direct:
        return tiles_of[name].at[slot]
    scales = packed = None
    shift = jnp.int32(0)
    if stored.groups:
        kv_head = item.head if shape.chunks == 1 else item.head // shape.chunks
        scales, packed = tiles_of[f"{name}_scales"].at[slot], tiles_of.get(f"{name}_packed")
        _, shift = stored.scale_slice(kv_head, lax.rem(j * stored.tile, jnp.int32(shape.page_size)))
    target = tiles_of[f"{name}_tile"]
    target[...] = stored.read(tiles_of[name].at[slot], scales, packed, shift)
    return target


def _zero_hidden(shape: Shape, item: Item, j: jax.Array, v_tile: Any) -> None:
    """Zeros in the values of masked tokens at a split's edges: they may hold anything, and 0 * NaN isn't 0."""
    tile = shape.config.tile

    @pl.when(jnp.logical_or(j * tile < item.low, (j + 1) * tile > item.high))
    def _edge() -> None:
        values = plgpu.load(v_tile, layout=plgpu.Layout.WGMMA, optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, v_tile.shape, 0, layout=plgpu.Layout.WGMMA) + j * tile
        seen = jnp.logical_and(token >= item.low, token < item.high)
        v_tile[...] = jnp.where(seen, values, jnp.zeros_like(values))
