"""Tunables of the Hopper kernel of prefill_attention, and their tuned values."""

from dataclasses import dataclass

import jax

from pallas_kernels.kv_pages import KVPages

WARPGROUP_ROWS = 64  # rows of one wgmma
SHARED_MEMORY = 227 * 1024  # bytes a CTA may have
H200_SMS = 132


@dataclass(frozen=True)
class Config:
    """How the kernel cuts its work.

    block_kv: keys a step, aligned to absolute positions: it decides the order of sums. stages: K and V blocks in
    flight.  warpgroups: computing warpgroups, 64 rows each. heads: query heads of one
    KV head that a tile holds; the rows of a tile are 64 * warpgroups / heads. alternate: whether two warpgroups take
    turns at the tensor cores, one's softmax under the other's products. ctas: persistent CTAs.
    stage_probabilities: pass P through shared memory instead of registers (all that the interpreter can run).
    """

    block_kv: int = 128
    stages: int = 2
    warpgroups: int = 2
    heads: int = 1
    alternate: bool = True
    ctas: int = H200_SMS
    stage_probabilities: bool = False

    def __post_init__(self) -> None:
        if self.block_kv < 64 or self.block_kv % 64:
            raise ValueError(f"block_kv is {self.block_kv}, expected a multiple of 64")
        if self.heads < 1 or self.warpgroups % self.heads:
            raise ValueError(f"{self.warpgroups} warpgroups cannot share {self.heads} heads: expected a divisor")
        if self.alternate and self.warpgroups != 2:
            raise ValueError(f"alternate needs 2 warpgroups, got {self.warpgroups}")
        if self.stages < 2 or self.ctas < 1:
            raise ValueError(f"expected at least 2 stages and 1 CTA: {self}")

    @property
    def tile_rows(self) -> int:
        return WARPGROUP_ROWS * self.warpgroups // self.heads


def choose_config(head_dim: int, group: int) -> Config:
    """The tuned configuration for D = head_dim and H/K = group."""
    heads = 2 if group % 2 == 0 else 1
    if head_dim == 256:
        return Config(block_kv=64, warpgroups=1, alternate=False)
    return Config(heads=heads)


def check_supported(q: jax.Array, pages: KVPages) -> None:
    """Raises NotImplementedError, saying what is supported, where the kernel lacks a dtype, format or size."""
    head_dim, page_size = q.shape[-1], pages.k.page_size
    for name, value, supported in (
        ("queries of", str(q.dtype), ("bfloat16", "float16")),
        ("head dim", head_dim, (64, 128, 256)),
        ("page size", page_size, tuple(size for size in (8, 16, 32, 64, 128) if head_dim != 256 or size <= 64)),
    ):
        if value not in supported:
            known = ", ".join(map(str, supported))
            raise NotImplementedError(f"{name} {value} are not supported by backend mosaic, which does {known}")
    for name, part in (("K", pages.k), ("V", pages.v)):
        if part.values.dtype != q.dtype:
            raise NotImplementedError(
                f"{name} stored as {part.format} is not supported by backend mosaic, which reads {q.dtype} pages"
            )
