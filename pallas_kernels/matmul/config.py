"""What matmul's Mosaic kernel supports, and where it is the faster one. Light to import."""

import jax
import jax.numpy as jnp

from pallas_kernels.gemm_sm90.support import check_few_rows, check_measured_faster, check_result


def check_supported(x: jax.Array, w: jax.Array, residual: jax.Array | None, out_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError, saying what is supported, for what the kernel lacks."""
    check_few_rows("matmul", x, w)
    check_result(out_dtype, residual)


# Where the kernel was the faster one in bfloat16 on an H200, by N and K: from M, to M. Attention's output and the MLP's
# down projection add a residual, which takes XLA a pass of its own.
FASTER = {
    (12288, 4096): (1, 128), (4096, 4096): (1, 512), (4096, 11008): (1, 512),
    (6144, 4096): (2, 512), (4096, 14336): (2, 512),
    (15360, 5120): (2, 128), (5120, 5120): (2, 256), (5120, 13824): (2, 128),
}  # fmt: skip


def check_faster(x: jax.Array, w: jax.Array, residual: jax.Array | None, out_dtype: jnp.dtype) -> None:
    """Raises NotImplementedError where XLA's own product was as fast, or nothing was measured."""
    check_supported(x, w, residual, out_dtype)
    check_measured_faster(x, w, FASTER.get((w.shape[0], w.shape[1])))
