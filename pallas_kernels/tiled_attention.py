"""Attends query tiles over paged K and V in plain jnp: the xla backend of decode and of prefill. Online softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867) runs over KV blocks that are aligned to absolute positions and have a
fixed number of tokens. So a row's result depends neither on other rows nor on the page size."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats.hadamard import turn
from pallas_kernels.formats.kv_pages import KVPages, gather, gather_tokens
from pallas_kernels.formats.kv_tail import is_new, newest
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.segments import WORD

KV_BLOCK = 128  # tokens; a multiple of every page size supported


def check_page_size(page_size: int) -> None:
    """Raises NotImplementedError for pages that don't tile a KV block."""
    if page_size < 1 or KV_BLOCK % page_size:
        raise NotImplementedError(f"page size {page_size} is not supported by backend xla: it must divide {KV_BLOCK}")


class Trees(NamedTuple):
    """Holds the last keys of each tile's sequence, seen by ancestry instead of by their place."""

    start: jax.Array  # i32[W], the first one's cache index: key start + j is row j's
    ancestors: jax.Array  # u32[W, Q, words], bit j % 32 of word j // 32 of row i: row j is i itself or its ancestor
    depth: jax.Array  # i32[W, Q], position of row j: start + depth


class Moved(NamedTuple):
    """Says where keys of each tile's sequence lie that are not in the order of their positions."""

    start: jax.Array  # i32[W], the first one's position
    nodes: jax.Array  # i32[W, n], the key at position start + d has cache index start + nodes[d]


def attend(
    q: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    positions: jax.Array,
    scale: float,
    window: int | None,
    trees: Trees | None = None,
    own_row: jax.Array | None = None,
    moved: Moved | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns attention of W tiles of Q query rows: q [W, Q, H, D] gives [W, Q, H, D].

    tables i32[W, M] is the page table of each tile's sequence. positions i32[W, Q] is each row's own position in it, -1
    for an unused row, whose result is zero. A row sees the keys up to its own position. With `trees` it sees the keys
    before `start`, and behind these only its ancestors' keys and its own. Reads only pages that hold a key visible to
    the tile. If the pages have a tail, own_row i32[W] is a row of the step that belongs to each tile's sequence. With
    `moved`, keys are read one by one, from the places that it names; the pages then have no tail.
    `softcap` and `sinks` are as in decode_attention.
    """
    num_tiles, rows, num_heads, head_dim = q.shape
    num_kv_heads, page_size = pages.k.values.shape[1:3]
    compute = compute_dtype(q.dtype)
    lowest = jnp.finfo(compute).min  # finite: lowest - lowest is 0, which leaves a fully masked block without effect
    grouped = (num_tiles, rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q = q.astype(compute) * scale
    if pages.k.format.hadamard:  # scores of both rotated are those of neither
        q = turn(q)
    q = q.reshape(grouped).transpose(0, 2, 1, 3, 4)

    block_pages = KV_BLOCK // page_size
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % block_pages)))
    page_starts = page_size * jnp.arange(block_pages, dtype=jnp.int32)
    tokens = jnp.arange(KV_BLOCK, dtype=jnp.int32)
    used = positions >= 0
    if trees is None:
        end = jnp.max(positions, axis=1) + 1  # [W] keys of a tile: start <= j < end
    else:
        end = jnp.where(used.any(axis=1), trees.start, 0) + used.sum(axis=1, dtype=jnp.int32)
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)
    start = jnp.min(jnp.where(used, first, jnp.iinfo(jnp.int32).max), axis=1)

    def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, acc = carry
        page = jax.lax.dynamic_slice_in_dim(tables, block * block_pages, block_pages, axis=1)
        at = block * KV_BLOCK + page_starts[None, :]
        page = jnp.where((at < end[:, None]) & (at + page_size > start[:, None]), page, 0)
        key = (block * KV_BLOCK + tokens)[None, None, :]
        if trees is None:
            mask = (key <= positions[:, :, None]) & (key >= first[:, :, None])  # [W, Q, t]
        else:
            mask = _visible(key, trees, first) & used[:, :, None]
        if moved is None:
            k, v = (gather(part.as_stored, page, compute) for part in (pages.k, pages.v))  # [W, K, t, D]
        else:
            index = _index(jnp.broadcast_to(key[0], (num_tiles, KV_BLOCK)), moved)
            k, v = (gather_tokens(part.as_stored, tables, index, compute) for part in (pages.k, pages.v))
        new = None
        if pages.tail is not None:
            assert own_row is not None
            index = block * KV_BLOCK + tokens
            new = is_new(pages.k.format, index[None, None, :], positions[:, :, None])
            at = jnp.broadcast_to(index, (num_tiles, KV_BLOCK))
            own_k, own_v = (x.astype(compute) for x in newest(pages.tail, own_row, at))
            own_v = jnp.where(jnp.any(mask & new, axis=1)[:, None, :, None], own_v, 0)
        stored = mask if new is None else mask & ~new
        v = jnp.where(jnp.any(stored, axis=1)[:, None, :, None], v, 0)
        mask = mask[:, None, :, None, :]
        logits = jnp.einsum("wkqgd,wktd->wkqgt", q, k, precision="highest")
        if new is not None:
            new = new[:, None, :, None, :]
            logits = jnp.where(new, jnp.einsum("wkqgd,wktd->wkqgt", q, own_k, precision="highest"), logits)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        new_peak = jnp.maximum(peak, jnp.max(jnp.where(mask, logits, lowest), axis=-1))
        p = jnp.where(mask, jnp.exp(logits - new_peak[..., None]), 0)
        decay = jnp.exp(peak - new_peak)
        pv = jnp.einsum("wkqgt,wktd->wkqgd", p if new is None else jnp.where(new, 0, p), v, precision="highest")
        if new is not None:
            pv += jnp.einsum("wkqgt,wktd->wkqgd", jnp.where(new, p, 0), own_v, precision="highest")
        return new_peak, total * decay + jnp.sum(p, axis=-1), acc * decay[..., None] + pv

    zeros = jnp.zeros(q.shape[:-1], compute)
    blocks = (jnp.min(start) // KV_BLOCK, (jnp.max(end) + KV_BLOCK - 1) // KV_BLOCK)
    peak, total = zeros + lowest, zeros
    if sinks is not None:  # as if each row had seen a key of this logit, whose value is zero
        peak, total = zeros + sinks.astype(compute).reshape(1, num_kv_heads, 1, -1), zeros + 1
    _, total, acc = jax.lax.fori_loop(*blocks, body, (peak, total, jnp.zeros_like(q)))
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    if pages.v.format.hadamard:
        out = turn(out)
    return out.transpose(0, 2, 1, 3, 4).reshape(num_tiles, rows, num_heads, head_dim)


def _index(position: jax.Array, moved: Moved) -> jax.Array:
    """Returns the cache indices of keys at positions i32[W, t]."""
    start = moved.start[:, None]
    depth = jnp.clip(position - start, 0, moved.nodes.shape[1] - 1)
    return jnp.where(position < start, position, start + jnp.take_along_axis(moved.nodes, depth, axis=1))


def _visible(key: jax.Array, trees: Trees, first: jax.Array) -> jax.Array:
    """Returns bool[W, Q, t]: whether row i sees the key at cache index key [1, 1, t]. Row i sees positions from first
    [W, Q] on."""
    row = key - trees.start[:, None, None]  # [W, 1, t]
    node = jnp.clip(row, 0, trees.depth.shape[1] - 1)
    own = (row >= 0) & (row < trees.depth.shape[1])
    word = jnp.take_along_axis(trees.ancestors, node // WORD, axis=2)  # [W, Q, t]
    related = (word >> (node % WORD).astype(jnp.uint32)) & jnp.uint32(1)
    position = trees.start[:, None] + jnp.take_along_axis(trees.depth, node[:, 0], axis=1)  # [W, t]
    committed = (row < 0) & (key >= first[:, :, None])
    return committed | (own & (related == 1) & (position[:, None, :] >= first[:, :, None]))
