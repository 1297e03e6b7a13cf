"""Plans what the kernel of weight_only_matmul on sm_90 is specialized to: sizes, copies and shared memory."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.weight_formats import WeightFormat
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes, swizzled
from pallas_kernels.row_groups import most_pairs
from pallas_kernels.weight_only_matmul.config import WARP_ROWS, Config
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, Tile

PIECE = 64  # columns of x in 128 bytes
PARTS = 4  # of a stage's columns, of which each warp of a warpgroup has one where products are by_warp


class Item(NamedTuple):
    """Says where a tile is."""

    row: jax.Array  # of the weight
    token: jax.Array  # of x and of the result
    split: jax.Array  # part of K
    column: jax.Array  # of the result
    first: Any = None  # the tokens that are its group's, from `first` to `last`
    last: Any = None
    group: Any = None


@dataclass(frozen=True)
class Plan:
    """Holds static sizes. With `weights`, x has groups of rows, each with a weight of its own, one below the other. If
    gated, each has gate's n rows and then as many of up's. A tile has the same ones of both."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    format: WeightFormat
    config: Config
    weights: int = 0
    gated: bool = False

    @property
    def apart(self) -> bool:
        """Tells whether a tile's rows of x begin with its group's. Each copy is of 128 bytes of rows then: TMA cuts
        wider ones into blocks of 8 rows, which begin at multiples of 8, and K into multiples of 128 bytes."""
        return self.config.by_warp and self.weights > 0

    @property
    def halves(self) -> int:
        """Counts the runs of the weight's rows that a tile has: of a gated tile each is a row tile."""
        return 2 if self.gated else 1

    @property
    def rows(self) -> int:
        """Counts the columns of the result in a tile, which are rows of the weight."""
        return self.config.rows // self.halves

    @property
    def step(self) -> int:
        """Counts the columns of the weight that a stage holds."""
        return self.config.width * (2 if self.format.packed else 1)

    @property
    def steps(self) -> int:
        """Counts the stages of an item; what is past the end of K reads as zeros."""
        return pl.cdiv(self.k, self.step * self.config.fold * self.config.split)

    @property
    def tiles(self) -> tuple[int, int]:
        """Counts tiles along the weight's rows and along x's, or the most that there may be."""
        tokens = self.config.tokens
        along_x = most_pairs(self.m, self.weights + 1, tokens) if self.weights else pl.cdiv(self.m, tokens)
        return pl.cdiv(self.n, self.rows), along_x

    @property
    def items(self) -> int:
        return math.prod(self.tiles) * self.config.split

    @property
    def columns(self) -> int:
        """Counts the columns of x's parts in a tile, side by side."""
        return self.config.tokens * self.config.fold

    @property
    def parts_stride(self) -> int:
        """Returns a row's stride among the sums of a warpgroup's warps: neither writing nor reading crowds a bank."""
        return PARTS * WARP_ROWS + 4

    @property
    def by_group(self) -> bool:
        return self.format.group is not None

    @property
    def groups(self) -> int:
        return max(1, self.step // self.format.group) if self.format.group else 1

    def vector_dtype(self, name: str) -> jnp.dtype:
        if name == "zeros":
            return jnp.dtype("int8")
        of_groups = "uint8" if self.format.scale_codes == "e8m0" else "float16"
        return jnp.dtype(of_groups if self.by_group else "float32")

    def vector_rows(self, name: str) -> int:
        """Counts rows whose scales or zeros are copied together: a multiple of 128 bytes in all."""
        rows, copied = self.rows, self.config.fold * self.groups if self.by_group else 1
        while copied * rows * self.vector_dtype(name).itemsize % 128:
            rows += 16
        return rows

    @property
    def swizzle(self) -> int:
        """Returns the bytes of a row of codes that lie together in a stage: those of a row in memory are a multiple."""
        row = self.k // 2 if self.format.packed else self.k
        return next(width for width in (128, 64, 32) if width <= self.config.width and row % width == 0)

    @property
    def tile(self) -> Tile:
        config = self.config
        vector_rows = {name: self.vector_rows(name) for name in ("scales", "zeros")}
        return Tile(
            self.format, self.dtype, config.width, self.swizzle, config.rows, config.fold, self.groups, vector_rows,
            self.halves,
        )  # fmt: skip

    def copies(self, names: tuple[str, ...]) -> list[tuple[str, int, int]]:
        """Lists what a stage is filled with: arrays, halves of a gated weight, and parts of K."""
        own = [name for name in ("scales", "zeros") if name in names and self.by_group]
        parts = range(self.config.fold if self.apart else 1)
        codes = [("w", half, part) for half in range(self.halves) for part in parts]
        vectors = [(name, half, 0) for name in own for half in range(self.halves)]
        pieces = self.step // PIECE if self.apart else 1
        return codes + vectors + [("x", 0, part) for part in range(self.config.fold * pieces)]

    def vectors(self, names: tuple[str, ...]) -> list[str]:
        """Lists what is copied once a tile."""
        return [] if self.by_group else [name for name in ("scales", "zeros") if name in names]

    def scratch(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Returns shared memory and barriers, by name, with as many stages as are asked for and fit."""
        for stages in range(self.config.stages, 1, -1):
            scratch = self._scratch(names, stages)
            if shared_bytes(scratch) <= SHARED_MEMORY:
                return scratch
        raise NotImplementedError(
            f"{self.config} needs more shared memory for {self.format.name}: "
            f"{shared_bytes(self._scratch(names, 2))} bytes for two stages"
        )

    def _scratch(self, names: tuple[str, ...], stages: int) -> dict[str, Any]:
        config, out_rows = self.config, ROWS // self.config.fold
        shape: tuple[int, ...]
        if self.apart:
            by_piece = (plgpu.SwizzleTransform(128),)  # type: ignore[abstract]
            w_shape, x_shape = (config.fold, config.rows, 128), (config.fold * self.step // PIECE, config.tokens, PIECE)
            w_s = plgpu.SMEM((stages, *w_shape), self.format.storage_dtype, transforms=by_piece)
            x_s = plgpu.SMEM((stages, *x_shape), self.dtype, transforms=by_piece)
        else:
            shape = stages, config.rows, config.fold * config.width
            w_s = swizzled(shape, self.format.storage_dtype, self.swizzle)
            x_s = swizzled((stages, self.columns, self.step), self.dtype)
        scratch: dict[str, Any] = {
            "w_s": w_s,
            "x_s": x_s,
            "full": plgpu.Barrier(num_arrivals=len(self.copies(names)), num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        }
        shape = (stages, self.halves * config.fold * self.groups) if self.by_group else ()
        for name in ("scales", "zeros"):
            if name in names:
                scratch[f"{name}_s"] = plgpu.SMEM((*shape, self.vector_rows(name)), self.vector_dtype(name))
        if config.by_warp:
            together = config.row_tiles if self.apart else 1
            shape = config.warpgroups, together * config.tokens, self.parts_stride
            scratch["parts_s"] = plgpu.SMEM(shape, jnp.float32)
        else:
            scratch["out_s"] = plgpu.SMEM((config.warpgroups, config.tokens, out_rows), self.out_dtype)
        if config.fold > 1 and not config.by_warp:
            scratch["parts_s"] = plgpu.SMEM((config.warpgroups, self.columns, ROWS), jnp.float32)
        if self.vectors(names):
            scratch["vectors_full"] = plgpu.Barrier(num_arrivals=len(self.vectors(names)))
            scratch["vectors_free"] = plgpu.Barrier(num_arrivals=config.warpgroups)
        if "table" in names:
            scratch["table_s"] = plgpu.SMEM((256, 32), jnp.int32)
            scratch["table_full"] = plgpu.Barrier()
        return scratch
