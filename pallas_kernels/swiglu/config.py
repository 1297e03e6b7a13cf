"""What the Mosaic kernel of swiglu supports, and where it is faster than a product and a pass after it. Light to
import."""

import jax

from pallas_kernels.gemm_sm90.skinny_config import MOST_ROWS

# Where the kernel was the faster one in bfloat16 on an H200, by F and K: from M, to M. Nothing has been measured yet.
FASTER: dict[tuple[int, int], tuple[int, int]] = {}


def check_supported(x: jax.Array, w: jax.Array) -> None:
    """Raises NotImplementedError, saying what is supported, for what the kernel lacks."""
    rows, (n, k) = x.size // max(x.shape[-1], 1), w.shape
    if str(x.dtype) not in ("bfloat16", "float16"):
        raise NotImplementedError(f"the mosaic kernel has no {x.dtype} swiglu; supported: bfloat16, float16")
    if rows > MOST_ROWS:
        raise NotImplementedError(f"x has {rows} rows; the mosaic kernel supports at most {MOST_ROWS}")
    if n % 32 or k % 16 or not n or not k:
        raise NotImplementedError(f"w has shape {w.shape}; the mosaic kernel supports F and K in multiples of 16")


def check_faster(x: jax.Array, w: jax.Array) -> None:
    """Raises NotImplementedError where two kernels were as fast, or nothing was measured."""
    check_supported(x, w)
    rows, (n, k) = x.size // x.shape[-1], w.shape
    low, high = FASTER.get((n // 2, k), (1, 0))
    if x.dtype != "bfloat16" or not low <= rows <= high:
        raise NotImplementedError(f"the mosaic kernel was not seen to be faster for {rows} rows and w of {w.shape}")
