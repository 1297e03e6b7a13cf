"""decode_attention for Hopper GPUs: a persistent Mosaic kernel over balanced work items, and one that merges splits.

Each CTA has a warpgroup that copies pages into a ring of tiles, on and on across work items, and one or two compute,
each a head of its own: a tile is the same 64 tokens of each.
Tokens are the rows of both products, K Q^T [tile, queries] and V^T P [D, queries], so that the few queries of a KV head
fill the narrow side of a wgmma and the softmax is over `tile` numbers a query. Online softmax: Milakov & Gimelshein
2018; keys in splits: Flash-Decoding (Dao et al. 2023); what a worker doesn't finish is added up by a second kernel, as
in Stream-K (Osama et al. 2023). Whole numbers are subtracted from logits, so that sums are rescaled by powers of two,
exactly: a head's result is the sum of its splits from left to right, in whatever order their maxima were found.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.compute_sm90 import clear_unused, compute_item, empty_sum, no_queries
from pallas_kernels.decode_attention.config import ROWS, Config, check_supported
from pallas_kernels.decode_attention.copy_sm90 import Parts, copy_item, drain_item_rings, parts_by_warp
from pallas_kernels.decode_attention.merge_sm90 import merge_cuts
from pallas_kernels.decode_attention.shape_sm90 import COMPILER, FETCHED, PAD, REDUCTIONS, Item, Shape
from pallas_kernels.decode_attention.storage_sm90 import shared_bytes_of_worker, storage
from pallas_kernels.decode_attention.work import Work, items_of_row, make_work, max_slots, query_chunks, row_splits
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.smem_sm90 import shared_bytes, swizzled


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
        work = make_work(lengths, num_heads, kv_heads, head_dim, window=window, narrow=pages.narrow, config=config)
    config = work.config
    shape = shape_of(q, pages, scale, window, page_table.shape[1] * page_size, config)
    if (work.rows.shape, work.heads, work.window) != ((num_rows,), shape.items, window):
        raise ValueError(
            f"the work list is for {work.rows.shape[0]} rows of {work.heads} items and window {work.window}, "
            f"the call has {num_rows} of {shape.items} and {window}"
        )
    out, parts = _attend(shape, shape.k.queries(q), pages, page_table, work, interpret)
    if shape.slots:
        out = merge_cuts(shape, out, parts, work, interpret)
    return shape.v.results(out.reshape(q.shape))


def shape_of(
    q: jax.Array,
    pages: KVPages,
    scale: float,
    window: int | None,
    max_tokens: int,
    config: Config,
) -> Shape:
    """What the kernels are specialized to, for q [R, H, D] and rows of at most `max_tokens` keys."""
    num_rows, num_heads, head_dim = q.shape
    kv_heads, page_size = pages.k.values.shape[1:3]
    chunks, queries = query_chunks(num_heads, kv_heads, head_dim)
    columns = -(-queries // 8) * 8
    fits = columns == 8 or columns * head_dim <= 1024  # in registers
    by_warps = config.by_warps and pages.narrow and fits
    k, v = (
        storage(part, q.dtype, head_dim, config, through_registers, by_warps)
        for part, through_registers in ((pages.k, True), (pages.v, False))
    )
    items = items_of_row(kv_heads * chunks, config)
    splits, slots = max_slots(num_rows, max_tokens, items, window, config)
    return Shape(
        rows=num_rows,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        queries=queries,
        chunks=chunks,
        columns=columns,
        items=items,
        splits=splits,
        slots=slots,
        scale=scale,
        config=config,
        k=k,
        v=v,
    )


def _scratch(shape: Shape, stages: int, dtype: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """A worker's buffers and barriers, by name; copies of each of `names` fill a tile."""
    copying = [len(parts) for parts in parts_by_warp(shape, names)]
    arrivals = len(copying) if shape.by_lanes else sum(copying)
    columns, head_dim, config = shape.columns, shape.head_dim, shape.config
    each = config.computing
    own: dict[str, Any] = {"part_s": plgpu.SMEM((each, 4, columns, head_dim + PAD), jnp.float32)}
    if not shape.by_warps:
        own["part_s"] = plgpu.SMEM((each, columns, head_dim + PAD), jnp.float32)
        own["p_s"] = swizzled((each, columns, ROWS), shape.v.dtype)
        own["reduced"] = plgpu.SMEM((each, 256), jnp.float32)
        own["q_s"] = swizzled((each, columns, head_dim), shape.k.dtype)
        own["of_query"] = plgpu.SMEM((each, 3, columns), jnp.float32)
    return {
        "q_raw": plgpu.SMEM((2, each, columns, head_dim), dtype),
        **own,
        **shape.k.scratch("k", stages),
        **shape.v.scratch("v", stages),
        "out_s": plgpu.SMEM((each, columns, head_dim), dtype),
        "q_full": plgpu.Barrier(num_arrivals=each, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=each, num_barriers=2),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=each, num_barriers=stages),
    }


def fitting_scratch(shape: Shape, dtype: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """With as many tiles in flight as fit a worker's share of an SM's shared memory."""
    for per_sm in (shape.config.per_sm, 1):  # where that is too little, workers take turns
        for stages in range(shape.config.stages, 1, -1):
            scratch = _scratch(shape, stages, dtype, names)
            if shared_bytes(scratch, REDUCTIONS) <= shared_bytes_of_worker(per_sm):
                return scratch
    raise NotImplementedError(
        f"{shape.config}, head dim {shape.head_dim} and {shape.columns} queries need more shared memory"
    )


def _attend(
    shape: Shape,
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    work: Work,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Results [R * H, D] but those of heads that were cut, and partial ones [sum, slot, query, D and PAD], a
    warpgroup's sums after the other's."""
    config, dtype, head_dim = shape.config, q.dtype, shape.head_dim
    slots = shape.slots + FETCHED - 1  # the last of them may be read, but don't count
    sources = {"k": shape.k.rows(pages.k.values), "v": shape.v.rows(pages.v.values)}
    for name, pool, stored in (("k_scales", pages.k, shape.k), ("v_scales", pages.v, shape.v)):
        if pool.scales is not None:
            sources[name] = stored.scale_rows(pool.scales)
    return plgpu.kernel(
        partial(_attend_kernel, shape, work.window, tuple(sources)),
        out_type=(
            jax.ShapeDtypeStruct((shape.rows * shape.num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((config.computing * shape.sums, slots, shape.queries, head_dim + PAD), jnp.float32),
        ),
        scratch_types=fitting_scratch(shape, dtype, tuple(sources)),
        grid=(config.workers,),
        grid_names=("worker",),
        num_threads=config.computing + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        interpret=interpret,
        kernel_name="decode_attention",
    )(
        q.reshape(-1, head_dim),
        page_table,
        work.rows,
        work.lengths,
        work.log2_splits,
        work.first,
        work.items,
        work.slots,
        *sources.values(),
    )


def _attend_kernel(
    shape: Shape,
    window: int | None,
    names: tuple[str, ...],
    q_ref: Any,
    table_ref: Any,
    rows_ref: Any,
    lengths_ref: Any,
    splits_ref: Any,
    first_ref: Any,
    items_ref: Any,
    slots_ref: Any,
    *refs: Any,
    **scratch: Any,
) -> None:
    sources, (out_ref, part_ref) = dict(zip(names, refs)), refs[len(names) :]
    worker, role = lax.axis_index("worker"), lax.axis_index("warpgroup")
    computing, items = shape.config.computing, items_ref[worker]

    def for_each_item(body: Any, state: Any) -> Any:
        """Calls body(Item, state) -> state over this worker's items."""

        def row_at(used: jax.Array) -> tuple[jax.Array, ...]:
            used = jnp.minimum(used, shape.rows - 1)
            return rows_ref[used], lengths_ref[used], splits_ref[used]

        def step(count: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            used, head, index, (row, length, log2), state = carry
            next_row = row_at(used + 1)  # read ahead: it takes long
            start, first, splits = row_splits(length, log2, window)
            low = jnp.maximum(lax.shift_left(first + index, log2), start)
            high = jnp.minimum(lax.shift_left(first + index + 1, log2), length)
            ends = index == splits - 1
            begins, last = jnp.logical_or(index == 0, count == 0), count == items - 1
            item = Item(row, head * computing, low, high, begins, index == 0, ends, index <= count, last)
            state = body(item, state)
            index, head = jnp.where(ends, 0, index + 1), jnp.where(ends, head + 1, head)
            over = head == shape.items
            used, head = jnp.where(over, used + 1, used), jnp.where(over, 0, head)
            this_row = tuple(jnp.where(over, *pair) for pair in zip(next_row, (row, length, log2)))
            return used, head, index, this_row, state

        at = (first_ref[0, worker], first_ref[1, worker], first_ref[2, worker])
        return lax.fori_loop(jnp.int32(0), items, step, (*at, row_at(at[0]), state))[-1]

    @pl.when(role < computing)
    def _compute() -> None:
        @pl.when(role == 0)
        def _clear() -> None:
            clear_unused(shape, worker, rows_ref, lengths_ref, out_ref, scratch["out_s"].at[0])

        compute = partial(compute_item, shape, role, out_ref, part_ref, **scratch)
        zero = jnp.int32(0)
        for_each_item(
            compute, (zero, zero, slots_ref[worker], empty_sum(shape), no_queries(shape, scratch["q_raw"].dtype))
        )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == computing)
    def _copy() -> None:
        @plgpu.warp_map
        def _warps(warp: jax.Array) -> None:
            for w, parts in enumerate(parts_by_warp(shape, names)):

                @pl.when(warp == w)
                def _share(w: int = w, parts: Parts = parts) -> None:
                    copy = partial(copy_item, shape, q_ref, table_ref, sources, w == 0, parts)
                    tiles, queries = for_each_item(partial(copy, **scratch), (jnp.int32(0), jnp.int32(0)))
                    drain_item_rings(tiles, queries, scratch["q_free"], scratch["free"])
