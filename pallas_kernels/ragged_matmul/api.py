"""Multiplies groups of rows, each by a weight of its own."""

import jax
from jax.typing import DTypeLike

from pallas_kernels.backends import DETERMINISTIC, Backend, choose
from pallas_kernels.checks import check_int32, check_out_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.ragged_matmul import xla
from pallas_kernels.ragged_matmul.config import check_supported, check_triton
from pallas_kernels.row_groups import Schedule


def ragged_matmul(
    x: jax.Array | QuantizedRows,
    w: jax.Array | QuantizedWeight,
    sizes: jax.Array,
    *,
    gated: bool = False,
    schedule: Schedule | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Returns [M, N]: the rows of group i of x [M, K] times block i of w [X N, K], transposed.

    x has the rows of group 0 first, then those of group 1, and so on; sizes i32[X] says how many each has. Rows
    after the last group give zeros, whatever they hold. A quantized w has rows of codes, or of plain values if its
    format is weight-only. Sums are in promote_types(x.dtype, float32), rounded once to out_dtype (default: x's;
    QuantizedRows need one). gated: each block of w has gate's rows, then as many of up's, and SiLU(x gate^T) * (x
    up^T) is returned, [M, N / 2], rounded once. schedule: of sizes, for a kernel that has such blocks (see block_rows
    in config.py).

    A row's bits depend neither on its group's size nor on other rows. With backend "deterministic" they do not depend
    on M, either. Else few rows may run in kernels of mosaic's that add in another order (choose_rows and
    choose_codes_config in config.py). Mosaic's kernels round weights of 4 bits, and their float16 scales, to x's
    dtype. Plain rows and weights have gradients. Raises ValueError where shapes or dtypes disagree, and
    NotImplementedError for what a named backend doesn't do.
    """
    check_int32(sizes=sizes)
    values = x.values if isinstance(x, QuantizedRows) else x
    blocks = sizes.size * (2 if gated else 1)
    if sizes.ndim != 1 or not blocks or values.ndim != 2 or w.shape[0] % blocks or values.shape[1] != w.shape[1]:
        raise ValueError(f"x {values.shape}, w {w.shape} and sizes {sizes.shape}, expected [M, K], [X N, K] and [X]")
    if out_dtype is None:
        if isinstance(x, QuantizedRows):
            raise ValueError("x is quantized: give out_dtype")
        out_dtype = x.dtype
    out_dtype = check_out_dtype(out_dtype)
    chosen = choose(BACKENDS, backend, x, w, sizes.shape[0], gated, out_dtype)
    scheduled = chosen in (BACKENDS["mosaic"], BACKENDS[DETERMINISTIC])  # others make their own tiles
    return chosen.run(x, w, sizes, gated, out_dtype, **({"schedule": schedule} if scheduled else {}))


def _mosaic(*arguments, **how) -> jax.Array:
    from pallas_kernels.ragged_matmul import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.ragged_matmul(*arguments, **how)


def _triton(*arguments) -> jax.Array:
    from pallas_kernels.ragged_matmul import triton  # imports Triton

    return triton.ragged_matmul(*arguments)


def _one_order(x, w, sizes, gated, out_dtype, schedule=None) -> jax.Array:
    """Runs what would run by default, without kernels of few rows."""
    chosen = choose(BACKENDS, None, x, w, sizes.shape[0], gated, out_dtype)
    how = {"schedule": schedule, "one_order": True} if chosen is BACKENDS["mosaic"] else {}
    return chosen.run(x, w, sizes, gated, out_dtype, **how)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported),
    "triton": Backend(_triton, check_triton),
    "xla": Backend(xla.ragged_matmul),
    DETERMINISTIC: Backend(_one_order),
}
