"""Plans what the kernel of weight_only_matmul on sm_90 is specialized to: sizes, copies and shared memory."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.weight_formats import WeightFormat
from pallas_kernels.hopper.hopper import SHARED_MEMORY
from pallas_kernels.hopper.smem_sm90 import shared_bytes, swizzled
from pallas_kernels.weight_only_matmul.config import WARP_ROWS, Config
from pallas_kernels.weight_only_matmul.operand_sm90 import ROWS, Tile

PARTS = 4  # of a stage's columns, of which each warp of a warpgroup has one where products are by_warp


@dataclass(frozen=True)
class Plan:
    """Holds static sizes."""

    m: int
    n: int
    k: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    format: WeightFormat
    config: Config

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
        """Counts tiles along the weight's rows and along x's."""
        return pl.cdiv(self.n, self.config.rows), pl.cdiv(self.m, self.config.tokens)

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
        return jnp.dtype("int8" if name == "zeros" else "float16" if self.by_group else "float32")

    def vector_rows(self, name: str) -> int:
        """Counts rows whose scales or zeros are copied together: a multiple of 128 bytes in all."""
        rows, copied = self.config.rows, self.config.fold * self.groups if self.by_group else 1
        while copied * rows * self.vector_dtype(name).itemsize % 128:
            rows += 16
        return rows

    @property
    def tile(self) -> Tile:
        config = self.config
        vector_rows = {name: self.vector_rows(name) for name in ("scales", "zeros")}
        return Tile(self.format, self.dtype, config.width, config.rows, config.fold, self.groups, vector_rows)

    def copies(self, names: tuple[str, ...]) -> list[tuple[str, int]]:
        """Lists what a stage is filled with: arrays, and of x parts of K."""
        copies = [(name, 0) for name in ("w", "scales", "zeros") if name in names and (name == "w" or self.by_group)]
        return copies + [("x", part) for part in range(self.config.fold)]

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
        scratch: dict[str, Any] = {
            "w_s": swizzled((stages, config.rows, config.fold * config.width), self.format.storage_dtype, config.width),
            "x_s": swizzled((stages, self.columns, self.step), self.dtype),
            "full": plgpu.Barrier(num_arrivals=len(self.copies(names)), num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=stages),
        }
        shape = (stages, config.fold * self.groups) if self.by_group else ()
        for name in ("scales", "zeros"):
            if name in names:
                scratch[f"{name}_s"] = plgpu.SMEM((*shape, self.vector_rows(name)), self.vector_dtype(name))
        if config.by_warp:
            scratch["parts_s"] = plgpu.SMEM((config.warpgroups, config.tokens, self.parts_stride), jnp.float32)
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
