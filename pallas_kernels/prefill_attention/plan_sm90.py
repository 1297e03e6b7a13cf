"""Holds what the warpgroups of the Hopper kernel of prefill_attention share: sizes, memory, and the walk over tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.kv_formats import KVFormat
from pallas_kernels.formats.kv_pages import Pages, padded_scales
from pallas_kernels.hopper.ring_sm90 import slot_of
from pallas_kernels.hopper.smem_sm90 import swizzled
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS, Config, packings
from pallas_kernels.prefill_attention.work import CHUNK, CUT, HEAD, KEYS, PART, POSITION, ROW, ROWS

# Registers of each thread that computes, converts and fetches, by computing warpgroups and all of them. They are moved
# to where they are needed, out of what the launch took. That is 64 Ki over the threads, rounded down to a multiple of
# 8. To ask for more is to wait forever.
REGISTERS = {
    (1, 2): None, (1, 3): (232, 88, 40), (1, 4): (232, 88, 40), (2, 3): (232, 40, 40), (2, 4): (208, 56, 40),
    (2, 5): (168, 56, 32), (3, 4): (160, 32, 32),
}  # fmt: skip
BOX = 8  # rows of a copy of packed queries, times the heads that share a warpgroup's rows
SCALES = 64  # the fewest that a copy moves: 128 bytes, where the next may begin in shared memory


class Pool(NamedTuple):
    """Holds K or V: the pages, and the KV blocks in flight. Barriers are named for what they say."""

    values: Any  # global
    scales: Any  # flat: [L N, K * P * G], with zeros 2G; padded ones [N, SCALES]
    blocks: Any  # [stages, T, D] as wgmma takes them
    ready: Any
    free: Any
    raw: Any  # what is converted: blocks as stored [stages, T, ..]; else None
    raw_scales: Any  # [stages, pages, >= run * G (2G)], each page's on lines of its own
    raw_ready: Any
    raw_free: Any


class Refs(NamedTuple):
    """Holds global arrays and shared memory of the kernel."""

    q: Any
    table: Any
    tiles: Any
    count: Any
    items: Any
    layer: Any
    parts: Any  # Work.parts; None as config.part is
    sinks: Any  # [H]; None: there are none
    out: Any
    sums: Any  # f32[areas, 64, D]: unnormalized P V of parts, and running sums of CTAs unless Plan.keeps_sums
    weights: Any  # f32[areas, 2, 64]: their peaks and sums of weights
    kept: Any  # f32 [warpgroups, 64, D]: running sums of this CTA, if Plan.keeps_sums; else None
    kept_weights: Any  # f32 [warpgroups, 2, 64]: their peaks and sums of weights
    k: Pool
    v: Pool
    q_raw: Any  # [warpgroups, 64, D], plain rows: tiled copies would have to start at multiples of 8
    q_s: Any  # the same, tiled and swizzled as wgmma wants it
    out_s: Any  # [warpgroups, 64, D], plain rows
    q_ready: Any
    boxes_ready: Any  # queries of packed chunks
    q_free: Any
    v_raw: Any  # V of a boundary block, before its unseen slots are cleared
    turn: Any


class Tile(NamedTuple):
    """Describes one query tile: scalars of the work list, its query heads, and its KV blocks first <= j < last."""

    chunk: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array
    keys: jax.Array
    head: jax.Array  # the first of plan.tile_heads
    low: jax.Array  # the first key that any row sees
    first: jax.Array
    last: jax.Array
    cut: Any = None  # whether the item is one part of the tile; None as config.part is
    area: Any = None  # of the first warpgroup, for sums of parts


class Pack(NamedTuple):
    """Describes short chunks, each of one tile, that share a warpgroup. The i-th has its rows from i * rows on, and its
    keys from i * columns on. Warpgroup w computes the heads from head + w * stack on, with a KV block of its own."""

    first: jax.Array  # of their tiles, which follow each other
    chunks: jax.Array
    slots: jax.Array  # places for chunks
    rows: jax.Array
    columns: jax.Array
    head: jax.Array

    def queries(self, plan: "Plan") -> jax.Array:
        """Returns how many queries have rows in a slot, for each head that shares the warpgroup's rows."""
        return quotient(self.rows, plan.config.stack)

    def tile(self, slot: Any) -> jax.Array:
        """Returns the tile in a slot; where there is none, another."""
        return self.first + jnp.minimum(slot, self.chunks - 1)

    def tile_at(self, place: int, size: int) -> jax.Array:
        """Returns the tile of the slot that a place is in, where all slots together have `size` places."""
        return self.tile(quotient(place * self.slots, size))


def quotient(a: jax.Array, b: int) -> jax.Array:
    """Divides numbers that are not negative: `//` asks for signs, which is more to run and to lower."""
    return lax.div(a, jnp.int32(b))


def flat_scales(pool: Pages) -> jax.Array | None:
    """Returns the pool's scales such that a copy may take some of the next heads' along: [L N, K * P * G]. Where a page
    has too few, they are padded, of the layer alone."""
    if pool.scales is None:
        return None
    scales = pool.scales.reshape(pool.scales.shape[0], -1)
    return scales if scales.shape[1] >= SCALES else padded_scales(pool, SCALES)


@dataclass(frozen=True)
class Plan:
    """Holds static sizes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    dtype: jnp.dtype
    k_format: KVFormat
    v_format: KVFormat
    scale: float
    softcap: float | None
    window: int | None
    config: Config
    first_row: int = 0  # of q and of the result, from which the work list counts rows

    def check(self) -> None:
        """Raises NotImplementedError for a configuration that does not suit the call."""
        config, group = self.config, self.num_heads // self.num_kv_heads
        if group % (config.heads * config.stack):
            heads = config.heads * config.stack
            raise NotImplementedError(f"tiles of {heads} query heads do not divide {group} of a KV head")
        if config.block_kv % self.page_size and self.page_size % config.block_kv:
            raise NotImplementedError(f"blocks of {config.block_kv} keys are not made of pages of {self.page_size}")
        if (config.warpgroups, self.warpgroups) not in REGISTERS:
            raise NotImplementedError(f"{config} takes {self.warpgroups} warpgroups in all, which is not supported")

    @property
    def packings(self) -> tuple[int, ...]:
        return packings(self.config, self.num_heads, self.page_size)

    @property
    def pages(self) -> int:
        """Copies that make a KV block: its pages, or one for a part of a page."""
        return max(1, self.config.block_kv // self.page_size)

    @property
    def run(self) -> int:
        """Counts the tokens of a copy of scales."""
        return min(self.page_size, self.config.block_kv)

    def converts(self, fmt: KVFormat) -> bool:
        """Returns whether blocks of this format are converted before wgmma takes them."""
        return fmt.storage_dtype != self.dtype

    @property
    def warpgroups(self) -> int:
        """Counts the computing warpgroups, the one that fetches, and those that convert."""
        converted = self.converts(self.k_format) + self.converts(self.v_format)
        return self.config.warpgroups + 1 + min(converted, self.config.converters)

    @property
    def keeps_sums(self) -> bool:
        """Returns whether a CTA keeps running sums of parts in shared memory, and not in global memory."""
        return self.config.part is not None and self.config.warpgroups == 1 and self.head_dim <= 128

    @property
    def clears_late(self) -> bool:
        """Returns whether the one warpgroup that computes clears what no query sees of a tile's last block of V. Else
        the one that fetches waits for that block before it goes on."""
        return self.config.warpgroups == 1 and self.window is None and not self.converts(self.v_format)

    @property
    def fetches_by_warp(self) -> bool:
        """Returns whether one warp of the warpgroup that fetches does so, without barriers between the copies. It
        cannot clear what no query sees."""
        return self.clears_late or self.converts(self.v_format)

    def copied_scales(self, fmt: KVFormat) -> int:
        """Counts scales, and zeros, that come with each copy of values: its own, and where those are few, some
        neighbours'."""
        own = self.run * fmt.numbers(self.head_dim)
        return max(SCALES, own) if own else 0

    def pads(self, fmt: KVFormat) -> bool:
        """Returns whether a copy takes more than a page's scales: with one KV head, small pages, and few groups."""
        return 0 < self.num_kv_heads * self.page_size * fmt.numbers(self.head_dim) < SCALES

    def scale_copies(self, fmt: KVFormat) -> list[pl.Slice]:
        """Counts the copies that bring scales: of a dimension, each takes up to 256."""
        count = self.copied_scales(fmt)
        return [pl.ds(start, min(256, count)) for start in range(0, count, 256)]

    def scale_start(self, fmt: KVFormat, head: jax.Array, token: Any) -> tuple[jax.Array, Any]:
        """Returns where in a page's flat scales a query head's copies begin, and where in these its own scales begin.
        They begin from a token of the page on."""
        numbers = fmt.numbers(self.head_dim)
        start = (self.kv_head(head) * self.page_size + token) * numbers
        if self.run * numbers >= SCALES:
            return start, 0
        begin = jnp.minimum(start, max(0, self.num_kv_heads * self.page_size * numbers - SCALES))
        return begin, start - begin

    @property
    def tile_heads(self) -> int:
        return self.config.heads * self.config.stack

    @property
    def sets(self) -> int:
        """Counts the tiles that share the query heads of a KV head."""
        return self.num_heads // self.num_kv_heads // self.tile_heads

    @property
    def pack_heads(self) -> int:
        return self.config.warpgroups * self.config.stack

    def kv_head(self, head: jax.Array) -> jax.Array:
        return quotient(head, self.num_heads // self.num_kv_heads)

    def blocks_of_part(self, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first KV block of a part, and that of the next one."""
        assert self.config.part is not None
        blocks = self.config.part // self.config.block_kv
        return part * blocks, (part + 1) * blocks

    def slot(self, n: jax.Array) -> jax.Array:
        """Returns where the n-th KV block of a CTA lies."""
        return slot_of(n, self.config.stages)

    def scratch(self) -> dict[str, Any]:
        config, dim = self.config, self.head_dim
        groups, rows = config.warpgroups, WARPGROUP_ROWS
        return {
            "k": self._pool_scratch(self.k_format),
            "v": self._pool_scratch(self.v_format),
            "q_raw": plgpu.SMEM((groups, rows, dim), self.dtype),
            "q_s": swizzled((groups, rows, dim), self.dtype),
            "out_s": plgpu.SMEM((groups, rows, dim), self.dtype),
            "q_ready": plgpu.Barrier(num_arrivals=groups * config.stack),
            "boxes_ready": plgpu.Barrier(num_arrivals=groups * rows * config.stack // BOX) if self.packings else None,
            "q_free": plgpu.Barrier(num_arrivals=groups),
            "kept": swizzled((groups, rows, dim), jnp.float32) if self.keeps_sums else None,
            "kept_weights": plgpu.SMEM((groups, 2, rows), jnp.float32) if self.keeps_sums else None,
            "v_raw": plgpu.Barrier(num_arrivals=self.pages),
            "turn": plgpu.Barrier(num_barriers=2) if config.alternate else None,
        }

    def _pool_scratch(self, fmt: KVFormat) -> dict[str, Any]:
        stages, block, dim = self.config.stages, self.config.block_kv, self.head_dim
        converts, scales = self.converts(fmt), self.copied_scales(fmt)
        barrier = partial(plgpu.Barrier, num_barriers=stages)
        scratch = dict.fromkeys(("raw", "raw_scales", "raw_ready", "raw_free"))
        if converts:
            row = dim // 2 if fmt.dtype == "int4" else dim
            scratch = {
                "raw": plgpu.SMEM((stages, block, row), fmt.storage_dtype),
                "raw_scales": plgpu.SMEM((stages, self.pages, scales), jnp.float16) if scales else None,
                "raw_ready": barrier(num_arrivals=self.pages * (1 + len(self.scale_copies(fmt)))),
                "raw_free": barrier(),
            }
        return scratch | {
            "blocks": swizzled((stages, block, dim), self.dtype),
            "ready": barrier(num_arrivals=1 if converts else self.pages),
            "free": barrier(num_arrivals=self.config.warpgroups),
        }


def for_each_tile(
    plan: Plan,
    refs: Refs,
    body: Callable[[Tile, jax.Array, jax.Array], None],
    pack_body: Callable[[Pack, jax.Array, jax.Array], None],
) -> tuple[jax.Array, jax.Array]:
    """Calls body(tile, n, blocks) or pack_body(pack, n, blocks) for the n-th tile or pack of this CTA. `blocks` KV
    blocks are done by then. Returns both totals. Tiles are dealt out longest first, back and forth, which evens out
    what the CTAs get; then packs."""
    ctas = plan.config.ctas
    cta = lax.axis_index("cta")
    alone = refs.count[0]
    if plan.config.part is not None:
        alone += refs.parts[CUT + 1 + refs.tiles.shape[0]] - refs.parts[CUT]
    alone *= plan.num_heads // plan.tile_heads
    *_, packs = _pack_bounds(plan, refs)
    total = alone + packs[0] * (plan.num_heads // plan.pack_heads)
    rounds, rest = quotient(total, ctas), lax.rem(total, jnp.int32(ctas))

    def dealt(n: jax.Array) -> jax.Array:
        return jnp.where(lax.rem(n, jnp.int32(2)) == 0, cta, ctas - 1 - cta)

    def step(n: jax.Array, blocks: jax.Array) -> jax.Array:
        item = n * ctas + dealt(n)
        if not plan.packings:
            tile = _tile(plan, refs, item)
            body(tile, n, blocks)
            return blocks + tile.last - tile.first
        packed = item >= alone
        tile = _tile(plan, refs, jnp.where(packed, 0, item))
        pl.when(jnp.logical_not(packed))(partial(body, tile, n, blocks))
        pl.when(packed)(lambda: pack_body(_pack(plan, refs, item - alone), n, blocks))
        return blocks + jnp.where(packed, plan.config.warpgroups, tile.last - tile.first)

    tiles = rounds + (dealt(rounds) < rest).astype(jnp.int32)
    return tiles, lax.fori_loop(0, tiles, step, jnp.int32(0))


def _tile(plan: Plan, refs: Refs, item: jax.Array) -> Tile:
    cut = area = None
    row = item
    if plan.config.part is not None:
        walked = (refs.count[0] - refs.parts[CUT]) * (plan.num_heads // plan.tile_heads)
        cut = item >= walked
        row = jnp.where(cut, item - walked, item)
        area = row * plan.config.warpgroups
        if not plan.keeps_sums:
            own = refs.sums.shape[0] // plan.config.warpgroups - plan.config.ctas + lax.axis_index("cta")
            area = jnp.where(cut, area, own * plan.config.warpgroups)
    index = quotient(row, plan.sets)
    of_set = row - index * plan.sets
    if cut is not None:
        index += jnp.where(cut, refs.tiles.shape[0] * plan.num_kv_heads, 0)
    fields = (CHUNK, ROW, ROWS, POSITION, KEYS, HEAD)
    chunk, row, rows, position, keys, head = (refs.items[index, i] for i in fields)
    head = head + of_set * plan.tile_heads
    low = lowest_key(plan, position)
    first = quotient(low, plan.config.block_kv)
    last = quotient(position + rows + (plan.config.block_kv - 1), plan.config.block_kv)
    if cut is not None:
        begin, end = plan.blocks_of_part(refs.items[index, PART])
        first, last = jnp.where(cut, jnp.maximum(first, begin), first), jnp.where(cut, jnp.minimum(last, end), last)
    return Tile(chunk, plan.first_row + row, rows, position, keys, head, low, first, last, cut, area)


def lowest_key(plan: Plan, position: jax.Array) -> jax.Array:
    """Returns the first key that the query at a position sees."""
    return jnp.int32(0) if plan.window is None else jnp.maximum(position - (plan.window - 1), 0)


def _pack_bounds(plan: Plan, refs: Refs) -> list[tuple[jax.Array, jax.Array]]:
    """Returns where each kind of packs begins: the packs and tiles that come before. Last, how many there are in
    all."""
    bounds = [(jnp.int32(0), refs.count[0])]
    for i, slots in enumerate(plan.packings):
        (packs, tiles), count = bounds[-1], refs.count[1 + i]
        bounds.append((packs + quotient(count + (slots - 1), slots), tiles + count))
    return bounds


def _pack(plan: Plan, refs: Refs, item: jax.Array) -> Pack:
    """Reads the counts again: what is kept in registers, the loops over KV blocks lack."""
    sets = plan.num_heads // plan.pack_heads
    number = quotient(item, sets)
    head = (item - number * sets) * plan.pack_heads
    bounds = _pack_bounds(plan, refs)
    first = chunks = slots = rows = columns = jnp.int32(0)
    # The last kind that has begun: one without packs begins where the next one does.
    for k, (before, begin), (_, end) in zip(plan.packings, bounds, bounds[1:]):
        here = number >= before
        tile = begin + (number - before) * k
        first = jnp.where(here, tile, first)
        chunks = jnp.where(here, jnp.minimum(end - tile, k), chunks)
        slots = jnp.where(here, k, slots)
        rows = jnp.where(here, WARPGROUP_ROWS // k, rows)
        columns = jnp.where(here, plan.config.block_kv // k, columns)
    return Pack(first, chunks, slots, rows, columns, head)
