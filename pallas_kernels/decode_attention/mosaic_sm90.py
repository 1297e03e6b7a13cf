"""Runs decode_attention on Hopper: a persistent Mosaic kernel over balanced work items, and one that merges splits.

Each CTA has a warpgroup that copies pages into a ring of tiles, on and on across work items. One or two warpgroups
compute, each a head of its own: a tile is the same 64 tokens of each. Tokens are the rows of both matmuls, K Q^T [tile,
queries] and V^T P [D, queries]. So the few queries of a KV head fill the narrow side of a wgmma. The softmax is over
`tile` numbers a query.

Online softmax is by Milakov & Gimelshein 2018. Keys in splits are Flash-Decoding's (Dao et al. 2023). A second kernel
adds up what a worker doesn't finish, as in Stream-K (Osama et al. 2023). Whole numbers are subtracted from logits, so
that sums are rescaled by powers of two, exactly. So a head's result is the sum of its splits from left to right, in
whatever order their maxima were found.

The rows of a short segment are further columns, each with keys of its own (masks_sm90). What a column does not see
weighs exactly zero. So a row's bits depend on the keys that it sees, on where these are, and on its sequence's length.
The size of splits follows from that length. A row's bits do not depend on what was drafted in other rows, if their
values are numbers.

A row of a chain has the bits of plain decoding where both lengths have splits of one size, and matmuls as many columns.
K and V of 8 and 4 bits with many columns are multiplied another way. A row of a tree is the same sum in another order,
since its ancestors' keys lie apart.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.compute_sm90 import clear_unused, compute_item, no_queries
from pallas_kernels.decode_attention.config import ROWS, Config, check_supported
from pallas_kernels.decode_attention.copy_sm90 import Parts, copy_item, drain_item_rings, parts_by_warp
from pallas_kernels.decode_attention.merge_sm90 import merge_cuts
from pallas_kernels.decode_attention.shape_sm90 import COMPILER, FETCHED, PAD, REDUCTIONS, Item, Shape
from pallas_kernels.decode_attention.storage_sm90 import shared_bytes_of_worker, storage
from pallas_kernels.decode_attention.sums_sm90 import empty_sum
from pallas_kernels.decode_attention.work import (
    Work,
    items_of_row,
    make_work,
    max_slots,
    padded,
    query_chunks,
    reach,
    row_splits,
)
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.segments import Segments, words_of
from pallas_kernels.hopper.smem_sm90 import shared_bytes, swizzled


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "config", "width", "interpret"))
def decode_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    work: Work | None = None,
    segments: Segments | None = None,
    *,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    config: Config | None = None,
    width: int | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns [R Q, H, D] of q [R Q, H, D], page_table i32[R, M] and lengths i32[R]; see api.py. `width` is api.py's
    `rows`. Further rows of q are not read, and their results not written."""
    if q.size == 0:
        return q
    num_rows, (_, num_heads, head_dim) = lengths.shape[0], q.shape
    width = q.shape[0] // num_rows if width is None else width
    check_supported(q, pages, width)
    kv_heads, page_size = pages.k.values.shape[1:3]
    if work is None:
        options: dict[str, Any] = {"window": window, "width": width, "segments": segments, "config": config}
        work = make_work(lengths, num_heads, kv_heads, head_dim, narrow=pages.narrow, **options)
    config, words = work.config, 0 if work.trees is None else words_of(width)
    own = jax.ShapeDtypeStruct((num_rows * width, num_heads, head_dim), q.dtype)
    shape = shape_of(own, pages, scale, window, page_table.shape[1] * page_size, config, width, words, softcap)
    if width > 1 and (words > 0) != (segments is not None and segments.ancestors is not None):
        raise ValueError(f"the work list is for {'trees' if words else 'chains'}, the call's segments are not")
    if (work.rows.shape, work.width, work.heads, work.window) != ((num_rows,), width, shape.items, window):
        raise ValueError(
            f"the work list is for {work.rows.shape[0]} segments of {work.width} rows, {work.heads} items and window "
            f"{work.window}, the call has {num_rows} of {width}, {shape.items} and {window}"
        )
    out, parts = _attend(shape, shape.k.queries(q), pages, page_table, work, sinks, interpret)
    if shape.slots:
        out = merge_cuts(shape, out, parts, work, interpret)
    return shape.v.results(out.reshape(q.shape))


def shape_of(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    scale: float,
    window: int | None,
    max_tokens: int,
    config: Config,
    width: int = 1,
    words: int = 0,
    softcap: float | None = None,
) -> Shape:
    """Returns what the kernels are specialized to, for q [R Q, H, D] with Q = `width`. Masks of ancestors have `words`
    words (0: chains), and sequences at most `max_tokens` keys."""
    num_heads, head_dim = q.shape[1:]
    num_rows = q.shape[0] // width
    kv_heads, page_size = pages.k.values.shape[1:3]
    chunks, heads = query_chunks(num_heads, kv_heads, head_dim, width)
    columns = padded(heads * width)
    fits = columns == 8 or columns * head_dim <= 1024  # in registers
    by_warps = config.by_warps and pages.narrow and fits
    k, v = (
        storage(part, q.dtype, head_dim, config, through_registers, by_warps)
        for part, through_registers in ((pages.k, True), (pages.v, False))
    )
    items = items_of_row(kv_heads * chunks, config)
    splits, slots = max_slots(num_rows, max_tokens, items, window, config, width)
    return Shape(
        rows=num_rows,
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_pages=pages.k.num_pages,
        heads=heads,
        width=width,
        chunks=chunks,
        items=items,
        splits=splits,
        slots=slots,
        window=window,
        words=words,
        scale=scale,
        softcap=softcap,
        config=config,
        k=k,
        v=v,
    )


def _scratch(shape: Shape, stages: int, dtype: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns a worker's buffers and barriers, by name; copies of each of `names` fill a tile."""
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
        "q_full": plgpu.Barrier(num_arrivals=each * shape.width, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=each, num_barriers=2),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=each, num_barriers=stages),
    }


def fitting_scratch(shape: Shape, dtype: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns scratch with as many tiles in flight as fit a worker's share of an SM's shared memory."""
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
    sinks: jax.Array | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns results [rows of q * H, D], without cut heads, and partial ones [sum, slot, query, D and PAD]. A
    warpgroup's sums come after the other's."""
    config, dtype, head_dim = shape.config, q.dtype, shape.head_dim
    slots = shape.slots + FETCHED - 1  # the last of them may be read, but don't count
    sources = {"k": shape.k.rows(pages.k.values), "v": shape.v.rows(pages.v.values)}
    for name, pool, stored in (("k_scales", pages.k, shape.k), ("v_scales", pages.v, shape.v)):
        if pool.scales is not None:
            sources[name] = stored.scale_rows(pool)
    optional = {"segments": work.segments, "trees": work.trees, "sinks": sinks}
    given = {name: array for name, array in optional.items() if array is not None}
    return plgpu.kernel(
        partial(_attend_kernel, shape, tuple(sources), tuple(given)),
        out_type=(
            jax.ShapeDtypeStruct((q.shape[0] * shape.num_heads, head_dim), dtype),
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
        pages.k.layer_operand,
        *sources.values(),
        *given.values(),
    )


def _attend_kernel(
    shape: Shape,
    names: tuple[str, ...],
    given: tuple[str, ...],
    q_ref: Any,
    table_ref: Any,
    rows_ref: Any,
    lengths_ref: Any,
    splits_ref: Any,
    first_ref: Any,
    items_ref: Any,
    slots_ref: Any,
    layer_ref: Any,
    *refs: Any,
    **scratch: Any,
) -> None:
    sources, rest = dict(zip(names, refs)), refs[len(names) :]
    optional, (out_ref, part_ref) = dict(zip(given, rest)), rest[len(given) :]
    segments_ref, trees_ref, sinks_ref = (optional.get(name) for name in ("segments", "trees", "sinks"))
    worker, role = lax.axis_index("worker"), lax.axis_index("warpgroup")
    computing, items = shape.config.computing, items_ref[worker]

    def for_each_item(body: Any, state: Any) -> Any:
        """Calls body(Item, state) -> state over this worker's items."""

        def row_at(used: jax.Array) -> tuple[jax.Array, ...]:
            used = jnp.minimum(used, shape.rows - 1)
            of_row = rows_ref[used], lengths_ref[used], splits_ref[used]
            return of_row if segments_ref is None else (*of_row, segments_ref[used])

        def step(count: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            used, head, index, this_row, state = carry
            row, length, log2, *drafted = this_row
            queries = drafted[0] if drafted else None
            next_row = row_at(used + 1)  # read ahead: it takes long
            start, first, splits = row_splits(length, log2, reach(shape.window, queries))
            low = jnp.maximum(lax.shift_left(first + index, log2), start)
            high = jnp.minimum(lax.shift_left(first + index + 1, log2), length)
            ends = index == splits - 1
            begins, last = jnp.logical_or(index == 0, count == 0), count == items - 1
            committed = None if queries is None else length - queries
            drafts = queries, committed
            item = Item(row, head * computing, low, high, begins, index == 0, ends, index <= count, last, *drafts)
            state = body(item, state)
            index, head = jnp.where(ends, 0, index + 1), jnp.where(ends, head + 1, head)
            over = head == shape.items
            used, head = jnp.where(over, used + 1, used), jnp.where(over, 0, head)
            this_row = tuple(jnp.where(over, *pair) for pair in zip(next_row, this_row))
            return used, head, index, this_row, state

        at = (first_ref[0, worker], first_ref[1, worker], first_ref[2, worker])
        return lax.fori_loop(jnp.int32(0), items, step, (*at, row_at(at[0]), state))[-1]

    @pl.when(role < computing)
    def _compute() -> None:
        @pl.when(role == 0)
        def _clear() -> None:
            clear_unused(shape, worker, rows_ref, lengths_ref, out_ref, scratch["out_s"].at[0])

        compute = partial(compute_item, shape, role, out_ref, part_ref, trees_ref, sinks_ref, **scratch)
        zero = jnp.int32(0)
        for_each_item(
            compute, (zero, zero, slots_ref[worker], empty_sum(shape), no_queries(shape, scratch["q_raw"].dtype))
        )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role == computing)
    def _copy() -> None:
        @plgpu.warp_map
        def _warps(warp: jax.Array) -> None:
            copying, first_row = parts_by_warp(shape, names), layer_ref[0] * shape.num_pages
            for w, parts in enumerate(copying):

                @pl.when(warp == w)
                def _share(w: int = w, parts: Parts = parts) -> None:
                    query_rows = range(w, shape.width, len(copying))
                    copy = partial(copy_item, shape, q_ref, table_ref, first_row, sources, query_rows, parts)
                    tiles, queries = for_each_item(partial(copy, **scratch), (jnp.int32(0), jnp.int32(0)))
                    drain_item_rings(tiles, queries, scratch["q_free"], scratch["free"])
