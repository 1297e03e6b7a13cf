"""The work list of decode_attention: which CTA attends to which keys, computed on the device once a step.

A work item is one split of one KV head's keys of one row. Splits end at multiples of `split` tokens of the sequence,
whatever else is in the batch, so that a row's result doesn't depend on its company. Items are ordered by row, head and
split; each worker takes a contiguous run of about equally many tiles.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.config import Config, choose_config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """The items of each worker. Rows are counted among the used ones: row `rows[i]` of the batch is used row i."""

    rows: jax.Array  # i32[R] the used rows first
    slots: jax.Array  # i32[R] where the partial results of row r begin, if it has several splits
    first: jax.Array  # i32[3, W] used row, head and split (within the row) of each worker's first item
    items: jax.Array  # i32[W] how many it has
    merges: jax.Array  # i32[R] the rows of several splits first
    num_merges: jax.Array  # i32[1]
    heads: int = field(metadata={"static": True})  # items a row and split
    window: int | None = field(metadata={"static": True})
    config: Config = field(metadata={"static": True})


def row_splits(length: jax.Array, window: int | None, split: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first visible key, the first split and the number of splits of rows of `length` keys (0: none)."""
    start = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)
    first = start // split
    return start, first, (length + (split - 1)) // split - first


_MAX_QUERIES = 64  # query heads of one work item


def query_chunks(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Work items a KV head, and the query heads of each (the last ones overlap where they don't divide)."""
    chunks = -(-(num_heads // num_kv_heads) // _MAX_QUERIES)
    return chunks, -(-(num_heads // num_kv_heads) // chunks)


def make_work(
    lengths: jax.Array,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    config: Config | None = None,
) -> Work:
    """The work list that every layer of a step shares. lengths i32[R] as decode_attention takes them."""
    chunks, queries = query_chunks(num_heads, num_kv_heads)
    config = config or choose_config(head_dim, queries)
    tile, split, workers, heads = config.tile, config.split, config.workers, num_kv_heads * chunks
    start, _, splits = row_splits(lengths, window, split)
    tiles = (lengths + (tile - 1)) // tile - start // tile
    rows = jnp.argsort(lengths == 0, stable=True).astype(jnp.int32)
    tiles, splits_of = tiles[rows], splits[rows]  # in the order of work; the unused rows at the end have none
    begin_tiles = _exclusive_sum(tiles) * heads  # [R + 1]
    begin_items = _exclusive_sum(splits_of) * heads
    worker = jnp.arange(workers + 1, dtype=jnp.int32)
    total = begin_tiles[-1]
    target = worker * (total // workers) + jnp.minimum(worker, total % workers)
    # The first item that begins at or after tile `target`.
    row = jnp.sum((begin_tiles[None, 1:] <= target[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    row_in = jnp.minimum(row, lengths.shape[0] - 1)
    row_tiles = jnp.maximum(tiles[row_in], 1)
    inside = target - begin_tiles[row_in]
    head, at_tile = inside // row_tiles, inside % row_tiles
    skipped = (start[rows[row_in]] // tile) % (split // tile)  # tiles of the first split that the window hides
    index = (at_tile + skipped + (split // tile - 1)) // (split // tile)
    index = jnp.where(at_tile == 0, 0, index)
    # Past a row's last split lies the next head's first, and past its last head the next row's.
    head, index = jnp.where(index >= splits_of[row_in], head + 1, head), index % jnp.maximum(splits_of[row_in], 1)
    flat = jnp.where(row > row_in, begin_items[-1], begin_items[row_in] + head * splits_of[row_in] + index)
    row, head = jnp.where(head >= heads, row + 1, row), head % heads
    several = splits > 1
    return Work(
        rows=rows,
        slots=_exclusive_sum(jnp.where(several, splits, 0))[:-1],
        first=jnp.stack([row, head, index])[:, :-1],
        items=flat[1:] - flat[:-1],
        merges=jnp.argsort(~several, stable=True).astype(jnp.int32),
        num_merges=jnp.sum(several.astype(jnp.int32), dtype=jnp.int32)[None],
        heads=heads,
        window=window,
        config=config,
    )


def max_slots(num_rows: int, max_tokens: int, window: int | None, split: int) -> int:
    """The most partial results that rows of up to `max_tokens` keys can have, a head; 0 if no row is ever split."""
    splits = -(-max_tokens // split)
    if window is not None:
        splits = min(splits, (window - 2) // split + 2 if window > 1 else 1)
    return num_rows * splits if splits > 1 else 0


def _exclusive_sum(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
