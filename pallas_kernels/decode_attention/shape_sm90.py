"""What the kernels of decode_attention on sm_90 are specialized to, and the items that they work on."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import Config
from pallas_kernels.decode_attention.storage_sm90 import Storage

MASKED = -1e30  # finite: the difference of two is a number
PAD = 4  # a partial result is followed by log2 of its sum of weights, and 12 bytes for the alignment of copies
MERGED = 4  # splits merged at a time
BLOCK = 4  # heads merged at a time: one a warp
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclass(frozen=True)
class Shape:
    """What the kernels are specialized to."""

    rows: int  # R
    num_heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    page_size: int  # P
    queries: int  # query heads of one work item
    chunks: int  # work items that share a KV head
    columns: int  # `queries` padded to what wgmma wants
    slots: int  # partial results of a head, at most
    scale: float
    config: Config
    stages: int  # tiles in flight
    k: Storage
    v: Storage

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads


@dataclass(frozen=True)
class Item:
    """Scalars of one work item."""

    row: jax.Array
    head: jax.Array  # KV head and chunk of query heads
    low: jax.Array  # its first visible key
    high: jax.Array  # and the one after its last
    splits: jax.Array  # of the row
    slot: jax.Array  # where a partial result goes


def first_query(shape: Shape, item: Item) -> jax.Array:
    """The first of an item's query heads, counted through the batch."""
    if shape.chunks == 1:
        return item.row * shape.num_heads + item.head * shape.queries
    kv_head, chunk = item.head // shape.chunks, lax.rem(item.head, jnp.int32(shape.chunks))
    offset = jnp.minimum(chunk * shape.queries, shape.group - shape.queries)
    return item.row * shape.num_heads + kv_head * shape.group + offset


def tile_range(shape: Shape, item: Item) -> tuple[jax.Array, jax.Array]:
    tile = shape.config.tile
    return item.low // tile, (item.high + (tile - 1)) // tile
