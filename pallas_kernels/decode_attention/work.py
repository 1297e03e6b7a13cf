"""The work list of decode_attention: which CTA attends to which keys, computed on the device once a step.

A work item is one split of the keys of one row, for as many heads as warpgroups compute: a KV head with a chunk of its
query heads, or a pair of these, which is what "head" stands for below. Splits end at multiples of a number of tokens
that depends on the row's own length alone, so that results are batch-invariant. Items are ordered by
row, head and split; each worker takes a contiguous run of about equally many tiles.

The result of a head is the sum of its splits' from left to right. A worker that has the first splits of a head adds
them up itself; where it has them all, that is the result. Where the head goes on in the next worker, the sum so far is
a *partial result*, and each further split is another one: their sum, in their order, is the same additions wherever the
head was cut.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.decode_attention.config import ROWS, Config, choose_config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """The items of each worker. Rows are counted among the used ones: row `rows[i]` of the batch is used row i."""

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


def log2_of_split(length: jax.Array, window: int | None, config: Config) -> jax.Array:
    """Log2 of the tokens of a split of rows of `length` keys: of config.split, doubled until config.most_splits cover
    what is seen, and once where two would, so that short rows are not split (but where a window straddles an end)."""
    seen = length if window is None else jnp.minimum(length, window)
    doublings = 32 - lax.clz(jnp.maximum(seen - 1, 0) // (config.split * config.most_splits))
    doublings = jnp.where(seen <= 2 * config.split, 1, doublings)
    return config.split.bit_length() - 1 + doublings


def row_splits(length: jax.Array, log2_split: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first visible key, the first split and the number of splits of rows of `length` keys (0: none)."""
    start = jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0)
    first = lax.shift_right_logical(start, log2_split)
    return start, first, lax.shift_right_logical(length + (1 << log2_split) - 1, log2_split) - first


def query_chunks(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Heads of work a KV head, and the query heads of each (the last ones overlap where they don't divide)."""
    most = 16 if head_dim > 128 else 64  # that shared memory has room for
    chunks = -(-(num_heads // num_kv_heads) // most)
    return chunks, -(-(num_heads // num_kv_heads) // chunks)


def items_of_row(heads: int, config: Config) -> int:
    """Work items a row and split. Raises ValueError for heads that warpgroups can't share."""
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
    config: Config | None = None,
) -> Work:
    """The work list that every layer of a step shares. lengths i32[R] as decode_attention takes them; `narrow`: of K
    and V that are both in 8 or 4 bits. Raises ValueError where `config` has pairs of an odd number of heads."""
    chunks, queries = query_chunks(num_heads, num_kv_heads, head_dim)
    config = config or choose_config(head_dim, queries, num_kv_heads * chunks, narrow)
    heads = items_of_row(num_kv_heads * chunks, config)
    tile, workers = ROWS, config.workers
    rows = jnp.argsort(lengths == 0, stable=True).astype(jnp.int32)
    lengths = lengths[rows]  # in the order of work; the unused rows at the end have no tiles
    log2_splits = log2_of_split(lengths, window, config)
    start, _, splits = row_splits(lengths, log2_splits, window)
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
    )


def max_slots(num_rows: int, max_tokens: int, items: int, window: int | None, config: Config) -> tuple[int, int]:
    """The most partial results of a head and of all, for rows of up to `max_tokens` keys with `items` a split; 0
    if none is ever split."""
    if max_tokens <= 2 * config.split:
        return 0, 0
    most = min(-(-max_tokens // config.split), config.most_splits + (window is not None))
    if window is not None:
        most = min(most, (window - 2) // config.split + 2 if window > 1 else 1)
    return (most, min(num_rows * items, config.workers - 1) * most) if most > 1 else (0, 0)


def _exclusive_sum(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(x, dtype=jnp.int32)])
