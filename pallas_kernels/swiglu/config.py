"""Says what the Mosaic kernel of swiglu supports, and where it is faster than two kernels. Imports no Pallas."""

import jax

from pallas_kernels.backends import on_hopper
from pallas_kernels.hopper.gemm_sm90.gemv_config import GATED
from pallas_kernels.hopper.gemm_sm90.support import (
    check_16_bits,
    check_faster_rows,
    check_few_rows,
    rows_unmeasured,
)
from pallas_kernels.one_order import check_device

# By F and K: the range of M in which the kernel was faster in bfloat16 on an H200 (experiments/LOG.md).
FASTER = {
    (11008, 4096): (1, 512), (14336, 4096): (1, 256), (13824, 5120): (2, 256),
    (5504, 4096): (16, 128),  # on an H100
    (8192, 2048): (1, 512),  # whole steps, to 448
}  # fmt: skip
UNMEASURED = 256  # measured shapes of whole models are faster up to here


def check_supported(x: jax.Array, w: jax.Array) -> None:
    """Raises NotImplementedError, saying what is supported, for what the kernel lacks."""
    check_few_rows("swiglu", x, w)
    _check_halves(w)


def check_one_order(x: jax.Array, w: jax.Array) -> None:
    """Raises NotImplementedError for what cannot be added in one order on this device."""
    check_device()
    if on_hopper():
        check_16_bits("swiglu", x, w)
        _check_halves(w)


def _check_halves(w: jax.Array) -> None:
    if w.shape[0] % 32:
        raise NotImplementedError(f"w has shape {w.shape}; the mosaic kernel supports F in multiples of 16")


def check_faster(x: jax.Array, w: jax.Array) -> None:
    """Raises NotImplementedError where two kernels were as fast, or should be."""
    check_supported(x, w)
    shape = w.shape[0] // 2, w.shape[1]
    check_faster_rows(x, w, FASTER.get(shape) or rows_unmeasured(*shape, GATED, UNMEASURED))
