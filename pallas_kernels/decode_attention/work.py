"""Plans decode_attention: which CTA attends to which keys, computed on the device once a step.

A work item is one split of the keys of one row of the batch, for as many heads as warpgroups compute. A row is a
sequence with its query or its short segment of them. A "head" below is a KV head with a chunk of its query heads, or a
pair of these. Splits end at multiples of a number of tokens that depends on the row's own length alone, so that results
are batch-invariant. Items are ordered by row, head and split. Each worker takes a contiguous run of about equally many
tiles.

The result of a head is the sum of its splits' from left to right. A worker that has the first splits of a head adds
them up itself. Where it has them all, that is the result. Where the head goes on in the next worker, the sum so far is
a *partial result*. Each further split is another one. Their sum, in their order, is the same additions wherever the
head was cut.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_attention.config import ROWS, Config, choose_config, most_queries
from pallas_kernels.formats.segments import Segments, depths, within


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """Lists the items of each worker. Rows are counted among the used ones: row `rows[i]` of the batch is used row
    i."""

    rows: jax.Array  # i32[R] the used rows first
    lengths: jax.Array  # i32[R] of these rows: 0 for the unused ones at the end
    log2_splits: jax.Array  # i32[R] of the tokens of a split of these rows
    first: jax.Array  # i32[3, W] used row, head and split (within the row) of each worker's first item
    items: jax.Array  # i32[W] how many it has
    slots: jax.Array  # i32[W] where its partial results begin
    cuts: jax.Array  # i32[4, W] row, head, first partial result and number of them, of the head that goes on after it
    heads: int = field(metadata={"static": True})  # items a row and split: its heads, or pairs of them
    window: int | None = field(metadata={"static": True})
    config: Config = field(metadata={"static": True})
    width: int = field(default=1, metadata={"static": True})  # Q
    segments: jax.Array | None = None  # i32[R] used queries of these rows, where Q > 1
    trees: jax.Array | None = None  # what columns_of_trees makes, where segments are trees


def log2_of_split(length: jax.Array, window: int | None, config: Config) -> jax.Array:
    """Returns log2 of the tokens of a split of rows of `length` keys. It is config.split, doubled until
    config.most_splits cover what is seen, and once where two would. So short rows are not split, unless a window
    straddles an end."""
    seen = length if window is None else jnp.minimum(length, window)
    doublings = 32 - lax.clz(jnp.maximum(seen - 1, 0) // (config.split * config.most_splits))
    doublings = jnp.where(seen <= 2 * config.split, 1, doublings)
    return config.split.bit_length() - 1 + doublings


def row_splits(length: jax.Array, log2_split: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the first visible key, the first split and the number of splits of rows of `length` keys (0: none)."""
    start = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)
    first = lax.shift_right_logical(start, log2_split)
    return start, first, lax.shift_right_logical(length + (1 << log2_split) - 1, log2_split) - first


def reach(window: int | None, rows: Any) -> Any:
    """Returns how many of its keys a segment of `rows` queries (None: one) sees, at most (None: all)."""
    return window if window is None or rows is None else window + (rows - 1)


def padded(queries: int) -> int:
    """Returns the columns of a product."""
    return -(-queries // 8) * 8


def query_chunks(num_heads: int, num_kv_heads: int, head_dim: int, width: int = 1) -> tuple[int, int]:
    """Returns heads of work a KV head, and the query heads of each, with `width` queries each. The last ones overlap
    where they don't divide."""
    most = most_queries(head_dim) // width
    chunks = -(-(num_heads // num_kv_heads) // most)
    return chunks, -(-(num_heads // num_kv_heads) // chunks)


def items_of_row(heads: int, config: Config) -> int:
    """Returns work items a row and split. Raises ValueError for heads that warpgroups can't share."""
    if heads % config.computing:
        raise ValueError(f"computing is {config.computing}, expected 1 for an odd number of heads ({heads})")
    return heads // config.computing


def make_work(
    lengths: jax.Array,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    narrow: bool = False,
    width: int = 1,
    segments: Segments | None = None,
    config: Config | None = None,
) -> Work:
    """Returns the work list that every layer of a step shares. lengths i32[R] and `segments` of `width` (Q) queries are
    as decode_attention takes them. `narrow`: K and V are both in 8 or 4 bits. Raises ValueError where `config` has
    pairs of an odd number of heads."""
    chunks, each = query_chunks(num_heads, num_kv_heads, head_dim, width)
    config = config or choose_config(head_dim, each * width, num_kv_heads * chunks, narrow)
    if segments is not None:
        lengths = jnp.where(segments.rows > 0, lengths, 0)  # of an unused segment nothing is read
    elif width > 1:
        segments = Segments(jnp.where(lengths > 0, width, 0))
    heads = items_of_row(num_kv_heads * chunks, config)
    tile, workers = ROWS, config.workers
    rows = jnp.argsort(lengths == 0, stable=True).astype(jnp.int32)
    lengths = lengths[rows]  # in the order of work; the unused rows at the end have no tiles
    queries = trees = None
    if segments is not None and width > 1:
        queries, trees = segments.rows[rows], columns_of_trees(segments, window, each)
    log2_splits = log2_of_split(lengths, window, config)
    start, _, splits = row_splits(lengths, log2_splits, reach(window, queries))
    tiles = (lengths + (tile - 1)) // tile - start // tile
    begin_tiles = _exclusive_sum(tiles) * heads  # [R + 1]
    begin_items = _exclusive_sum(splits) * heads
    worker = jnp.arange(workers + 1, dtype=jnp.int32)
    total = begin_tiles[-1]
    target = worker * (total // workers) + jnp.minimum(worker, total % workers)
    # The first item that begins at or after tile `target`.
    used = jnp.sum((begin_tiles[None, 1:] <= target[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    at = jnp.minimum(used, lengths.shape[0] - 1)
    row_tiles, tiles_of_split = jnp.maximum(tiles[at], 1), (1 << log2_splits[at]) // tile
    inside = target - begin_tiles[at]
    head, at_tile = inside // row_tiles, inside % row_tiles
    skipped = (start[at] // tile) % tiles_of_split  # tiles of the first split that the window hides
    index = (at_tile + skipped + (tiles_of_split - 1)) // tiles_of_split
    index = jnp.where(at_tile == 0, 0, index)
    # Past a row's last split lies the next head's first, and past its last head the next row's.
    head, index = jnp.where(index >= splits[at], head + 1, head), index % jnp.maximum(splits[at], 1)
    flat = jnp.where(used > at, begin_items[-1], begin_items[at] + head * splits[at] + index)
    items = flat[1:] - flat[:-1]
    # A worker writes the splits of the head that it only goes on with, and the sum of those that it begins a head with.
    alone = jnp.where(index[:-1] > 0, jnp.minimum(items, splits[at[:-1]] - index[:-1]), 0)
    begins = jnp.logical_and(index[1:] > 0, index[1:] <= items)
    slots = _exclusive_sum(alone + begins.astype(jnp.int32))[:-1]
    count = jnp.where(begins, 1 + splits[at[1:]] - index[1:], 0)
    return Work(
        rows=rows,
        lengths=lengths,
        log2_splits=log2_splits,
        first=jnp.stack([jnp.where(head >= heads, used + 1, used), head % heads, index])[:, :-1],
        items=items,
        slots=slots,
        cuts=jnp.stack([rows[at[1:]], head[1:] % heads, slots + alone, count]),
        heads=heads,
        window=window,
        config=config,
        width=width,
        segments=queries,
        trees=trees,
    )


def columns_of_trees(segments: Segments, window: int | None, heads: int) -> jax.Array | None:
    """Returns, for each column of the segments' queries, the number of its ancestors and the words of its mask. Queries
    have `heads` heads each, padded to columns. A mask is of ancestors that the window holds: i32[R, 1 + words,
    columns]; None of chains."""
    masks = segments.ancestors
    if masks is None:
        return None
    width = masks.shape[1]
    held = masks if window is None or window >= width else within(masks, window)
    words = lax.bitcast_convert_type(held, jnp.int32).swapaxes(1, 2)
    each = jnp.repeat(jnp.concatenate([depths(masks)[:, None], words], axis=1), heads, axis=2)
    return jnp.pad(each, ((0, 0), (0, 0), (0, padded(each.shape[2]) - each.shape[2])))


def max_slots(
    num_rows: int, max_tokens: int, items: int, window: int | None, config: Config, width: int = 1
) -> tuple[int, int]:
    """Returns the most partial results of a head and of all; 0 if none is ever split. Rows have up to `max_tokens` keys
    with `items` a split and `width` queries."""
    if max_tokens <= 2 * config.split:
        return 0, 0
    edges = 0 if window is None else min(width, 2)  # of a window, and of the keys that further rows see before it
    most = min(-(-max_tokens // config.split), config.most_splits + edges)
    if window is not None:
        seen = reach(window, width)
        most = min(most, (seen - 2) // config.split + 2 if seen > 1 else 1)
    return (most, min(num_rows * items, config.workers - 1) * most) if most > 1 else (0, 0)


def _exclusive_sum(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
