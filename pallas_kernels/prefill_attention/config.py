"""Lists tunables of the kernels of prefill_attention with their tuned values, and says what they support."""

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.checks import check_paged
from pallas_kernels.formats.kv_formats import FP8
from pallas_kernels.formats.kv_pages import KVPages
from pallas_kernels.hopper.hopper import SMS
from pallas_kernels.triton.triton_call import check_installed

WARPGROUP_ROWS = 64  # rows of one wgmma
STACKS = (1, 2, 4, 8)
STORED = ("bfloat16", "float16", FP8, "int8", "int4", "int8-zp", "int4-zp")
FORMATS = (*STORED, *(f"{name}-h" for name in STORED))
TRITON_FORMATS = STORED
AHEAD = 5  # stages of the Triton kernel with which it loads K and V two steps ahead: see pages_triton.py
FEW = 16  # rows of a chunk, on average, up to which a warpgroup has all query heads of a KV head: decode rows
PART = 2048  # keys of a part, from an absolute multiple to the next: it decides deterministic mode's order of sums
LONG = 512  # rows of a chunk, on average, from which keys are read for long enough that loading ahead pays


@dataclass(frozen=True)
class Config:
    """Says how the kernel cuts its work. The queries of a tile are 64 * warpgroups / heads / stack."""

    block_kv: int = 128  # keys a step, aligned to absolute positions: it decides the order of sums
    stages: int = 2  # K and V blocks in flight
    warpgroups: int = 2  # that compute, 64 rows each
    heads: int = 1  # query heads of one KV head that a tile holds, each in warpgroups of its own
    stack: int = 1  # query heads of one KV head that share the rows of a warpgroup, one after the other
    converters: int = 1  # warpgroups that convert: one for K and V, or one for each
    alternate: bool = True  # two warpgroups take turns at the tensor cores, one's softmax under the other's products
    ctas: int = SMS  # persistent CTAs
    pack: bool = True  # several short sequences share a warpgroup's rows and keys
    together: int | None = None  # KV heads whose tiles come before those of the next ones; None: as the L2 cache holds
    part: int | None = None  # keys whose softmax begins afresh, so that CTAs may share a long row; None: all

    def __post_init__(self) -> None:
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"block_kv is {self.block_kv}, expected a multiple of 64")
        if self.heads < 1 or self.warpgroups % self.heads:
            raise ValueError(f"{self.warpgroups} warpgroups cannot share {self.heads} heads: expected a divisor")
        if self.stack not in STACKS or self.converters not in (1, 2):
            raise ValueError(f"stack={self.stack} and converters={self.converters}, expected {STACKS} and 1 or 2")
        if self.alternate and self.warpgroups != 2:
            raise ValueError(f"alternate needs 2 warpgroups, got {self.warpgroups}")
        if self.stages < 1 or self.ctas < 1:
            raise ValueError(f"stages={self.stages} and ctas={self.ctas} must be positive")
        if self.part is not None and (self.part < self.block_kv or self.part % self.block_kv):
            raise ValueError(f"part is {self.part}, expected a multiple of block_kv={self.block_kv}")

    @property
    def tile_rows(self) -> int:
        return self.queries * self.warpgroups // self.heads

    @property
    def queries(self) -> int:
        """Counts the queries of a warpgroup, each of which has `stack` rows."""
        return WARPGROUP_ROWS // self.stack


def packings(config: Config, num_heads: int, page_size: int) -> tuple[int, ...]:
    """Returns how many short chunks may share the 64 rows and block_kv keys of a warpgroup, fewest first; none: no
    packing. Of k chunks each has 64 / k rows and block_kv / k keys for itself: whole pages, and whole steps of wgmma.
    wgmma sums over 16 keys at once, so that a chunk's sums do not tell where it lies. Each warpgroup takes another
    head."""
    block = config.block_kv
    if not config.pack or num_heads % (config.warpgroups * config.stack) or block & (block - 1):
        return ()
    return tuple(k for k in (1, 2, 4, 8) if block // k >= max(16, min(page_size, block)))


def choose_config(q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, num_chunks: int | None = None) -> Config:
    """Returns the tuned configuration for q [C, H, D] and pages, and room for `num_chunks` chunks (None: any). q and
    pages are arrays, or their shapes and dtypes. Packing is compiled in where chunks are short on average, by the room
    that a step is compiled for. Short chunks are then much faster, but tiles of long ones are slower beside its code.
    Packed or alone, a chunk of finite values has the same bits."""
    num_rows, num_heads, head_dim = q.shape
    pack = num_chunks is None or num_rows < WARPGROUP_ROWS * num_chunks
    converts = any(pool.values.dtype != q.dtype for pool in (pages.k, pages.v))
    if head_dim == 256:  # what shared memory holds
        return Config(block_kv=64, stages=1 if converts else 2, warpgroups=1, alternate=False, pack=pack)
    group = num_heads // pages.k.values.shape[1]
    if num_chunks is not None and num_rows < FEW * num_chunks:
        stack = next(stack for stack in reversed(STACKS) if group % stack == 0)
        few: dict[str, Any] = {"warpgroups": 1, "alternate": False, "stack": stack, "converters": 2}
        return Config(block_kv=64 if converts else 128, pack=pack, **few)
    heads = 2 if group % 2 == 0 else 1
    return Config(block_kv=64 if converts else 128, heads=heads, converters=2, pack=pack)


def check_supported(q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, scale: float) -> None:
    """Raises NotImplementedError, saying what is supported, where the kernel lacks a dtype, format, size or scale."""
    if not scale > 0:
        raise NotImplementedError(f"scale is {scale}: the mosaic kernel takes positive ones")
    check_paged(str(q.dtype), q.shape[-1], pages, FORMATS)


@dataclass(frozen=True)
class TritonConfig:
    """Holds sizes and resources of the Triton kernel; `block_kv` decides the order of sums."""

    tile_rows: int  # query rows of a program
    block_kv: int  # keys a step, aligned to absolute positions
    warps: int = 8
    stages: int = 2  # with 2, neither K nor V is loaded ahead


def triton_config(q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, chunks: int, hopper: bool) -> TritonConfig:
    """Returns the configuration for q [C, H, D] and room for `chunks` chunks. The device has compute capability 9.0, or
    8.0 to 8.9. It is the largest found that spills no registers. Stages do not change a result."""
    rows, _, head_dim = q.shape
    converts = any(pool.values.dtype.itemsize == 1 for pool in (pages.k, pages.v))
    if head_dim > 128:
        return TritonConfig(32 if converts and not hopper else 64, 32)
    if hopper:
        return TritonConfig(128, 64 if converts else 128, stages=AHEAD if rows >= LONG * chunks else 2)
    return TritonConfig(64, 32) if converts else TritonConfig(64, 32, warps=4)


def check_triton(q: jax.Array | jax.ShapeDtypeStruct, pages: KVPages, scale: float) -> None:
    """Raises NotImplementedError for what the Triton kernel lacks, naming what it does."""
    check_installed()
    check_paged(str(q.dtype), q.shape[-1], pages, TRITON_FORMATS, backend="triton")
