"""decode_attention for Hopper GPUs: a persistent Mosaic kernel over balanced work items, and one that merges splits.

Each CTA has a warpgroup that copies pages into a ring of tiles, on and on across work items, and one that computes.
Tokens are the rows of both products, K Q^T [tile, queries] and V^T P [D, queries], so that the few queries of a KV head
fill the narrow side of a wgmma and the softmax is over `tile` numbers a query. Online softmax: Milakov & Gimelshein
2018; splits merged by log-sum-exp: Flash-Decoding (Dao et al. 2023).
"""

import functools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import Config, check_supported
from pallas_kernels.decode_attention.storage_sm90 import (
    Storage,
    dims_in_order,
    even_dims_first,
    shared_bytes_left,
    storage,
    tiled,
)
from pallas_kernels.decode_attention.work import Work, make_work, max_slots, query_chunks, row_splits
from pallas_kernels.kv_pages import KVPages

_MASKED = -1e30  # finite: the difference of two is a number
_MERGED = 4  # splits merged at a time
_BLOCK = 4  # heads merged at a time: one a warp
_PAD = 4  # a partial result is followed by log2 of its sum of weights, and 12 bytes for the alignment of copies
_ONE_BY_ONE = plgpu.Layout.TILED(
    plgpu.Tiling(((8,), (1,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(plgpu.Replicated(4), -2),
    vector_dim=-1,
)
_BY_HEAD = plgpu.Layout.TILED(plgpu.Tiling(((_BLOCK, 64), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


@dataclass(frozen=True)
class _Shape:
    """What the kernels are specialized to."""

    rows: int  # R
    num_heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    page_size: int  # P
    queries: int  # query heads of one work item
    chunks: int  # work items that share a KV head
    columns: int  # `queries` padded to what wgmma wants
    slots: int  # partial results of a head, at most
    scale: float
    config: Config
    stages: int  # tiles in flight
    k: Storage
    v: Storage

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads


@partial(jax.jit, static_argnames=("scale", "window", "config", "interpret"))
def decode_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    work: Work | None = None,
    *,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """q [R, H, D], page_table i32[R, M], lengths i32[R] -> [R, H, D]; see api.py."""
    check_supported(q, pages)
    num_rows, num_heads, head_dim = q.shape
    kv_heads, page_size = pages.k.values.shape[1:3]
    if q.size == 0:
        return q
    if work is None:
        work = make_work(lengths, num_heads, kv_heads, head_dim, window=window, config=config)
    chunks, queries = query_chunks(num_heads, kv_heads)
    config = work.config
    if (work.rows.shape, work.heads, work.window) != ((num_rows,), kv_heads * chunks, window):
        raise ValueError(
            f"the work list is for {work.rows.shape[0]} rows, {work.heads} heads and window {work.window}, "
            f"the call has {num_rows}, {kv_heads * chunks} and {window}"
        )
    stored = [storage(part, q.dtype, head_dim, config.tile, interpret is not None) for part in (pages.k, pages.v)]
    shape = _Shape(
        rows=num_rows,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        queries=queries,
        chunks=chunks,
        columns=-(-queries // 8) * 8,
        slots=max_slots(num_rows, page_table.shape[1] * page_size, window, config.split),
        scale=scale,
        config=config,
        stages=_stages(config, -(-queries // 8) * 8, *stored),
        k=stored[0],
        v=stored[1],
    )
    if stored[0].permuted:
        q = even_dims_first(q)
    out, parts = _attend(shape, q, pages, page_table, lengths, work, interpret)
    if shape.slots:
        out = _merge(shape, out, parts, lengths, work, interpret)
    out = out.reshape(q.shape)
    return dims_in_order(out) if shape.v.permuted else out


def _stages(config: Config, columns: int, k: Storage, v: Storage) -> int:
    """How many tiles of K and V fit a worker's share of an SM's shared memory, beside its other buffers."""
    queries_and_results = columns * (4 * 2 * k.head_dim + 4 * (k.head_dim + _PAD) + 2 * config.tile)
    other = queries_and_results + k.other_bytes() + v.other_bytes()
    for sharing in (config.per_sm, 1):  # where that is too little, workers take turns
        stages = min(config.stages, (shared_bytes_left(sharing) - other) // (k.stage_bytes() + v.stage_bytes()))
        if stages >= 2:
            return stages
    raise NotImplementedError(f"{config}, head dim {k.head_dim} and {columns} queries need more shared memory")


def _attend(
    shape: _Shape,
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    work: Work,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Rows of one split [R * H, D], and of the others each split's result, followed by log2 of its sum of weights."""
    config, dtype = shape.config, q.dtype
    columns, head_dim = shape.columns, shape.head_dim
    slots = shape.slots + _MERGED - 1  # the last of them may be read, but don't count
    sources = {"k": pages.k.values, "v": pages.v.values}
    for name, pool, stored in (("k_scales", pages.k, shape.k), ("v_scales", pages.v, shape.v)):
        if pool.scales is not None:
            sources[name] = stored.scale_rows(pool.scales)
    return plgpu.kernel(
        partial(_attend_kernel, shape, work.window, tuple(sources)),
        out_type=(
            jax.ShapeDtypeStruct((shape.rows * shape.num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((slots, max(shape.num_heads, _BLOCK), head_dim + _PAD), jnp.float32),
        ),
        scratch_types={
            "q_raw": plgpu.SMEM((2, columns, head_dim), dtype),
            "q_s": tiled((columns, head_dim), shape.k.dtype),
            "q_top": plgpu.SMEM((columns,), jnp.float32),
            "p_s": tiled((columns, config.tile), shape.v.dtype),
            **shape.k.scratch("k", shape.stages),
            **shape.v.scratch("v", shape.stages),
            "out_s": plgpu.SMEM((columns, head_dim), dtype),
            "part_s": plgpu.SMEM((columns, head_dim + _PAD), jnp.float32),
            "weight_s": plgpu.SMEM((columns,), jnp.float32),
            "q_full": plgpu.Barrier(num_barriers=2),
            "q_free": plgpu.Barrier(num_barriers=2),
            "full": plgpu.Barrier(num_arrivals=shape.k.parts * len(sources), num_barriers=shape.stages),
            "free": plgpu.Barrier(num_barriers=shape.stages),
        },
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=_COMPILER,
        interpret=interpret,
    )(q.reshape(-1, head_dim), page_table, lengths, work.rows, work.slots, work.first, work.items, *sources.values())


_COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclass(frozen=True)
class _Item:
    """Scalars of one work item."""

    row: jax.Array
    head: jax.Array  # KV head and chunk of query heads
    low: jax.Array  # its first visible key
    high: jax.Array  # and the one after its last
    splits: jax.Array  # of the row
    slot: jax.Array  # where a partial result goes


def _attend_kernel(
    shape: _Shape,
    window: int | None,
    names: tuple[str, ...],
    q_ref: Any,
    table_ref: Any,
    lengths_ref: Any,
    rows_ref: Any,
    slots_ref: Any,
    first_ref: Any,
    items_ref: Any,
    *refs: Any,
    **scratch: Any,
) -> None:
    sources, (out_ref, part_ref) = dict(zip(names, refs)), refs[len(names) :]
    worker, role = lax.axis_index("worker"), lax.axis_index("warpgroup")
    config, heads = shape.config, shape.kv_heads * shape.chunks

    def for_each_item(body: Any) -> jax.Array:
        """Calls body(number of the item, _Item, tiles before it) -> tiles so far, over this worker's items."""

        def step(count: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            used, head, index, tiles = at
            row = rows_ref[used]
            length = lengths_ref[row]
            start, first, splits = row_splits(length, window, config.split)
            low = jnp.maximum((first + index) * config.split, start)
            high = jnp.minimum((first + index + 1) * config.split, length)
            tiles = body(count, _Item(row, head, low, high, splits, slots_ref[row] + index), tiles)
            index = index + 1
            head = jnp.where(index == splits, head + 1, head)
            index = jnp.where(index == splits, 0, index)
            used = jnp.where(head == heads, used + 1, used)
            head = jnp.where(head == heads, 0, head)
            return used, head, index, tiles

        at = (first_ref[0, worker], first_ref[1, worker], first_ref[2, worker], jnp.int32(0))
        return lax.fori_loop(jnp.int32(0), items_ref[worker], step, at)[-1]

    def first_query(item: _Item) -> jax.Array:
        if shape.chunks == 1:
            return item.row * shape.num_heads + item.head * shape.queries
        kv_head, chunk = item.head // shape.chunks, lax.rem(item.head, jnp.int32(shape.chunks))
        offset = jnp.minimum(chunk * shape.queries, shape.group - shape.queries)
        return item.row * shape.num_heads + kv_head * shape.group + offset

    @pl.when(role == 0)
    def _compute() -> None:
        _clear_unused(shape, worker, lengths_ref, out_ref, scratch["out_s"])
        compute = partial(_compute_item, shape, first_query, out_ref, part_ref, **scratch)
        for_each_item(compute)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 1)
    def _copy() -> None:
        @plgpu.warp_map
        def _warps(warp: jax.Array) -> None:
            for w, parts in enumerate(_parts_by_warp(shape, names)):

                @pl.when(warp == w)
                def _share(w: int = w, parts: _Parts = parts) -> None:
                    copy = partial(_copy_item, shape, first_query, q_ref, table_ref, sources, w == 0, parts)
                    tiles = for_each_item(partial(copy, **scratch))
                    _drain(shape, items_ref[worker], tiles, w == 0, scratch["q_free"], scratch["free"])


_Parts = list[tuple[int, str]]


def _parts_by_warp(shape: _Shape, names: tuple[str, ...]) -> list[_Parts]:
    """Which copies of a tile each warp issues: (part of the tile, its source). One warp alone couldn't keep up."""
    parts = [(i, name) for i in range(shape.k.parts) for name in names]
    if shape.k.parts < 4:
        return [parts[w::4] for w in range(4) if parts[w::4]]
    return [[part for part in parts if part[0] % 4 == w] for w in range(4)]


def _clear_unused(shape: _Shape, worker: jax.Array, lengths_ref: Any, out_ref: Any, out_s: Any) -> None:
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


def _tile_range(shape: _Shape, item: _Item) -> tuple[jax.Array, jax.Array]:
    tile = shape.config.tile
    return item.low // tile, (item.high + (tile - 1)) // tile


def _copy_item(
    shape: _Shape,
    first_query: Any,
    q_ref: Any,
    table_ref: Any,
    sources: dict[str, Any],
    with_queries: bool,
    parts: _Parts,
    count: jax.Array,
    item: _Item,
    tiles: jax.Array,
    *,
    q_raw: Any,
    q_full: Any,
    q_free: Any,
    full: Any,
    free: Any,
    **targets: Any,
) -> jax.Array:
    """One warp's share of an item's copies, of its queries and of keys and values, as room gets free."""
    tile, stages, page_size = shape.config.tile, shape.stages, shape.page_size
    kv_head = item.head if shape.chunks == 1 else item.head // shape.chunks
    if with_queries:
        q_slot = lax.rem(count, jnp.int32(2))

        @pl.when(count >= 2)
        def _wait() -> None:
            plgpu.barrier_wait(q_free.at[q_slot])

        queries = pl.ds(first_query(item), shape.queries)
        plgpu.copy_gmem_to_smem(q_ref.at[queries], q_raw.at[q_slot, pl.ds(0, shape.queries)], q_full.at[q_slot])
    first_page, last_page = item.low // page_size, (item.high - 1) // page_size
    first_tile, end_tile = _tile_range(shape, item)
    numbers = sorted({i for i, _ in parts})

    def entries(j: jax.Array) -> tuple[jax.Array, ...]:
        """The pages of tile j that this warp copies; where there is none to read, another one."""
        begin = j * tile // page_size
        return tuple(table_ref[item.row, jnp.clip(begin + i, first_page, last_page)] for i in numbers)

    def copy_tile(j: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        coming = entries(j + 1)  # read ahead: it takes as long as a copy
        number = tiles + j - first_tile
        slot = lax.rem(number, jnp.int32(stages))

        @pl.when(number >= stages)
        def _wait() -> None:
            plgpu.barrier_wait(free.at[slot])

        begin = j * tile // page_size
        offset = lax.rem(j * tile, jnp.int32(page_size)) if page_size > tile else 0
        for i, name in parts:
            there = jnp.logical_and(begin + i >= first_page, begin + i <= last_page)
            page = pages[numbers.index(i)]

            @pl.when(there)
            def _copy(i: int = i, name: str = name, page: jax.Array = page) -> None:
                stored, size = shape.k if name.startswith("k") else shape.v, shape.k.tokens
                source: Any
                target: Any
                if name in ("k", "v"):
                    source, target = (page, kv_head, pl.ds(offset, size)), (slot, pl.ds(i * size, size))
                else:
                    scales, _ = stored.scale_slice(kv_head, offset)
                    source, target = (page, scales), (slot, stored.scale_part(i))
                plgpu.copy_gmem_to_smem(sources[name].at[source], targets[name].at[target], full.at[slot])

            @pl.when(jnp.logical_not(there))
            def _skip() -> None:  # what the tile holds there is masked
                plgpu.barrier_arrive(full.at[slot])

        return coming

    lax.fori_loop(first_tile, end_tile, copy_tile, entries(first_tile))
    return tiles + end_tile - first_tile


def _drain(shape: _Shape, items: jax.Array, tiles: jax.Array, with_queries: bool, q_free: Any, free: Any) -> None:
    """Waits until all copies have been used: no barrier is left in the middle of a phase."""
    if with_queries:

        @pl.loop(jnp.maximum(items - 2, 0), items)
        def _queries(i: jax.Array) -> None:
            plgpu.barrier_wait(q_free.at[lax.rem(i, jnp.int32(2))])

    @pl.loop(jnp.maximum(tiles - shape.stages, 0), tiles)
    def _tiles(i: jax.Array) -> None:
        plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(shape.stages))])


def _compute_item(
    shape: _Shape,
    first_query: Any,
    out_ref: Any,
    part_ref: Any,
    count: jax.Array,
    item: _Item,
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
    first_tile, end_tile = _tile_range(shape, item)
    column = plgpu.Layout.WGMMA.reduce(0)
    top = plgpu.layout_cast(jnp.full((columns,), _MASKED, jnp.float32), column)
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
        logits = jnp.where(jnp.logical_and(token >= item.low, token < item.high), logits, _MASKED)
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
        queries = pl.ds(first_query(item), shape.queries)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, shape.queries)], out_ref.at[queries])

    if shape.slots:

        @pl.when(item.splits > 1)
        def _part() -> None:
            transposed = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
            part_s.at[:, pl.ds(0, head_dim)].transpose((1, 0))[...] = transposed
            weight_s[...] = top + jnp.log2(weight)
            part_s[:, head_dim] = plgpu.load(weight_s, layout=_ONE_BY_ONE)  # from pairs a thread to single ones
            plgpu.commit_smem()
            queries = pl.ds(first_query(item) - item.row * shape.num_heads, shape.queries)
            plgpu.copy_smem_to_gmem(part_s.at[pl.ds(0, shape.queries)], part_ref.at[item.slot, queries])

    return tiles + end_tile - first_tile


_BY_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


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
    shape: _Shape, stored: Storage, name: str, item: _Item, j: jax.Array, slot: jax.Array, tiles_of: dict[str, Any]
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


def _zero_hidden(shape: _Shape, item: _Item, j: jax.Array, v_tile: Any) -> None:
    """Zeros in the values of masked tokens at a split's edges: they may hold anything, and 0 * NaN isn't 0."""
    tile = shape.config.tile

    @pl.when(jnp.logical_or(j * tile < item.low, (j + 1) * tile > item.high))
    def _edge() -> None:
        values = plgpu.load(v_tile, layout=plgpu.Layout.WGMMA, optimized=False)
        token = plgpu.broadcasted_iota(jnp.int32, v_tile.shape, 0, layout=plgpu.Layout.WGMMA) + j * tile
        seen = jnp.logical_and(token >= item.low, token < item.high)
        v_tile[...] = jnp.where(seen, values, jnp.zeros_like(values))


def _merge(
    shape: _Shape,
    out: jax.Array,
    parts: jax.Array,
    lengths: jax.Array,
    work: Work,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Fills in the rows of several splits, from their partial results."""
    result = jax.new_ref(out)
    blocks = -(-shape.num_heads // _BLOCK)
    plgpu.kernel(
        partial(_merge_kernel, shape, work.window),
        scratch_types={"out_s": plgpu.SMEM((_BLOCK, shape.head_dim), out.dtype)},
        grid=(min(shape.config.merge_per_sm * shape.config.sms, shape.rows * blocks),),
        grid_names=("worker",),
        compiler_params=_COMPILER,
        interpret=interpret,
    )(parts, lengths, work.merges, work.num_merges, work.slots, result)
    return jax.freeze(result)


def _merge_kernel(
    shape: _Shape,
    window: int | None,
    part_ref: Any,
    lengths_ref: Any,
    merges_ref: Any,
    num_merges_ref: Any,
    slots_ref: Any,
    out_ref: Any,
    out_s: Any,
) -> None:
    head_dim, num_heads, workers = shape.head_dim, shape.num_heads, lax.axis_size("worker")
    blocks = -(-num_heads // _BLOCK)

    def spread(x: jax.Array) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (_BLOCK, head_dim), [0]), _BY_HEAD)

    def merge(i: jax.Array) -> None:
        row, block = merges_ref[i // blocks], lax.rem(i, jnp.int32(blocks))
        _, _, splits = row_splits(lengths_ref[row], window, shape.config.split)
        head = jnp.minimum(block * _BLOCK, max(num_heads - _BLOCK, 0))  # the last block may overlap
        slot = slots_ref[row]

        def some(b: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, acc = carry
            values, weights = [], []
            for index in range(_MERGED):  # their loads don't wait for each other
                source = part_ref.at[slot + b * _MERGED + index, pl.ds(head, _BLOCK)]
                value = plgpu.load(source.at[:, pl.ds(0, head_dim)], layout=_BY_HEAD, optimized=False)
                weight = plgpu.load(source.at[:, head_dim], layout=_BY_HEAD.reduce(1), optimized=False)
                there = b * _MERGED + index < splits
                values.append(jnp.where(there, value, 0.0))
                weights.append(jnp.where(there, weight, _MASKED))
            new_top = functools.reduce(jnp.maximum, weights, top)
            shrink = jnp.exp2(top - new_top)
            total, acc = total * shrink, acc * spread(shrink)
            for value, weight in zip(values, weights):
                share = jnp.exp2(weight - new_top)
                total, acc = total + share, acc + value * spread(share)
            return new_top, total, acc

        zeros = plgpu.layout_cast(jnp.zeros((_BLOCK, head_dim), jnp.float32), _BY_HEAD)
        top, total = (
            plgpu.layout_cast(jnp.full((_BLOCK,), value, jnp.float32), _BY_HEAD.reduce(1)) for value in (_MASKED, 0.0)
        )
        steps = (splits + (_MERGED - 1)) // _MERGED
        _, total, acc = lax.fori_loop(jnp.int32(0), steps, some, (top, total, zeros))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_s[...] = (acc / spread(total)).astype(out_s.dtype)
        plgpu.commit_smem()
        heads = min(_BLOCK, num_heads)
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, heads)], out_ref.at[pl.ds(row * num_heads + head, heads)])

    @pl.loop(lax.axis_index("worker"), num_merges_ref[0] * blocks, step=workers)
    def _merge_rows(i: jax.Array) -> None:
        merge(i)

    plgpu.wait_smem_to_gmem(0)
