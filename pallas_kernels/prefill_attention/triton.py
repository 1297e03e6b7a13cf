"""Runs prefill_attention on Ampere, Ada and Hopper. A program has a tile of query rows of one head, and reads the keys
that these see, block by block."""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.backends import on_hopper
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.prefill_attention.config import TritonConfig, triton_config
from pallas_kernels.prefill_attention.work import Work, make_work
from pallas_kernels.triton import pages_triton, triton_call
from pallas_kernels.triton.triton_call import Launch


@partial(jax.jit, static_argnames=("scale", "window", "softcap"))
def prefill_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    scale: float,
    window: int | None,
    work: Work | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns [C, H, D] of q [C, H, D], page_table i32[B, M], cu_q_lens i32[B + 1] and kv_lens i32[B]; see api.py."""
    if q.shape[0] == 0 or page_table.shape[0] == 0:
        return jnp.zeros_like(q)
    work = work or plan(q, pages, cu_q_lens, kv_lens, window=window)
    if work.window != window:
        raise ValueError(f"work was made for window {work.window}, not {window}")
    q, scale = pages_triton.upright(q, scale)
    pools = *pages_triton.arrays(pages.k), *pages_triton.arrays(pages.v), pages.k.layer_operand
    made = launch(q, pages, page_table, work, scale, softcap, sinks is not None)
    arrays = q, *pools, page_table, work.tiles, work.count
    return triton_call.call(made, *arrays, work.count if sinks is None else sinks)[0]


def plan(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    window: int | None = None,
) -> Work:
    """Returns the work list of a step, in tiles of this kernel's size."""
    config = triton_config(q, pages, kv_lens.shape[0], on_hopper())
    return make_work(q, pages, cu_q_lens, kv_lens, window=window, config=config)


def launch(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    page_table: jax.Array | jax.ShapeDtypeStruct,
    work: Work,
    scale: float,
    softcap: float | None = None,
    sinks: bool = False,
) -> Launch:
    """Returns the launch for arrays or their shapes and dtypes. Arguments: q, K's values and scales, V's, the layer,
    the page table, the tiles and the count of the work list, and sinks (without them, any array)."""
    (_, H, D), (K, page), config = q.shape, pages.k.values.shape[1:3], work.config
    if not isinstance(config, TritonConfig):
        raise ValueError("work was made for backend mosaic, not triton")
    constants = {
        "SCALE": scale * pages_triton.LOG2_E, "H": H, "D": D, "HEADS": K, "PAGE": page,
        "N": pages.k.num_pages, "PAGES": page_table.shape[1], "WINDOW": work.window or 0,
        "K_GROUP": pages.k.format.group or 0, "K_ZEROS": pages.k.format.zero_point,
        "V_GROUP": pages.v.format.group or 0, "V_ZEROS": pages.v.format.zero_point,
        "FLOAT8": pages_triton.reads_float8(), "SOFTCAP": (softcap or 0.0) * pages_triton.LOG2_E,
        "BLOCK_Q": config.tile_rows, "BLOCK_KV": config.block_kv, "SINKS": sinks,
    }  # fmt: skip
    return Launch(
        _tile,
        (jax.ShapeDtypeStruct(q.shape, q.dtype),),
        (H, work.tiles.shape[0]),
        constants,
        num_warps=config.warps,
        num_stages=config.stages,
    )


@triton.jit
def _tile(
    q, k, k_scales, v, v_scales, layer, table, tiles, count, sinks, out,
    SCALE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    N: tl.constexpr, PAGES: tl.constexpr, WINDOW: tl.constexpr, K_GROUP: tl.constexpr, K_ZEROS: tl.constexpr,
    V_GROUP: tl.constexpr, V_ZEROS: tl.constexpr, FLOAT8: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.load(count) - 1 - tl.program_id(1)  # a chunk's last tiles, the longest, first
    if tile >= 0:
        chunk, first, rows = tl.load(tiles + tile * 5), tl.load(tiles + tile * 5 + 1), tl.load(tiles + tile * 5 + 2)
        begin = tl.load(tiles + tile * 5 + 3)  # the first row's position
        row = tl.arange(0, BLOCK_Q)
        at = ((first + row).to(tl.int64) * H + head) * D
        queries, factor = pages_triton.load_queries(q + at, row < rows, k, D, K_GROUP)
        v_dtype: tl.constexpr = pages_triton.product_dtype(v, q.dtype.element_ty)
        position = begin + row
        end = begin + rows
        start = 0
        if WINDOW > 0:
            start = tl.maximum(begin + 1 - WINDOW, 0)
        before = start // BLOCK_KV * BLOCK_KV
        # Up to here all rows see all keys. Rows that no chunk owns, with positions below 0, have no key at all.
        whole = before if WINDOW > 0 else tl.maximum(begin + 1, 0) // BLOCK_KV * BLOCK_KV
        peak = tl.full([BLOCK_Q], pages_triton.LOWEST, tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        if SINKS:
            peak = tl.maximum(peak, tl.load(sinks + head).to(tl.float32) * pages_triton.LOG2_OF_E)
            total += 1.0
        sums = pages_triton.zeros(v, V_GROUP, BLOCK_Q, D)
        for masked in tl.static_range(2):
            for block in range(whole if masked else before, end if masked else whole, BLOCK_KV):
                key = block + tl.arange(0, BLOCK_KV)
                seen = (key >= start) & (key < end) if masked else tl.full([BLOCK_KV], True, tl.int1)
                page = tl.load(table + chunk.to(tl.int64) * PAGES + key // PAGE, mask=seen, other=0)
                page = pages_triton.rows_of(page, layer, N)
                keys = pages_triton.load_tokens(
                    k, k_scales, page, key % PAGE, head * HEADS // H, seen, queries[0].dtype, HEADS, PAGE, D,
                    K_GROUP, K_ZEROS, FLOAT8,
                )  # fmt: skip
                values = pages_triton.load_tokens(
                    v, v_scales, page, key % PAGE, head * HEADS // H, seen, v_dtype, HEADS, PAGE, D,
                    V_GROUP, V_ZEROS, FLOAT8,
                )  # fmt: skip
                visible = tl.full([BLOCK_Q, BLOCK_KV], True, tl.int1)
                if masked:
                    visible = key[None, :] <= position[:, None]
                    if WINDOW > 0:
                        visible &= key[None, :] > position[:, None] - WINDOW
                peak, total, sums = pages_triton.attend(
                    queries, keys, values, visible, peak, total, sums, factor * SCALE, SOFTCAP
                )
        pages_triton.store(out + at, sums, tl.where(total == 0, 1.0, total), row < rows)
