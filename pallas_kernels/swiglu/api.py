"""Computes SiLU(x @ gate.T) * (x @ up.T), of x or of its norm."""

import jax

from pallas_kernels.backends import DETERMINISTIC, Backend, choose, on_hopper
from pallas_kernels.checks import check_floats, check_norm
from pallas_kernels.matmul import matmul
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.swiglu.config import check_faster, check_one_order, check_supported


def swiglu(
    x: jax.Array, w: jax.Array, *, norm: jax.Array | None = None, eps: float = 0.0, backend: str | None = None
) -> jax.Array:
    """Returns SiLU(x gate^T) * (x up^T) (arXiv:2002.05202) of x [..., K] and w [2F, K]: [..., F] in x's dtype.

    Gate's rows come first in w. With norm [K], in x's dtype, RMSNorm(x) * norm replaces x, as in matmul. Products
    accumulate in promote_types(x.dtype, float32). The mosaic kernel keeps them so until the result is rounded. xla
    makes the matmul and the rest one after the other, and rounds products to x's dtype in between. The kernel takes up
    to 512 rows in 16 bits, K and F in multiples of 16. If no backend is named, it runs where it was measured to be
    faster, or should be. Raises ValueError where shapes or dtypes disagree, and NotImplementedError for what a named
    backend doesn't do.
    """
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1] or w.shape[0] % 2:
        raise ValueError(f"x has shape {x.shape} and w {w.shape}, expected [..., K] and [2F, K]")
    check_floats(x=x, w=w)
    check_norm(norm, x)
    return choose(BACKENDS, backend, x, w).run(x, w, norm, eps, backend)


def _mosaic(x: jax.Array, w: jax.Array, norm: jax.Array | None, eps: float, _: str | None) -> jax.Array:
    from pallas_kernels.swiglu import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.swiglu(x, w, norm=norm, eps=eps)


def _two_operations(x: jax.Array, w: jax.Array, norm: jax.Array | None, eps: float, backend: str | None) -> jax.Array:
    rows = matmul(x.reshape(-1, x.shape[-1]), w, norm=norm, eps=eps, backend=backend)
    return silu_mul_quant(rows, backend=backend).reshape(*x.shape[:-1], w.shape[0] // 2)


def _one_order(x: jax.Array, w: jax.Array, norm: jax.Array | None, eps: float, backend: str | None) -> jax.Array:
    if not on_hopper():
        return _two_operations(x, w, norm, eps, backend)
    from pallas_kernels.swiglu import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.in_one_order(x, w, norm=norm, eps=eps)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported, check_faster),
    "xla": Backend(_two_operations),
    DETERMINISTIC: Backend(_one_order, check_one_order),
}
