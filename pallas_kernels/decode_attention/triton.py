"""Runs decode_attention on Ampere, Ada and Hopper. A program reads the keys of one KV head in one split of a sequence.
It serves all rows and query heads that share them. A second kernel merges a row's splits, always in the same order. How
a sequence is split depends on its own length and window alone, so that results are batch-invariant."""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.decode_attention.config import MOST_SPLITS, TritonConfig, check_triton, triton_config
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.formats.segments import Segments, depths, within
from pallas_kernels.triton import pages_triton, triton_call
from pallas_kernels.triton.triton_call import Launch


@partial(jax.jit, static_argnames=("scale", "window", "config", "softcap"))
def decode_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    lengths: jax.Array,
    scale: float,
    window: int | None,
    segments: Segments | None = None,
    config: TritonConfig | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns [R Q, H, D] of q [R Q, H, D], page_table i32[R, M] and lengths i32[R]; see api.py. `config`: other than
    the one for these arguments, to tune it."""
    R = lengths.shape[0]
    if R == 0:
        return q
    Q = q.shape[0] // R
    q, scale = pages_triton.upright(q, scale)
    check_triton(q, pages, Q)
    rows = jnp.full(R, Q, jnp.int32) if segments is None else segments.rows
    rows = jnp.where(lengths > 0, rows, 0)
    trees: tuple[jax.Array, ...] = (lengths, lengths)  # not read
    if segments is not None and segments.ancestors is not None:
        seen = segments.ancestors if window is None else within(segments.ancestors, window)
        trees = seen, depths(segments.ancestors)
    pools = *pages_triton.arrays(pages.k), *pages_triton.arrays(pages.v), pages.k.layer_operand
    arrays = q, *pools, page_table, lengths, rows, *trees
    kinds = trees[0] is not lengths, config, softcap, sinks is not None
    split, merge = launches(q, pages, page_table, lengths, scale, window, *kinds)
    partials = triton_call.call(split, *arrays)
    return triton_call.call(merge, *partials, lengths, rows, lengths if sinks is None else sinks)[0]


def launches(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    page_table: jax.Array | jax.ShapeDtypeStruct,
    lengths: jax.Array | jax.ShapeDtypeStruct,
    scale: float,
    window: int | None,
    trees: bool,
    config: TritonConfig | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> tuple[Launch, Launch]:
    """Returns the launch over splits and the one that merges them; of arrays shapes and dtypes are enough. The first
    takes q, K's values and scales, V's, the layer, the page table, lengths, rows, and of trees masks and depths. The
    second takes what the first gives, lengths, rows and sinks (without them, any array)."""
    (count, H, D), R, (K, page) = q.shape, lengths.shape[0], pages.k.values.shape[1:3]
    Q, group = count // R, H // K
    config = config or triton_config(D, Q * group, pages)
    chunks = triton.cdiv(Q * group, config.queries)
    slots = min(MOST_SPLITS, triton.cdiv(page_table.shape[1] * page, config.split))
    shared = {
        "Q": Q, "H": H, "D": D, "WINDOW": window or 0, "SPLIT": config.split, "SPLITS": MOST_SPLITS, "SLOTS": slots,
    }  # fmt: skip
    partials = (
        jax.ShapeDtypeStruct((count, H, slots, D), jnp.float32),
        *[jax.ShapeDtypeStruct((count, H, slots), jnp.float32)] * 2,
    )
    constants = {
        "SCALE": scale * pages_triton.LOG2_E, "HEADS": K, "GROUP": group, "CHUNKS": chunks, "PAGE": page,
        "N": pages.k.num_pages, "PAGES": page_table.shape[1], "WORDS": triton.cdiv(Q, 32) if trees else 0,
        "K_GROUP": pages.k.format.group or 0, "K_ZEROS": pages.k.format.zero_point,
        "V_GROUP": pages.v.format.group or 0, "V_ZEROS": pages.v.format.zero_point,
        "FLOAT8": pages_triton.reads_float8(), "SOFTCAP": (softcap or 0.0) * pages_triton.LOG2_E,
        "BLOCK_Q": config.queries, "BLOCK_KV": config.keys,
    }  # fmt: skip
    split = Launch(
        _split, partials, (R * K * chunks, slots), shared | constants, num_warps=config.warps, num_stages=config.stages
    )
    out = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    return split, Launch(_merge, out, (count * H,), {**shared, "SINKS": sinks}, num_warps=2)


@triton.jit
def _bounds(length, used, WINDOW: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """Returns the first key that a segment sees, and the tokens of its splits, doubled until the splits are few
    enough."""
    start = 0
    if WINDOW > 0:
        start = tl.maximum(length - used + 1 - WINDOW, 0)
    size = SPLIT
    while tl.cdiv(length, size) - start // size > SPLITS:
        size *= 2
    return start, size


@triton.jit
def _split(
    q, k, k_scales, v, v_scales, layer, table, lengths, rows, masks, depths, partial, peaks, totals,
    Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    SLOTS: tl.constexpr, SCALE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, CHUNKS: tl.constexpr,
    PAGE: tl.constexpr, N: tl.constexpr, PAGES: tl.constexpr, WORDS: tl.constexpr, K_GROUP: tl.constexpr,
    K_ZEROS: tl.constexpr, V_GROUP: tl.constexpr, V_ZEROS: tl.constexpr, FLOAT8: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0) // (HEADS * CHUNKS)
    head = tl.program_id(0) // CHUNKS % HEADS
    split = tl.program_id(1)
    length, used = tl.load(lengths + segment), tl.load(rows + segment)
    start, size = _bounds(length, used, WINDOW, SPLIT, SPLITS)
    low = tl.maximum((start // size + split) * size, start)
    high = tl.minimum((start // size + split + 1) * size, length)
    query = tl.program_id(0) % CHUNKS * BLOCK_Q + tl.arange(0, BLOCK_Q)
    row = query // GROUP
    in_use = row < used
    if (low < high) & (used > 0):
        at = (segment * Q + row).to(tl.int64) * H + head * GROUP + query % GROUP
        queries, factor = pages_triton.load_queries(q + at * D, in_use, k, D, K_GROUP)
        v_dtype: tl.constexpr = pages_triton.product_dtype(v, q.dtype.element_ty)
        committed = length - used
        position = committed + row
        if WORDS > 0:
            position = committed + tl.load(depths + segment * Q + row, mask=in_use, other=0)
        peak = tl.full([BLOCK_Q], pages_triton.LOWEST, tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        out = pages_triton.zeros(v, V_GROUP, BLOCK_Q, D)
        for block in range(low // BLOCK_KV * BLOCK_KV, high, BLOCK_KV):
            key = block + tl.arange(0, BLOCK_KV)
            seen = (key >= low) & (key < high)
            page = tl.load(table + segment.to(tl.int64) * PAGES + key // PAGE, mask=seen, other=0)
            page = pages_triton.rows_of(page, layer, N)
            keys = pages_triton.load_tokens(
                k, k_scales, page, key % PAGE, head, seen, queries[0].dtype, HEADS, PAGE, D, K_GROUP, K_ZEROS, FLOAT8
            )
            values = pages_triton.load_tokens(
                v, v_scales, page, key % PAGE, head, seen, v_dtype, HEADS, PAGE, D, V_GROUP, V_ZEROS, FLOAT8
            )
            visible = seen[None, :] & in_use[:, None]
            if WINDOW > 0:
                in_window = key[None, :] > position[:, None] - WINDOW
            else:
                in_window = visible
            if WORDS > 0:
                node = key - committed
                own = visible & (node >= 0)[None, :]
                word = masks + (segment * Q + row[:, None]) * WORDS + node[None, :] // 32
                related = (tl.load(word, mask=own, other=0) >> (node & 31).to(tl.uint32)[None, :]) & 1
                visible &= ((node < 0)[None, :] & in_window) | (own & (related == 1))
            else:
                visible &= in_window & (key[None, :] <= position[:, None])
            peak, total, out = pages_triton.attend(
                queries, keys, values, visible, peak, total, out, factor * SCALE, SOFTCAP
            )
        place = at * SLOTS + split
        tl.store(peaks + place, peak, mask=in_use)
        tl.store(totals + place, total, mask=in_use)
        pages_triton.store(partial + place * D, out, tl.full([BLOCK_Q], 1.0, tl.float32), in_use)


@triton.jit
def _merge(
    partial, peaks, totals, lengths, rows, sinks, merged,
    Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    SLOTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(0) // (Q * H)
    length, used = tl.load(lengths + segment), tl.load(rows + segment)
    start, size = _bounds(length, used, WINDOW, SPLIT, SPLITS)
    row = tl.program_id(0) // H % Q
    split = tl.arange(0, SPLITS)
    given = (split < tl.cdiv(length, size) - start // size) & (row < used)
    column = tl.arange(0, D)
    peak = tl.load(peaks + at * SLOTS + split, mask=given, other=pages_triton.LOWEST)
    total = tl.load(totals + at * SLOTS + split, mask=given, other=0.0)
    outs = tl.load(partial + (at * SLOTS + split)[:, None] * D + column[None, :], mask=given[:, None], other=0.0)
    top = tl.max(peak, axis=0)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(0) % H).to(tl.float32) * pages_triton.LOG2_OF_E
        top = tl.maximum(top, sink)
    weight = tl.exp2(peak - top)
    total = tl.sum(total * weight, axis=0)
    if SINKS:
        total += tl.exp2(sink - top)
    out = tl.sum(outs * weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    tl.store(merged + at * D + column, out.to(merged.dtype.element_ty))
