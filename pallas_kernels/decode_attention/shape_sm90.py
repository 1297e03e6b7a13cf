"""Describes what the kernels of decode_attention on sm_90 are specialized to, and their work items."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import ROWS, Config
from pallas_kernels.decode_attention.storage_sm90 import Storage
from pallas_kernels.decode_attention.work import padded
from pallas_kernels.hopper.logits_sm90 import LOWEST

MASKED = LOWEST  # of keys that are not seen
PAD = 4  # a partial result is followed by its largest logit, its sum of weights, and 8 bytes that align copies
FETCHED = 8  # partial results of one copy
REDUCTIONS = 1024  # bytes of shared memory for Pallas's own
COMPILER = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=REDUCTIONS
)


@dataclass(frozen=True)
class Shape:
    """Holds what the kernels are specialized to."""

    rows: int  # R
    num_heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    page_size: int  # P
    num_pages: int  # N
    heads: int  # query heads that a warpgroup has at a time: with their KV head, a head of its work
    width: int  # Q, rows of a segment: column i * heads + h of a product is query head h of row i
    chunks: int  # heads of work that share a KV head
    items: int  # work items a row and split: heads of work, or pairs of them
    splits: int  # partial results of a head, at most; 0: no row is ever split
    slots: int  # and of all: those of a pair share a number
    window: int | None
    words: int  # of a mask of ancestors; 0: segments are chains
    scale: float
    softcap: float | None
    config: Config
    k: Storage
    v: Storage

    @property
    def queries(self) -> int:
        """Counts the columns of a product that are in use."""
        return self.heads * self.width

    @property
    def columns(self) -> int:
        """Pads `queries` to what wgmma wants."""
        return padded(self.queries)

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def by_warps(self) -> bool:
        """Tells whether each warp attends to tokens of its own; else a warpgroup together."""
        return self.k.by_warps

    @property
    def by_lanes(self) -> bool:
        """Tells whether lanes copy, and a copying warp arrives once a tile; else TMA does, and each copy arrives."""
        return self.k.by_lanes

    @property
    def sums(self) -> int:
        """Counts a warpgroup's sums, of which its partial results consist."""
        return 4 if self.by_warps else 1


@dataclass(frozen=True)
class Item:
    """Holds scalars of one work item."""

    row: jax.Array
    head: jax.Array  # KV head and chunk of query heads, of the first warpgroup: the next has the next
    low: jax.Array  # its first visible key
    high: jax.Array  # and the one after its last
    enters: jax.Array  # whether it is this worker's first of the head
    first: jax.Array  # whether it is the head's first split
    last: jax.Array  # or the last
    begun: jax.Array  # whether this worker has the head's first split
    end: jax.Array  # whether it is the worker's last item
    used: jax.Array | None  # rows of its segment that are in use, where Q > 1
    committed: jax.Array | None  # and how many keys come before theirs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """Holds online softmax of some keys: weights are 2^(logit - top). `top` is a whole number, so that rescaling is
    exact."""

    top: jax.Array  # [columns] about the largest logit, to base 2
    total: jax.Array  # of the weights, [columns] or still one a key [rows, columns]
    acc: jax.Array  # weights times values [D, columns]
    # Each warp's own, as warps_sm90 has them: [32, columns], [32, columns] or one a key, [4 * D, columns].
    zeros: jax.Array | None = None  # what all dims of acc lack, one a key, where V has a single zero a token


def kv_head_of(shape: Shape, head: jax.Array) -> jax.Array:
    return head if shape.chunks == 1 else lax.div(head, jnp.int32(shape.chunks))


def first_query(shape: Shape, row: jax.Array, head: jax.Array) -> jax.Array:
    """Returns the first query, counted through the batch, of a sequence's KV head and chunk of query heads. That of
    each further row of its segment is `num_heads` later."""
    queries = shape.num_heads * shape.width  # of a sequence
    if shape.chunks == 1:
        return row * queries + head * shape.heads
    kv_head, chunk = kv_head_of(shape, head), lax.rem(head, jnp.int32(shape.chunks))
    offset = jnp.minimum(chunk * shape.heads, shape.group - shape.heads)
    return row * queries + kv_head * shape.group + offset


def tile_range(item: Item) -> tuple[jax.Array, jax.Array]:
    tile = jnp.int32(ROWS)
    return lax.div(item.low, tile), lax.div(item.high + (tile - 1), tile)
