"""Shared memory as both products want it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array as TMA and wgmma want it: its rows in parts of at most 128 bytes, each swizzled."""
    size = jnp.dtype(dtype).itemsize
    width = next(width for width in (128, 64, 32, 16) if shape[-1] * size % width == 0)
    transforms = (plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
