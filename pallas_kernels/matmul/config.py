"""What matmul's Mosaic kernel supports, and where it is the faster one. Light to import."""

import jax
import jax.numpy as jnp

from pallas_kernels.gemm_sm90.skinny_config import MOST_ROWS
from pallas_kernels.gemm_sm90.support import check_result


def check_supported(x: jax.Array, w: jax.Array, residual: jax.Array | None, out_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError, saying what is supported, for what the kernel lacks."""
    rows, (n, k) = x.size // max(x.shape[-1], 1), w.shape
    if str(x.dtype) not in ("bfloat16", "float16"):
        raise NotImplementedError(f"the mosaic kernel has no {x.dtype} matmul; supported: bfloat16, float16")
    if rows > MOST_ROWS:
        raise NotImplementedError(f"x has {rows} rows; the mosaic kernel supports at most {MOST_ROWS}")
    if n % 16 or k % 16 or not n or not k:
        raise NotImplementedError(f"w has shape {w.shape}; the mosaic kernel supports multiples of 16")
    check_result(out_dtype, residual)


# Where the kernel was the faster one in bfloat16 on an H200, by N and K: from M, to M.
FASTER = {(12288, 4096): (1, 128), (4096, 4096): (2, 128), (4096, 11008): (1, 64), (22016, 4096): (129, 256)}


def check_faster(x: jax.Array, w: jax.Array, residual: jax.Array | None, out_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError where XLA's own product was as fast, or nothing was measured."""
    check_supported(x, w, residual, out_dtype)
    rows, (n, k) = x.size // x.shape[-1], w.shape
    low, high = FASTER.get((n, k), (1, 0))
    if x.dtype != "bfloat16" or not low <= rows <= high:
        raise NotImplementedError(f"the mosaic kernel was not seen to be faster for {rows} rows and w of {w.shape}")
