"""Says what matmul's Mosaic kernel supports, and where it is faster than XLA. Imports no Pallas."""

import jax
import jax.numpy as jnp

from pallas_kernels.backends import on_hopper
from pallas_kernels.hopper.gemm_sm90.gemv_config import PLAIN
from pallas_kernels.hopper.gemm_sm90.support import (
    check_16_bits,
    check_faster_rows,
    check_few_rows,
    check_result,
    rows_unmeasured,
)
from pallas_kernels.one_order import check_device


def check_supported(x: jax.Array, w: jax.Array, residual: jax.Array | None, out_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError, saying what is supported, for what the kernel lacks."""
    check_few_rows("matmul", x, w)
    check_result(out_dtype, residual)


def check_one_order(x: jax.Array, w: jax.Array, residual: jax.Array | None, out_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError for what cannot be added in one order on this device."""
    check_device()
    if on_hopper():
        check_16_bits("matmul", x, w)
        check_result(out_dtype, residual)


# By N and K: the range of M in which the kernel was faster in bfloat16 on an H200 (experiments/LOG.md). At one row this
# holds in a whole step. There XLA's matmul alone is faster, but its rounding and the norm before it take that time
# again. XLA also adds a residual in a pass of its own, so with a residual the range is longer.
FASTER = {
    (12288, 4096): (1, 128), (4096, 4096): (1, 512), (4096, 11008): (1, 384),
    (6144, 4096): (1, 512), (4096, 14336): (1, 256),
    (15360, 5120): (2, 128), (5120, 5120): (2, 256), (5120, 13824): (2, 128),
    (4096, 2048): (16, 128), (4096, 5504): (16, 128),  # on an H100
    (3072, 2048): (1, 512), (2048, 2048): (1, 512), (2048, 8192): (1, 512),  # whole steps, to 448
}  # fmt: skip
TO_WITH_RESIDUAL = {(4096, 11008): 512, (4096, 14336): 512}
UNMEASURED, UNMEASURED_WITH_RESIDUAL = 128, 256  # all measured shapes are faster up to here


def check_faster(x: jax.Array, w: jax.Array, residual: jax.Array | None, out_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError if XLA's own product was as fast, or should be."""
    check_supported(x, w, residual, out_dtype)
    shape = w.shape[0], w.shape[1]
    if shape in FASTER:
        first, last = FASTER[shape]
        rows = first, last if residual is None else TO_WITH_RESIDUAL.get(shape, last)
    else:
        most = UNMEASURED if residual is None else UNMEASURED_WITH_RESIDUAL
        rows = rows_unmeasured(
            *shape, PLAIN, most if out_dtype == x.dtype else 0
        )  # XLA's heads run at the memory's rate
    check_faster_rows(x, w, rows)
