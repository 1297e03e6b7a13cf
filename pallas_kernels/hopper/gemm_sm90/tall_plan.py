"""Holds what the warpgroups of the Hopper matmul for many rows share: sizes, memory, and the walk over tiles."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.gemm_sm90.product import UNIT, Sizes
from pallas_kernels.hopper.gemm_sm90.tall_config import Config
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import swizzled

ROWS = UNIT
VECTOR = 32  # floats: copies move multiples of 128 bytes


class Refs(NamedTuple):
    """Holds global arrays, shared memory and barriers, which are named for what they say."""

    x: Any
    w: Any
    out: Any
    x_s: Any  # [stages, tile_m, step]
    w_s: Any  # [stages, tile_n, step]
    full: Any
    free: Any
    out_s: Any  # [warpgroups, buffers, 64, columns of a chunk]
    vectors_full: Any
    vectors_free: Any
    residual_full: Any
    vectors_s: Any  # the tile's parts of x_scale, w_scale and bias, one after the other
    x_scale: Any = None
    w_scale: Any = None
    bias: Any = None
    residual: Any = None
    x_scale_s: Any = None  # [stages, 1, tile_m], where blocks of K have scales
    w_scale_s: Any = None  # [stages, 1, tile_n]
    turn: Any = None  # of each warpgroup to issue products


@dataclass(frozen=True)
class Plan(Sizes):
    """Holds static sizes."""

    optional: tuple[str, ...]  # the arguments that are there
    config: Config

    @property
    def tile_n(self) -> int:
        """Counts a tile's columns: no copy is larger than its array."""
        return min(self.config.tile_n, self.n)

    @property
    def padded_rows(self) -> int:
        """Counts the rows that arrays need for M: as many as a chunk, and a multiple of eight, as copies tile rows.
        Chunks as wide as the result need whole tiles: GPUs cut them at the edge, but the interpreter refuses to."""
        multiple = self.config.tile_m if self.chunk == self.n else 8
        return max(ROWS, pl.cdiv(self.m, multiple) * multiple)

    @property
    def copied(self) -> int:
        """Counts a tile's rows of x that are copied. Products of the others are not stored."""
        return min(self.config.tile_m, self.m)

    @property
    def copied_scales(self) -> int:
        """Counts the scales that are copied for these rows: a multiple of VECTOR."""
        return min(self.config.tile_m, pl.cdiv(self.m, VECTOR) * VECTOR)

    @property
    def rows(self) -> int:
        return self.config.tile_m // 2

    @property
    def chunk(self) -> int:
        """Counts the columns that go out at a time."""
        size = self.out_dtype.itemsize
        both = math.gcd(self.tile_n, self.n)
        return next(width // size for width in (128, 64, 32, 16) if both % (width // size) == 0)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Lists the first row and column of each chunk of a warpgroup."""
        return [(i, j) for i in range(0, self.rows, ROWS) for j in range(0, self.tile_n, self.chunk)]

    @property
    def adds_residual(self) -> bool:
        return "residual" in self.optional

    @property
    def vectors(self) -> dict[str, tuple[int, int]]:
        """Maps each vector's part to its begin and size in shared memory."""
        columns = pl.cdiv(self.tile_n, VECTOR) * VECTOR
        sizes = {"x_scale": self.config.tile_m, "w_scale": columns, "bias": columns}
        names = [name for name in sizes if name in self.optional and not (self.in_blocks and name != "bias")]
        return {name: (sum(sizes[before] for before in names[:i]), sizes[name]) for i, name in enumerate(names)}

    def shared_memory(self, stages: int, buffers: int) -> int:
        """Returns the bytes that a CTA takes with K steps in flight and chunks of each warpgroup on their way out."""
        config = self.config
        taken = stages * (config.tile_m + self.tile_n) * (self.step * self.dtype.itemsize + 4 * self.in_blocks)
        taken += 2048 * self.in_blocks  # the end of both rings of scales
        taken += 2 * buffers * ROWS * self.chunk * self.out_dtype.itemsize
        taken += pl.cdiv(4 * sum(size for _, size in self.vectors.values()), 1024) * 1024
        return taken + 512  # barriers

    @property
    def stages(self) -> int:
        """Returns the stages that are configured, or what shared memory holds."""
        for stages in range(self.config.stages, 1, -1):
            if self.shared_memory(stages, 1) <= SHARED_MEMORY:
                return stages
        raise NotImplementedError(
            f"{self.config} needs {self.shared_memory(2, 1)} bytes of shared memory, a CTA has {SHARED_MEMORY}"
        )

    @property
    def buffers(self) -> int:
        """Counts a warpgroup's chunks that shared memory holds beside the rest, up to four."""
        most = min(len(self.chunks), 4)
        return max(b for b in range(1, most + 1) if self.shared_memory(self.stages, b) <= SHARED_MEMORY)

    @property
    def tiles(self) -> tuple[int, int]:
        """Counts the tiles along M and N."""
        return pl.cdiv(self.m, self.config.tile_m), pl.cdiv(self.n, self.tile_n)

    @property
    def ctas(self) -> int:
        return min(math.prod(self.tiles), self.config.ctas)

    def scratch(self) -> dict[str, Any]:
        stages, vectors = self.stages, self.vectors.values()
        scales = {"x_scale_s": self.config.tile_m, "w_scale_s": self.tile_n} if self.in_blocks else {}
        copies = 4 if self.in_blocks else 2
        return {
            **{name: plgpu.SMEM((stages, 1, size), jnp.float32) for name, size in scales.items()},
            "turn": plgpu.Barrier(num_barriers=2) if self.in_blocks else None,
            "x_s": swizzled((stages, self.config.tile_m, self.step), self.dtype),
            "w_s": swizzled((stages, self.tile_n, self.step), self.dtype),
            "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "out_s": swizzled((2, self.buffers, ROWS, self.chunk), self.out_dtype),
            "vectors_s": plgpu.SMEM((sum(size for _, size in vectors),), jnp.float32) if vectors else None,
            "vectors_full": plgpu.Barrier(num_arrivals=len(vectors)) if vectors else None,
            "vectors_free": plgpu.Barrier(num_arrivals=2) if vectors else None,
            "residual_full": plgpu.Barrier(num_barriers=2 * self.buffers) if self.adds_residual else None,
        }


class Tile(NamedTuple):
    row: jax.Array
    column: jax.Array


class Place(NamedTuple):
    """Says what a warpgroup finishes of a tile: where the tile begins, and where in it the warpgroup's rows do."""

    wg: jax.Array
    row: jax.Array
    row_in_tile: Any
    column: jax.Array

    def chunk(self, plan: Plan, c: int) -> tuple[pl.Slice, pl.Slice]:
        """Returns the c-th chunk's rows and columns of the result."""
        i, j = plan.chunks[c]
        return pl.ds(self.row + self.row_in_tile + i, ROWS), pl.ds(self.column + j, plan.chunk)


def for_each_tile(plan: Plan, body: Callable[[Tile, jax.Array], None]) -> jax.Array:
    """Calls body(tile, n) for the n-th tile of this CTA; returns how many there were."""
    cta, (along_m, along_n) = lax.axis_index("cta"), plan.tiles
    count = (along_m * along_n - cta + plan.ctas - 1) // plan.ctas

    @pl.loop(0, count)
    def _(i: jax.Array) -> None:
        number, width = cta + i * plan.ctas, min(plan.config.group, along_m)
        row, column = plgpu.planar_snake(number, plan.tiles, 0, width)
        body(Tile(row * plan.config.tile_m, column * plan.tile_n), i)

    return count
