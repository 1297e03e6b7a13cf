"""Allocates shared memory as TMA and wgmma want it, and counts how much of it a kernel takes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

_ALIGNMENT = 1024  # of every buffer


def swizzled(shape: tuple[int, ...], dtype: Any, width: int | None = None) -> Any:
    """Allocates an array whose rows are in parts of `width` bytes, each swizzled: 128, 64, 32 or 16. The default is the
    widest that rows are a multiple of."""
    size = jnp.dtype(dtype).itemsize
    if width is None:
        width = next(width for width in (128, 64, 32, 16) if shape[-1] * size % width == 0)
    transforms = (plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def shared_bytes(scratch: Any, reductions: int = 0) -> int:
    """Returns what a pytree of buffers and barriers (or None) takes, with `reductions` bytes for Pallas's
    reductions."""
    total = -(-reductions // _ALIGNMENT) * _ALIGNMENT
    for ref in jax.tree.leaves(scratch):
        if isinstance(ref, plgpu.Barrier):
            total += 8 * int(np.prod(ref.num_barriers))
        else:
            size = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
    return total
