"""Checks what the matmuls support, in one place for the operations that are made of them. Imports no Pallas."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.gemm_sm90 import gemv_config
from pallas_kernels.hopper.gemm_sm90.skinny_config import MOST_ROWS

SMALLEST = 1 << 20  # weights of a product that is worth a kernel of its own
OUT_DTYPES = ("bfloat16", "float16", "float32")


def check_result(out_dtype: jnp.dtype, residual: jax.Array | None) -> None:
    """Raises NotImplementedError for dtypes that the kernels do not do, naming what they do."""
    if str(out_dtype) not in OUT_DTYPES:
        names = ", ".join(OUT_DTYPES)
        raise NotImplementedError(f"out_dtype {out_dtype} is not supported by backend mosaic, which does {names}")
    if residual is not None and residual.dtype != out_dtype:
        raise NotImplementedError(
            f"a {residual.dtype} residual is not supported by backend mosaic, which adds one of out_dtype, {out_dtype}"
        )


def check_few_rows(operation: str, x: jax.Array, w: jax.Array) -> None:
    """Raises NotImplementedError unless the matmul for few rows takes x [..., K] and w [N, K] of 16 bits."""
    check_16_bits(operation, x, w)
    if (rows := x.size // max(x.shape[-1], 1)) > MOST_ROWS:
        raise NotImplementedError(f"x has {rows} rows; the mosaic kernel supports at most {MOST_ROWS}")


def check_16_bits(operation: str, x: jax.Array, w: jax.Array) -> None:
    """Raises NotImplementedError unless x [..., K] and w [N, K] have 16 bits, and sizes that the matmul takes."""
    n, k = w.shape
    if str(x.dtype) not in ("bfloat16", "float16"):
        raise NotImplementedError(f"the mosaic kernel has no {x.dtype} {operation}; supported: bfloat16, float16")
    if n % 16 or k % 16 or not n or not k:
        raise NotImplementedError(f"w has shape {w.shape}; the mosaic kernel supports multiples of 16")


def check_faster_rows(x: jax.Array, w: jax.Array, rows_faster: tuple[int, int]) -> None:
    """Raises NotImplementedError unless x is bfloat16 and has from .. to rows."""
    rows = x.size // x.shape[-1]
    if x.dtype != "bfloat16" or not rows_faster[0] <= rows <= rows_faster[1]:
        raise NotImplementedError(f"the mosaic kernel is not expected to be faster for {rows} rows and w of {w.shape}")


def rows_unmeasured(n: int, k: int, one_row: gemv_config.Config, most: int) -> tuple[int, int]:
    """Returns the range of M in which the kernels for w [n, k] should be faster, where nothing was measured: where its
    bytes bound the product, since the kernels save passes. One row needs the kernel that fits it."""
    if n * k < SMALLEST:
        return 1, 0
    return (1 if gemv_config.fits(one_row, n, k) else 2), most
