"""Holds what the warps of the Hopper matmul for few rows share: sizes, memory, and which tiles a CTA has."""

from collections.abc import Callable
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


class Pairs(NamedTuple):
    """Lists the blocks of rows that each group's weight meets, where rows are in groups with a weight each. A block
    begins at a multiple of its size, so it may meet several groups. What follows the last group is a group of its own,
    X. A kernel takes the arrays of what it reads."""

    group: Any  # i32[G]
    row: Any  # i32[G]: the block's first
    first: Any  # i32[G]: the group's first row in it
    last: Any  # i32[G]: the group's end in it
    starts: Any  # i32[X + 1]: of groups
    before: Any  # i32[X + 1]: the pairs of all groups before
    own: Any = None  # i32[X + 1]: the block of w that each group names; -1: none

    def arrays(self) -> tuple[jax.Array, ...]:
        """Returns what a kernel takes."""
        return tuple(each for each in self if each is not None)

    def number(self, m: int, block: int) -> jax.Array:
        """Returns the number of pairs, in a kernel."""
        groups = self.starts.shape[0] - 1
        start = self.starts[groups]
        return self.before[groups] + jnp.where(start < m, (m - 1) // block - lax.div(start, jnp.int32(block)) + 1, 0)


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


def pairs_of(sizes: jax.Array, m: int, block: int, own: jax.Array | None = None) -> Pairs:
    """Returns the pairs of M sorted rows in groups of sizes i32[X] and blocks of `block` rows. XLA makes two kernels of
    it, or four if there are several blocks: all is comparisons and sums, and a single number would be one more. `own`
    i32[X] are the blocks of w that groups name."""
    groups = sizes.shape[0]
    group = jnp.arange(groups + 1, dtype=jnp.int32)
    upto, before = group[None, :groups] <= group[:, None], group[None, :groups] < group[:, None]

    def total(chosen: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, x[None, :], 0), axis=1, dtype=jnp.int32)

    starts, ends = total(before, sizes), jnp.where(group == groups, m, total(upto, sizes))
    blocks = jnp.where(ends > starts, (ends - 1) // block - starts // block + 1, 0)
    firsts = total(before, jnp.minimum(sizes, 1) if m <= block else blocks[:groups])
    number = jnp.arange(most_pairs(m, groups + 1, block), dtype=jnp.int32)[:, None]
    spread = partial(jnp.broadcast_to, shape=(len(number), groups + 1))
    row = (spread(starts // block) + number - spread(firsts)) * block
    mine = (number >= spread(firsts)) & (number < spread(firsts + blocks))
    columns = spread(group), row, jnp.maximum(spread(starts), row), jnp.minimum(spread(ends), row + block)
    found = (jnp.sum(jnp.where(mine, column, 0), axis=1, dtype=jnp.int32) for column in columns)
    return Pairs(*found, starts, firsts, None if own is None else jnp.append(own, jnp.int32(-1)))


def in_pieces(
    row: jax.Array, first: jax.Array, last: jax.Array, rows: int, copy: Callable[[jax.Array, int], None]
) -> None:
    """Copies those of `rows` rows from `row` on that are from `first` to `last`, in pieces whose sizes are powers of
    two. `copy` takes a piece's place among the rows, and its size."""
    begin = jnp.maximum(first - row, 0)
    count = jnp.maximum(jnp.minimum(last - row, rows) - begin, 0)
    for size in (1 << i for i in reversed(range(rows.bit_length()))):
        place = begin + count // (2 * size) * (2 * size)
        pl.when((count // size) % 2 == 1)(partial(copy, place, size))


def most_pairs(m: int, groups: int, block: int) -> int:
    """Bounds the pairs of M rows in some groups."""
    return min(m, pl.cdiv(m, block) + groups - 1)


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
