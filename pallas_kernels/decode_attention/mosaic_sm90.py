"""decode_attention for Hopper GPUs: a persistent Mosaic kernel over balanced work items, and one that merges splits.

Each CTA has a warpgroup that copies pages into a ring of tiles, on and on across work items, and one that computes.
Tokens are the rows of both products, K Q^T [tile, queries] and V^T P [D, queries], so that the few queries of a KV head
fill the narrow side of a wgmma and the softmax is over `tile` numbers a query. Online softmax: Milakov & Gimelshein
2018; splits merged by log-sum-exp: Flash-Decoding (Dao et al. 2023).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.compute_sm90 import clear_unused, compute_item
from pallas_kernels.decode_attention.config import Config, check_supported
from pallas_kernels.decode_attention.copy_sm90 import Parts, copy_item, drain, parts_by_warp
from pallas_kernels.decode_attention.merge_sm90 import merge_splits
from pallas_kernels.decode_attention.shape_sm90 import BLOCK, COMPILER, MERGED, PAD, Item, Shape
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
    options = (q.dtype, head_dim, config.tile, interpret is not None, config.dequantize)
    stored = [storage(part, *options) for part in (pages.k, pages.v)]
    shape = Shape(
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
        out = merge_splits(shape, out, parts, lengths, work, interpret)
    out = out.reshape(q.shape)
    return dims_in_order(out) if shape.v.permuted else out


def _stages(config: Config, columns: int, k: Storage, v: Storage) -> int:
    """How many tiles of K and V fit a worker's share of an SM's shared memory, beside its other buffers."""
    queries_and_results = columns * (4 * 2 * k.head_dim + 4 * (k.head_dim + PAD) + 2 * config.tile)
    other = queries_and_results + k.other_bytes() + v.other_bytes()
    for sharing in (config.per_sm, 1):  # where that is too little, workers take turns
        stages = min(config.stages, (shared_bytes_left(sharing) - other) // (k.stage_bytes() + v.stage_bytes()))
        if stages >= 2:
            return stages
    raise NotImplementedError(f"{config}, head dim {k.head_dim} and {columns} queries need more shared memory")


def _attend(
    shape: Shape,
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
    slots = shape.slots + MERGED - 1  # the last of them may be read, but don't count
    sources = {"k": pages.k.values, "v": pages.v.values}
    for name, pool, stored in (("k_scales", pages.k, shape.k), ("v_scales", pages.v, shape.v)):
        if pool.scales is not None:
            sources[name] = stored.scale_rows(pool.scales)
    return plgpu.kernel(
        partial(_attend_kernel, shape, work.window, tuple(sources)),
        out_type=(
            jax.ShapeDtypeStruct((shape.rows * shape.num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((slots, max(shape.num_heads, BLOCK), head_dim + PAD), jnp.float32),
        ),
        scratch_types={
            "q_raw": plgpu.SMEM((2, columns, head_dim), dtype),
            "q_s": tiled((columns, head_dim), shape.k.dtype),
            "q_top": plgpu.SMEM((columns,), jnp.float32),
            "p_s": tiled((columns, config.tile), shape.v.dtype),
            **shape.k.scratch("k", shape.stages),
            **shape.v.scratch("v", shape.stages),
            "out_s": plgpu.SMEM((columns, head_dim), dtype),
            "part_s": plgpu.SMEM((columns, head_dim + PAD), jnp.float32),
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
        compiler_params=COMPILER,
        interpret=interpret,
    )(q.reshape(-1, head_dim), page_table, lengths, work.rows, work.slots, work.first, work.items, *sources.values())


def _attend_kernel(
    shape: Shape,
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
        """Calls body(number of the item, Item, tiles before it) -> tiles so far, over this worker's items."""

        def step(count: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            used, head, index, tiles = at
            row = rows_ref[used]
            length = lengths_ref[row]
            start, first, splits = row_splits(length, window, config.split)
            low = jnp.maximum((first + index) * config.split, start)
            high = jnp.minimum((first + index + 1) * config.split, length)
            tiles = body(count, Item(row, head, low, high, splits, slots_ref[row] + index), tiles)
            index = index + 1
            head = jnp.where(index == splits, head + 1, head)
            index = jnp.where(index == splits, 0, index)
            used = jnp.where(head == heads, used + 1, used)
            head = jnp.where(head == heads, 0, head)
            return used, head, index, tiles

        at = (first_ref[0, worker], first_ref[1, worker], first_ref[2, worker], jnp.int32(0))
        return lax.fori_loop(jnp.int32(0), items_ref[worker], step, at)[-1]

    @pl.when(role == 0)
    def _compute() -> None:
        clear_unused(shape, worker, lengths_ref, out_ref, scratch["out_s"])
        compute = partial(compute_item, shape, out_ref, part_ref, **scratch)
        for_each_item(compute)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == 1)
    def _copy() -> None:
        @plgpu.warp_map
        def _warps(warp: jax.Array) -> None:
            for w, parts in enumerate(parts_by_warp(shape, names)):

                @pl.when(warp == w)
                def _share(w: int = w, parts: Parts = parts) -> None:
                    copy = partial(copy_item, shape, q_ref, table_ref, sources, w == 0, parts)
                    tiles = for_each_item(partial(copy, **scratch))
                    drain(shape, items_ref[worker], tiles, w == 0, scratch["q_free"], scratch["free"])
