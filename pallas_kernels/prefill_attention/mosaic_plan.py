"""What the warpgroups of the Hopper kernel of prefill_attention share: sizes, memory, and the walk over tiles."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pages import KVFormat, Pages
from pallas_kernels.prefill_attention.config import WARPGROUP_ROWS, Config
from pallas_kernels.prefill_attention.work import CHUNK, KEYS, POSITION, ROW, ROWS
from pallas_kernels.smem_sm90 import swizzled

# Registers of each thread that computes, converts and fetches, by computing warpgroups and all of them: moved to where
# they are needed, out of what the launch took (64 Ki over the threads, rounded down to a multiple of 8; to ask for more
# is to wait forever).
REGISTERS = {
    (1, 2): None, (1, 3): (232, 88, 40), (1, 4): (232, 88, 40), (2, 3): (232, 40, 40), (2, 4): (208, 56, 40),
    (2, 5): (152, 64, 40), (3, 4): (160, 32, 32),
}  # fmt: skip
SCALES = 64  # the fewest that a copy moves: 128 bytes, where the next may begin in shared memory


class Pool(NamedTuple):
    """K or V: the pages, and the KV blocks in flight. Barriers are named for what they say."""

    values: Any  # global
    scales: Any  # flat: [N, K * P * G]
    blocks: Any  # [stages, T, D] as wgmma takes them
    ready: Any
    free: Any
    raw: Any  # what is converted: blocks as stored [stages, T, ..]; else None
    raw_scales: Any  # [stages, pages, >= run * G], each page's on lines of its own
    raw_ready: Any
    raw_free: Any


class Refs(NamedTuple):
    """Global arrays and shared memory of the kernel."""

    q: Any
    table: Any
    tiles: Any
    count: Any
    out: Any
    k: Pool
    v: Pool
    q_raw: Any  # [warpgroups, 64, D], plain rows: tiled copies would have to start at multiples of 8
    q_s: Any  # the same, tiled and swizzled as wgmma wants it
    p_s: Any  # [warpgroups, 64, T] if P is staged
    out_s: Any  # [warpgroups, 64, D], plain rows
    q_ready: Any
    q_free: Any
    v_raw: Any  # V of a boundary block, before its unseen slots are cleared
    turn: Any


class Tile(NamedTuple):
    """One query tile: scalars of the work list, its query heads, and its KV blocks first <= j < last."""

    chunk: jax.Array
    row: jax.Array
    rows: jax.Array
    position: jax.Array
    keys: jax.Array
    head: jax.Array  # the first of config.heads
    low: jax.Array  # the first key that any row sees
    first: jax.Array
    last: jax.Array


def flat_scales(pool: Pages) -> jax.Array | None:
    """The pool's scales such that a copy may take some of the next heads' along: [N, K * P * G]."""
    if pool.scales is None:
        return None
    scales = pool.scales.reshape(pool.num_pages, -1)
    missing = SCALES - scales.shape[1]  # only in toys: one KV head, small pages and one or two groups
    return scales if missing <= 0 else jnp.pad(scales, ((0, 0), (0, missing)))


@dataclass(frozen=True)
class Plan:
    """Static sizes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype
    k_format: KVFormat
    v_format: KVFormat
    scale: float
    window: int | None
    config: Config

    def check(self) -> None:
        """Raises NotImplementedError for a configuration that does not suit the call."""
        config, group = self.config, self.num_heads // self.num_kv_heads
        if group % config.heads:
            raise NotImplementedError(f"tiles of {config.heads} query heads do not divide {group} of a KV head")
        if config.block_kv % self.page_size and self.page_size % config.block_kv:
            raise NotImplementedError(f"blocks of {config.block_kv} keys are not made of pages of {self.page_size}")
        if (config.warpgroups, self.warpgroups) not in REGISTERS:
            raise NotImplementedError(f"{config} takes {self.warpgroups} warpgroups in all, which is not supported")

    @property
    def pages(self) -> int:
        """Copies that make a KV block: its pages, or one for a part of a page."""
        return max(1, self.config.block_kv // self.page_size)

    @property
    def run(self) -> int:
        """Tokens of such a copy."""
        return min(self.page_size, self.config.block_kv)

    def converts(self, fmt: KVFormat) -> bool:
        """Whether blocks of this format are converted before wgmma takes them."""
        return fmt.storage_dtype != self.dtype

    @property
    def warpgroups(self) -> int:
        """The computing ones, the one that fetches, and those that convert."""
        converted = self.converts(self.k_format) + self.converts(self.v_format)
        return self.config.warpgroups + 1 + min(converted, self.config.converters)

    def copied_scales(self, fmt: KVFormat) -> int:
        """Scales that come with each copy of values: its own, and where those are few, some neighbours'."""
        own = self.run * fmt.groups(self.head_dim)
        return max(SCALES, own) if own else 0

    def scale_copies(self, fmt: KVFormat) -> list[pl.Slice]:
        """The copies that bring them: of a dimension, each takes up to 256."""
        count = self.copied_scales(fmt)
        return [pl.ds(start, min(256, count)) for start in range(0, count, 256)]

    def scale_start(self, fmt: KVFormat, head: jax.Array, token: Any) -> tuple[jax.Array, Any]:
        """Where in a page's flat scales the copies begin that bring those of a query head, from a token of the page
        on, and where in what they bring those begin."""
        groups = fmt.groups(self.head_dim)
        start = (head // (self.num_heads // self.num_kv_heads) * self.page_size + token) * groups
        if self.run * groups >= SCALES:
            return start, 0
        begin = jnp.minimum(start, max(0, self.num_kv_heads * self.page_size * groups - SCALES))
        return begin, start - begin

    def slot(self, n: jax.Array) -> jax.Array:
        """Where the n-th KV block of a CTA lies."""
        return lax.rem(n, jnp.int32(self.config.stages))

    def scratch(self) -> dict[str, Any]:
        config, dim = self.config, self.head_dim
        groups, rows = config.warpgroups, WARPGROUP_ROWS
        return {
            "k": self._pool_scratch(self.k_format),
            "v": self._pool_scratch(self.v_format),
            "q_raw": plgpu.SMEM((groups, rows, dim), self.dtype),
            "q_s": swizzled((groups, rows, dim), self.dtype),
            "p_s": swizzled((groups, rows, config.block_kv), self.dtype) if config.interpretable else None,
            "out_s": plgpu.SMEM((groups, rows, dim), self.dtype),
            "q_ready": plgpu.Barrier(num_arrivals=groups),
            "q_free": plgpu.Barrier(num_arrivals=groups),
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
    plan: Plan, refs: Refs, body: Callable[[Tile, jax.Array, jax.Array], None]
) -> tuple[jax.Array, jax.Array]:
    """Calls body(tile, n, blocks) for the n-th tile of this CTA, `blocks` KV blocks done; returns both totals.

    Tiles are dealt out longest first, back and forth, which evens out what the CTAs get.
    """
    ctas, sets = plan.config.ctas, plan.num_heads // plan.config.heads
    cta = lax.axis_index("cta")
    total = refs.count[0] * sets
    rounds, rest = total // ctas, lax.rem(total, jnp.int32(ctas))

    def dealt(n: jax.Array) -> jax.Array:
        return jnp.where(lax.rem(n, jnp.int32(2)) == 0, cta, ctas - 1 - cta)

    def step(n: jax.Array, blocks: jax.Array) -> jax.Array:
        item = n * ctas + dealt(n)
        index = item // sets
        chunk, row, rows, position, keys = (refs.tiles[index, i] for i in (CHUNK, ROW, ROWS, POSITION, KEYS))
        low = jnp.int32(0)
        if plan.window is not None:
            low = jnp.maximum(position - (plan.window - 1), 0)
        first = low // plan.config.block_kv
        last = (position + rows + (plan.config.block_kv - 1)) // plan.config.block_kv
        head = (item - index * sets) * plan.config.heads
        body(Tile(chunk, row, rows, position, keys, head, low, first, last), n, blocks)
        return blocks + last - first

    tiles = rounds + (dealt(rounds) < rest).astype(jnp.int32)
    return tiles, lax.fori_loop(0, tiles, step, jnp.int32(0))
