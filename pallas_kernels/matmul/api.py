"""matmul: x @ w.T + bias + residual."""

import jax
from jax.typing import DTypeLike

from pallas_kernels.backends import Backend, choose
from pallas_kernels.checks import check_floats, check_out_dtype
from pallas_kernels.matmul import xla
from pallas_kernels.matmul.config import check_faster, check_supported


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """x [..., K] times w [N, K] transposed, plus bias [N] and residual [..., N] -> [..., N].

    Accumulates in promote_types(x.dtype, float32), float32 and float64 at the highest precision; bias and residual are
    added before the cast to `out_dtype` (default: x's); they may have other floating dtypes than x. The mosaic backend
    takes up to 512 rows in 16 bits, N and K in multiples of 16 and a residual of `out_dtype`; unnamed, it runs where
    it was measured to be the faster one. Raises ValueError where shapes or dtypes disagree, and NotImplementedError for
    what a backend that was named doesn't do.
    """
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape} and w {w.shape}, expected [..., K] and [N, K]")
    check_floats(x=x, w=w)
    for name, term, shape in (("bias", bias, w.shape[:1]), ("residual", residual, (*x.shape[:-1], w.shape[0]))):
        if term is not None:
            check_floats(**{name: term})
            if term.shape != shape:
                raise ValueError(f"{name} has shape {term.shape}, expected {shape}")
    out_dtype = check_out_dtype(x.dtype if out_dtype is None else out_dtype)
    chosen = choose(BACKENDS, backend, x, w, residual, out_dtype)
    return chosen.run(x, w, bias, residual, out_dtype)


def _mosaic(*args):
    from pallas_kernels.matmul import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.matmul(*args)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported, check_faster),
    "xla": Backend(xla.matmul),
}
