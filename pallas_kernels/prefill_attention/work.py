"""Plans prefill_attention: chunks cut into tiles of query rows, the longest first, and short ones packed."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_formats import bytes_per_token
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.hopper.hopper import CACHED, SMS
from pallas_kernels.prefill_attention.config import Config, TritonConfig, choose_config, packings

LEAST_ITEMS = SMS * 3 // 2  # tiles of heads that are computed together
# Columns of Work.tiles.
CHUNK, ROW, ROWS, POSITION, KEYS, NUM_COLUMNS = range(6)
HEAD, PART = NUM_COLUMNS, NUM_COLUMNS + 1  # and of Work.items
CUT = 0  # in Work.parts: how many tiles are cut
AREAS = 2048  # of 64 rows of partial results: they bound how many parts of tiles are items


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """Describes the tiles of a step; depends on lengths alone, so that one list serves every layer. tiles i32[W, 5] has
    one row a tile: its chunk, its first row of q and its rows. Then come the position of its first row in the sequence,
    and the keys of the chunk. Rows that no chunk owns have tiles that see no key (position = -rows), so that they come
    out zero. By count i32[1 + P] the first count[0] tiles are each computed alone. Then come count[1 + i] of which
    packings[i] at a time share a warpgroup. The Hopper kernel computes those that are alone in the order of items
    i32[W K, 6]: a tile, and the first query head of one KV head.

    With config.part, the first parts[CUT] tiles are cut, and the first W K items are of the others. Each further item
    is one part of a cut tile, whose number is column PART. By parts i32[W + 2] there are parts[CUT + 1 + i] of them
    before the i-th tile."""

    tiles: jax.Array
    count: jax.Array
    items: jax.Array | None
    window: int | None = field(metadata={"static": True})
    config: Config | TritonConfig = field(metadata={"static": True})
    parts: jax.Array | None = None


def make_work(
    q: jax.Array | jax.ShapeDtypeStruct,
    pages: KVPages,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    window: int | None = None,
    config: Config | TritonConfig | None = None,
    part: int | None = None,
) -> Work:
    """Returns the work list of a step: arguments as prefill_attention's; of q and pages the shapes and dtypes are
    enough. `part` is for the configuration that is chosen here without one. The list has a static number of tiles: full
    ones, and one partial tile a chunk. They are sorted by the keys that they read, so that what starts last is short.
    The order decides when a tile is computed, never what it holds. How many share a warpgroup depends on their own rows
    and keys alone."""
    config = config or replace(choose_config(q, pages, kv_lens.shape[0]), part=part)
    packed = packings(config, q.shape[1], pages.k.page_size) if isinstance(config, Config) else ()
    num_rows, num_chunks, tile_rows = q.shape[0], kv_lens.shape[0], config.tile_rows
    num_tiles = num_rows // tile_rows + num_chunks + 1
    rows_end = jnp.full((1,), num_rows, jnp.int32)
    begin, end = cu_q_lens, jnp.concatenate([cu_q_lens[1:], rows_end])  # the last "chunk" is what no chunk owns
    counts = (end - begin + tile_rows - 1) // tile_rows
    ends = jnp.cumsum(counts, dtype=jnp.int32)

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    chunk = jnp.sum((ends[None, :] <= tile[:, None]).astype(jnp.int32), axis=1)
    chunk = jnp.minimum(chunk, num_chunks)
    row = begin[chunk] + (tile - (ends - counts)[chunk]) * tile_rows
    rows = jnp.clip(end[chunk] - row, 0, tile_rows)
    keys = jnp.concatenate([kv_lens, jnp.zeros(1, jnp.int32)])[chunk]
    position = jnp.where(chunk < num_chunks, keys - (end[chunk] - row), -rows)

    read = position + rows
    if window is not None:
        read = jnp.minimum(read, rows + window - 1)
    pack = jnp.full((num_tiles,), -1, jnp.int32)  # which of the packings, -1: none
    for i, slots in enumerate(packed):
        assert isinstance(config, Config)
        fits = (rows <= config.queries // slots) & (keys <= config.block_kv // slots) & (keys > 0)
        pack = jnp.where(fits, i, pack)
    cost = jnp.where(pack < 0, read, -1 - pack)
    cost = jnp.where(tile < ends[-1], cost, -1 - len(packed))
    # A rank by comparison: for some hundred tiles cheaper than a sort, and stable.
    before = (cost[None, :] > cost[:, None]) | ((cost[None, :] == cost[:, None]) & (tile[None, :] < tile[:, None]))
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    tiles = jnp.stack([chunk, row, rows, position, keys], axis=1)
    tiles = jnp.zeros_like(tiles).at[rank].set(tiles, unique_indices=True)
    kinds = jnp.arange(-1, len(packed), dtype=jnp.int32)
    count = jnp.sum((pack[None, :] == kinds[:, None]) & (tile < ends[-1])[None, :], axis=1, dtype=jnp.int32)
    if not isinstance(config, Config):
        return Work(tiles, count, None, window, config)
    own = end[:-1] - begin[:-1]
    most = kv_lens if window is None else jnp.minimum(kv_lens, own + window - 1)
    kv_heads, keys = pages.k.values.shape[1], jnp.sum(jnp.where(own > 0, most, 0))
    together = config.together or _heads_together(q, pages, config, keys, count[0])
    if config.part is None:
        return Work(tiles, count, _items(tiles, count[0], kv_heads, together, q.shape[1]), window, config)
    sets, pool = q.shape[1] // kv_heads // (config.heads * config.stack), pages.k.num_pages * pages.k.page_size
    room = min(AREAS // (kv_heads * sets * config.warpgroups), pool // config.part + num_chunks)
    first, parts = _cuts(tiles, count[0], window, config, kv_heads * sets, room)
    whole = _items(tiles, count[0] - parts[CUT], kv_heads, together, q.shape[1], parts[CUT])
    whole = jnp.pad(whole, ((0, 0), (0, 1)))
    items = jnp.concatenate([whole, _items_of_parts(tiles, first, parts[CUT + 1 :], room, kv_heads, q.shape[1])])
    return Work(tiles, count, items, window, config, parts)


def _cuts(
    tiles: jax.Array, alone: jax.Array, window: int | None, config: Config, heads: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the first part i32[W] in which each tile sees a key, and Work.parts. `heads` items share a tile. The
    longest tiles are cut, up to `most` parts, if they take longer than what a CTA gets when all get the same."""
    assert config.part is not None
    number = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    low, end = tiles[:, POSITION], tiles[:, POSITION] + tiles[:, ROWS]
    low = jnp.zeros_like(end) if window is None else jnp.maximum(low - (window - 1), 0)
    first = low // config.part
    count = jnp.where((number < alone) & (end > 0), (end - 1) // config.part - first + 1, 0)
    long = (count > 1) & (2 * config.ctas * count > 3 * heads * jnp.sum(count, dtype=jnp.int32))
    cut = jnp.cumprod((long & (jnp.cumsum(count, dtype=jnp.int32) <= most)).astype(jnp.int32), dtype=jnp.int32)
    ends = jnp.cumsum(count * cut, dtype=jnp.int32)
    return first, jnp.concatenate([jnp.sum(cut, dtype=jnp.int32)[None], jnp.zeros(1, jnp.int32), ends])


def _items_of_parts(
    tiles: jax.Array, first: jax.Array, begins: jax.Array, most: int, kv_heads: int, num_heads: int
) -> jax.Array:
    """Returns the items i32[most K, 7] of cut tiles: part by part, and of each all KV heads. begins i32[W + 1] parts
    come before each tile."""
    number = jnp.arange(most, dtype=jnp.int32)
    tile = jnp.sum((begins[None, 1:] <= number[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    tile = jnp.minimum(tile, tiles.shape[0] - 1)
    part = first[tile] + number - begins[tile]
    head = jnp.arange(kv_heads, dtype=jnp.int32) * (num_heads // kv_heads)
    fields = (
        jnp.repeat(tiles[tile], kv_heads, axis=0),
        jnp.tile(head, most)[:, None],
        jnp.repeat(part, kv_heads)[:, None],
    )
    return jnp.concatenate(fields, axis=1)


def _heads_together(
    q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, config: Config, keys: jax.Array, tiles: jax.Array
) -> jax.Array:
    """Returns how many KV heads are computed before the next ones, with `keys` keys in all chunks: so many that the L2
    cache holds their K and V, but at least so many that their tiles keep all CTAs busy for a while."""
    kv_heads, each = pages.k.values.shape[1], bytes_per_token(q.shape[2], 1, pages.k.format, pages.v.format)
    found = jnp.int32(kv_heads)
    for heads in (heads for heads in range(kv_heads - 1, 0, -1) if kv_heads % heads == 0):
        busy = tiles * (heads * q.shape[1] // kv_heads // (config.heads * config.stack)) >= LEAST_ITEMS
        found = jnp.where(busy & (keys > CACHED // (each * found)), heads, found)
    return found


def _items(
    tiles: jax.Array,
    alone: jax.Array,
    kv_heads: int,
    together: jax.Array | int,
    num_heads: int,
    skipped: jax.Array | int = 0,
) -> jax.Array:
    """Returns Work.items of `alone` tiles after the `skipped` first ones. All tiles of `together` KV heads come before
    those of the next ones. Of these blocks every other one begins with its shortest tiles, so that CTAs get as much as
    each other. The last one ends with them."""
    item = jnp.arange(tiles.shape[0] * kv_heads, dtype=jnp.int32)
    block, rest = jnp.divmod(item, jnp.maximum(alone * together, 1))
    rank, head = jnp.divmod(rest, together)
    rank = jnp.where((kv_heads // together - 1 - block) % 2 == 1, alone - 1 - rank, rank)
    head = (block * together + head) * (num_heads // kv_heads)
    return jnp.concatenate([tiles[jnp.clip(rank + skipped, 0, tiles.shape[0] - 1)], head[:, None]], axis=1)
