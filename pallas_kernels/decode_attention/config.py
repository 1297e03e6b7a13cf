"""Says what can be tuned in the kernels of decode_attention, and what they support."""

from dataclasses import dataclass

import jax

from pallas_kernels.checks import check_paged
from pallas_kernels.formats.kv_formats import FP8
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.hopper.hopper import SMS
from pallas_kernels.triton.triton_call import check_installed

STORED = ("bfloat16", "float16", FP8, "int8", "int4", "int8-zp", "int4-zp")
FORMATS = (*STORED, *(f"{name}-h" for name in STORED))
ROWS = 64  # tokens of a tile, of each warpgroup's head: rows of one wgmma


@dataclass(frozen=True)
class Config:
    """Holds sizes and resources of the kernel. `split`, `most_splits` and `by_warps` change bits."""

    computing: int = 2  # warpgroups that compute: each has a head of its own
    split: int = 128  # tokens of one work item: fixed, so that results are batch-invariant,
    most_splits: int = 32  # doubled until this number of items is enough for a row, and once where two would be
    per_sm: int = 1  # workers (CTAs) that share a multiprocessor
    sms: int = SMS  # multiprocessors
    stages: int = 8  # tiles in flight for each worker, at most: as many as shared memory holds
    by_warps: bool = True  # of K and V in 8 or 4 bits each warp has its own tokens, where registers have room for that
    dequantize: int = 1  # times that int8 and int4 are dequantized, to the same bits: asks what that work costs

    def __post_init__(self) -> None:
        if self.computing not in (1, 2):
            raise ValueError(f"computing is {self.computing}, expected 1 or 2")
        if self.split < ROWS or self.split.bit_count() != 1:
            raise ValueError(f"split is {self.split}, expected a power of two, at least a tile of {ROWS} tokens")
        if self.stages < 2:
            raise ValueError(f"stages is {self.stages}, expected at least 2")
        for name in ("most_splits", "per_sm", "sms", "dequantize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")

    @property
    def workers(self) -> int:
        return self.per_sm * self.sms


def most_queries(head_dim: int) -> int:
    """Returns the most queries of a KV head, of all rows of a segment together, that shared memory holds at a time."""
    return 16 if head_dim > 128 else 64


def choose_config(head_dim: int, queries: int, heads: int, narrow: bool = False) -> Config:
    """Returns the configuration for a head dim and the queries that share a KV head.

    These are up to 64: heads times rows of a segment. `heads` are those that a row has work for. `narrow` says that K
    and V are both in 8 or 4 bits. It was measured on an H200 at head dim 128 with 1 and 4 queries (experiments/LOG.md).
    Narrow items are over sooner, so that what an item costs counts for more.

    A CTA has one head at a time where two need more shared memory, and where heads have no pairs. Two CTAs a
    multiprocessor would be better for short contexts only.
    """
    computing = 2 if head_dim <= 128 and queries <= 16 and heads % 2 == 0 else 1
    return Config(computing=computing, split=(512 if narrow else 256) // computing)


def check_supported(q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, rows: int = 1) -> None:
    """Raises NotImplementedError, saying what is supported, where the kernel lacks a dtype, format or size; `rows`: Q,
    those of a segment. Query heads that don't fit beside one another take turns, the rows of one head don't."""
    head_dim = q.shape[-1]
    check_paged(str(q.dtype), head_dim, pages, FORMATS)
    most = most_queries(head_dim)
    if rows > most:
        raise NotImplementedError(
            f"segments of {rows} rows of head dim {head_dim} are not supported by backend mosaic, only of up to {most}"
        )
    queries = min(q.shape[1] // pages.k.values.shape[1], most // rows) * rows
    stored = pages.k.format.dtype, pages.v.format.dtype
    large = queries > 8 if head_dim == 256 else head_dim == 128 and 8 < queries <= 16  # beyond: one head a CTA
    numbers = pages.v.format.dtype == "int8" and 8 * pages.v.format.numbers(head_dim) > head_dim  # int8-g8-zp
    if q.dtype == "float16" and stored[0] == "bfloat16" and (stored[1] == "bfloat16" or numbers) and large:
        raise NotImplementedError(  # for copies of both in the queries' dtype
            f"the mosaic kernel has no room for float16 queries over bfloat16 K and V in {pages.v.format.name} of head "
            f"dim {head_dim} with {queries} queries a KV head (heads times rows); supported: up to 8"
        )


TRITON_FORMATS = STORED
MOST_SPLITS = 16  # of a sequence; changes bits


@dataclass(frozen=True)
class TritonConfig:
    """Holds sizes and resources of the Triton kernel. `split` and `keys` change bits."""

    queries: int  # rows times query heads of a KV head in a program: rows of a product, at least 16
    keys: int = 64  # tokens a step, aligned to absolute positions
    split: int = 256  # tokens of a program, doubled until MOST_SPLITS are enough
    warps: int = 4
    stages: int = 2


def triton_config(head_dim: int, queries: int, pages: KVPages) -> TritonConfig:
    """Returns the configuration for `queries` queries of a KV head. It is one for compute capability 8.0 to 9.0, small
    enough for the shared memory of 8.6."""
    block = 16 if queries <= 16 else 32 if queries <= 32 or head_dim > 128 else 64
    codes = all(part.values.dtype.itemsize == 1 for part in (pages.k, pages.v))
    keys = 32 if head_dim > 128 or (codes and block > 16) else 64
    warps = 4 if block == 16 else 8
    if not codes or head_dim > 128:  # registers have no room for more stages with 256
        return TritonConfig(block, keys=keys, warps=warps)
    # 5 stages: steps over codes are so short that their loads must run ahead (see pages_triton.py). Two warps and 512
    # tokens were the fastest of eight configurations on an H100, or as fast.
    return TritonConfig(block, keys=keys, split=512, warps=2 if block == 16 else warps, stages=5)


def check_triton(q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, rows: int = 1) -> None:
    """Raises NotImplementedError for what the Triton kernel lacks, naming what it does."""
    check_installed()
    check_paged(str(q.dtype), q.shape[-1], pages, TRITON_FORMATS, backend="triton")
