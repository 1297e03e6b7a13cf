"""Holds what the warps of the Hopper matmul for few rows share: sizes, memory, and which tiles a CTA has."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.weight_formats import BLOCK
from pallas_kernels.hopper.gemm_sm90.product import Sizes
from pallas_kernels.hopper.gemm_sm90.skinny_config import UNIT, Config, most_stages
from pallas_kernels.hopper.smem_sm90 import swizzled
from pallas_kernels.row_groups import Pairs, most_pairs


class Refs(NamedTuple):
    """Holds global arrays, shared memory and barriers."""

    x: Any
    w: Any
    out: Any
    x_s: Any  # [stages, rows, step]
    w_s: Any  # [stages, columns, step]
    full: Any
    free: Any
    out_s: Any  # [warpgroups, 64, columns]
    vectors_full: Any = None
    vectors_free: Any = None
    x_scale: Any = None
    x_scale_s: Any = None  # [rows]
    w_scale: Any = None
    w_scale_s: Any = None  # [columns, and more: copies are of 128 bytes]
    bias: Any = None
    bias_s: Any = None
    residual: Any = None
    residual_full: Any = None
    turn: Any = None  # warpgroups of this kernel issue products as they come
    pairs: Pairs | None = None
    block_scale: Any = None  # f32[blocks, cuts]


def store_rows(source: Any, target: Any, row: jax.Array, column: jax.Array, first: jax.Array, last: jax.Array) -> None:
    """Copies a tile [R, C] in shared memory to `row` and `column` of target [M, N]. Of its rows those from `first` to
    `last` are copied, in pieces whose sizes are powers of two. Columns past N are left out."""
    (rows, columns), total = source.shape, target.shape[1]
    begin = jnp.maximum(first - row, 0)
    count = jnp.maximum(jnp.minimum(last - row, rows) - begin, 0)

    def copy(place: jax.Array, size: int, width: int) -> None:
        piece = source.at[pl.ds(place, size), pl.ds(0, width)]
        plgpu.copy_smem_to_gmem(piece, target.at[pl.ds(row + place, size), pl.ds(column, width)])

    def copy_within(place: jax.Array, size: int) -> None:
        if size > 1 or not total % columns:
            copy(place, size, columns)
            return
        # One row is one run of bytes, of which what is past N would be the next row's.
        whole = column + columns <= total
        pl.when(whole)(partial(copy, place, 1, columns))
        pl.when(jnp.logical_not(whole))(partial(copy, place, 1, total % columns))

    for size in (1 << i for i in reversed(range(rows.bit_length()))):
        place = begin + count // (2 * size) * (2 * size)
        pl.when((count // size) % 2 == 1)(partial(copy_within, place, size))


@dataclass(frozen=True)
class Blocks:
    """Describes blocks of w that groups name, where any group may meet any block: `count` of them, with `stride` rows
    each. The result's columns are cut in parts: each of `cuts` columns multiplies columns of x of its own."""

    count: int
    stride: int
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class Plan(Sizes):
    """Holds static sizes."""

    extra: dict[str, jnp.dtype]  # the optional arguments that are there
    config: Config
    gated: bool = False
    groups: int = 0  # X, if each group of rows has a weight; else 0
    blocks: Blocks | None = None  # if groups name their weights

    @property
    def parts(self) -> int:
        """Counts the runs of w's rows that a tile has."""
        return 2 if self.gated else 1

    @property
    def columns(self) -> int:
        return self.config.columns // self.parts

    @property
    def copied(self) -> int:
        """Counts the rows of x that a tile copies."""
        return min(pl.cdiv(self.m, 8) * 8, self.config.rows)

    @property
    def computing(self) -> int:
        """Counts the warpgroups that compute."""
        return min(self.config.rows // UNIT, 2)

    @property
    def rows(self) -> int:
        """Counts the rows of a computing warpgroup."""
        return self.config.rows // self.computing

    @property
    def widest(self) -> int:
        return self.config.step

    @property
    def row_tiles(self) -> int:
        """Counts the tiles along M, or the most that there may be."""
        return (
            most_pairs(self.m, self.groups + 1, self.config.rows) if self.groups else pl.cdiv(self.m, self.config.rows)
        )

    @property
    def slabs(self) -> int:
        """Counts the tiles along N."""
        return pl.cdiv(self.n, self.columns)

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.slabs

    @property
    def workers(self) -> int:
        return min(self.tiles, self.config.ctas)

    @property
    def vectors(self) -> list[str]:
        """Lists what is copied once a tile."""
        apart = {"residual", "block_scale", *self.ring_scales}
        return [name for name in self.extra if name not in apart]

    @property
    def ring_scales(self) -> dict[str, int]:
        """Maps scales that come with each stage to their number for one block of K."""
        return {"x_scale": self.config.rows, "w_scale": self.vector} if self.in_blocks else {}

    @property
    def vector(self) -> int:
        """Counts a column vector's copied elements of one part: a multiple of 128 bytes, in 16 bits too."""
        return pl.cdiv(self.columns, 64) * 64

    def stages(self) -> int:
        """Returns the ring's stages: what is asked for, as far as it is of use and shared memory holds it."""
        size = self.dtype.itemsize if not self.in_blocks else 1 + 4 / BLOCK  # with the scales of a row and block
        most = most_stages(self.config, size, self.out_dtype.itemsize, self.step)
        stages = min(self.config.stages, max(self.steps, 2), most)
        if stages < 2:
            raise NotImplementedError(f"{self.config} needs more shared memory for {self.dtype} and {self.out_dtype}")
        return stages

    def scratch(self) -> dict[str, Any]:
        stages, config = self.stages(), self.config
        vectors = {"x_scale": config.rows, "w_scale": self.parts * self.vector, "bias": self.vector}
        scratch = {
            "x_s": swizzled((stages, config.rows, self.step), self.dtype),
            "w_s": swizzled((stages, config.columns, self.step), self.dtype),
            "full": plgpu.Barrier(num_arrivals=1 + self.parts + len(self.ring_scales), num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=self.computing, num_barriers=stages),
            "out_s": plgpu.SMEM((self.computing, UNIT, self.columns), self.out_dtype),
        }
        if self.vectors:
            scratch["vectors_full"] = plgpu.Barrier(
                num_arrivals=len(self.vectors) + ("w_scale" in self.vectors) * (self.parts - 1)
            )
            scratch["vectors_free"] = plgpu.Barrier(num_arrivals=self.computing)
        for name, size in self.ring_scales.items():
            scratch[f"{name}_s"] = plgpu.SMEM((stages, self.step // BLOCK, size), jnp.float32)
        for name in self.vectors:
            scratch[f"{name}_s"] = plgpu.SMEM((vectors[name],), self.extra[name])
        if "residual" in self.extra:
            scratch["residual_full"] = plgpu.Barrier(num_barriers=self.computing)
        return scratch


class Place(NamedTuple):
    """Says where a tile is."""

    row: jax.Array  # of x and of the result
    column: jax.Array  # of the result
    w_row: jax.Array
    first: Any = None  # the rows that are its group's, from `first` to `last`
    last: Any = None
    group: Any = None
    block: Any = None  # of w, if groups name theirs; another number than 0 .. count - 1: none
    cut: Any = None  # which of the columns' parts
    x_column: Any = None  # the first column of x, if it is another than 0


def tiles_of(plan: Plan, refs: Refs) -> jax.Array:
    """Counts this CTA's tiles."""
    tiles = plan.tiles if refs.pairs is None else refs.pairs.number(plan.m, plan.config.rows) * plan.slabs
    return (tiles - lax.axis_index("worker") + plan.workers - 1) // plan.workers


def place_of(plan: Plan, refs: Refs, i: jax.Array) -> Place:
    """Returns where this CTA's tile i is. Tiles that share w's rows run side by side. With groups, tiles that share x's
    do, and a group's weight is near in the second-level cache until its next block."""
    number = lax.axis_index("worker") + i * plan.workers
    if refs.pairs is not None:
        pair, column = number // plan.slabs, lax.rem(number, jnp.int32(plan.slabs)) * plan.columns
        group, row, first, last = (each[pair] for each in refs.pairs[:4])
        if plan.blocks is not None:
            block, cut = refs.pairs.own[group], cut_of(plan.blocks.cuts, column)
            w_row = jnp.clip(block, 0, plan.blocks.count - 1) * plan.blocks.stride + column
            return Place(row, column, w_row, first, last, group, block, cut, cut * plan.k)
        w_row = jnp.minimum(group, plan.groups - 1) * plan.parts * plan.n + column
        return Place(row, column, w_row, first, last, group)
    column = number // plan.row_tiles * plan.columns
    return Place(lax.rem(number, jnp.int32(plan.row_tiles)) * plan.config.rows, column, column)


def cut_of(cuts: tuple[int, ...], column: jax.Array) -> jax.Array:
    """Returns the part that a column is in."""
    ends = [sum(cuts[: i + 1]) for i in range(len(cuts) - 1)]
    return sum((jnp.where(column >= end, 1, 0) for end in ends), start=jnp.int32(0))
