"""Holds what the warps of the Hopper matmul for few rows share: sizes, memory, and which tiles a CTA has."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Plan(Sizes):
    """Holds static sizes."""

    extra: dict[str, jnp.dtype]  # the optional arguments that are there
    config: Config
    gated: bool = False

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
        return pl.cdiv(self.m, self.config.rows)

    @property
    def tiles(self) -> int:
        return self.row_tiles * pl.cdiv(self.n, self.columns)

    @property
    def workers(self) -> int:
        return min(self.tiles, self.config.ctas)

    @property
    def vectors(self) -> list[str]:
        """Lists what is copied once a tile."""
        return [name for name in self.extra if name != "residual" and name not in self.ring_scales]

    @property
    def ring_scales(self) -> dict[str, int]:
        """Maps scales that come with each stage to their number for one block of K."""
        return {"x_scale": self.config.rows, "w_scale": self.vector} if self.in_blocks else {}

    @property
    def vector(self) -> int:
        """Counts a column vector's copied elements: a multiple of 128 bytes, in 16 bits too."""
        return pl.cdiv(self.config.columns, 64) * 64

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
        vectors = {"x_scale": config.rows, "w_scale": self.vector, "bias": self.vector}
        scratch = {
            "x_s": swizzled((stages, config.rows, self.step), self.dtype),
            "w_s": swizzled((stages, config.columns, self.step), self.dtype),
            "full": plgpu.Barrier(num_arrivals=1 + self.parts + len(self.ring_scales), num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=self.computing, num_barriers=stages),
            "out_s": plgpu.SMEM((self.computing, UNIT, self.columns), self.out_dtype),
        }
        if self.vectors:
            scratch["vectors_full"] = plgpu.Barrier(num_arrivals=len(self.vectors))
            scratch["vectors_free"] = plgpu.Barrier(num_arrivals=self.computing)
        for name, size in self.ring_scales.items():
            scratch[f"{name}_s"] = plgpu.SMEM((stages, self.step // BLOCK, size), jnp.float32)
        for name in self.vectors:
            scratch[f"{name}_s"] = plgpu.SMEM((vectors[name],), self.extra[name])
        if "residual" in self.extra:
            scratch["residual_full"] = plgpu.Barrier(num_barriers=self.computing)
        return scratch


def tiles_of(plan: Plan) -> jax.Array:
    """Counts this CTA's tiles."""
    return (plan.tiles - lax.axis_index("worker") + plan.workers - 1) // plan.workers


def begin_of(plan: Plan, i: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns first row and column of this CTA's tile i. Tiles that share w's rows run side by side."""
    number = lax.axis_index("worker") + i * plan.workers
    row = lax.rem(number, jnp.int32(plan.row_tiles)) * plan.config.rows
    return row, number // plan.row_tiles * plan.columns
