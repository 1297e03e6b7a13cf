"""Computes x @ w.T + bias + residual, of x or of its norm."""

import jax
from jax.typing import DTypeLike

from pallas_kernels.backends import DETERMINISTIC, Backend, choose, on_hopper
from pallas_kernels.checks import check_floats, check_norm, check_out_dtype
from pallas_kernels.matmul import xla
from pallas_kernels.matmul.config import check_faster, check_one_order, check_supported
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import in_tiles


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Returns x [..., K] times w [N, K] transposed, plus bias [N] and residual [..., N]: [..., N].

    With norm [K], in x's dtype, RMSNorm(x) * norm replaces x, as norm_quant computes it with `eps`. The mosaic kernel
    of one row includes this norm, with the same bits. Before other kernels it is an operation of its own.

    Accumulates in promote_types(x.dtype, float32), float32 and float64 at the highest precision. bias and residual are
    added before the cast to `out_dtype` (default: x's); they may have other floating dtypes than x. The mosaic backend
    takes up to 512 rows in 16 bits, and N and K in multiples of 16. Its residual has `out_dtype`. If no backend is
    named, it runs where it was measured to be faster, or should be. Raises ValueError where shapes or dtypes disagree,
    and NotImplementedError for what a named backend doesn't do.
    """
    if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"x has shape {x.shape} and w {w.shape}, expected [..., K] and [N, K]")
    check_floats(x=x, w=w)
    check_norm(norm, x)
    for name, term, shape in (("bias", bias, w.shape[:1]), ("residual", residual, (*x.shape[:-1], w.shape[0]))):
        if term is not None:
            check_floats(**{name: term})
            if term.shape != shape:
                raise ValueError(f"{name} has shape {term.shape}, expected {shape}")
    out_dtype = check_out_dtype(x.dtype if out_dtype is None else out_dtype)
    chosen = choose(BACKENDS, backend, x, w, residual, out_dtype)
    return chosen.run(x, w, bias, residual, out_dtype, norm, eps, backend)


def _mosaic(x, w, bias, residual, out_dtype, norm, eps, _):
    from pallas_kernels.matmul import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.matmul(x, w, bias, residual, out_dtype, norm=norm, eps=eps)


def _xla(x, w, bias, residual, out_dtype, norm, eps, backend):
    if norm is not None:
        x = norm_quant(x.reshape(-1, x.shape[-1]), norm, eps=eps, backend=backend)[0].reshape(x.shape)
    return xla.matmul(x, w, bias, residual, out_dtype)


def _one_order(x, w, bias, residual, out_dtype, norm, eps, backend):
    if norm is not None:
        x = norm_quant(x.reshape(-1, x.shape[-1]), norm, eps=eps, backend=backend)[0].reshape(x.shape)
    if on_hopper():
        from pallas_kernels.matmul import mosaic_sm90  # imports all of Pallas

        return mosaic_sm90.in_one_order(x, w, bias, residual, out_dtype)
    added = None if residual is None else residual.reshape(-1, w.shape[0])
    rows = in_tiles(lambda x, r: xla.matmul(x, w, bias, r, out_dtype), x.reshape(-1, x.shape[-1]), added)
    return rows.reshape(*x.shape[:-1], w.shape[0])


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported, check_faster),
    "xla": Backend(_xla),
    DETERMINISTIC: Backend(_one_order, check_one_order),
}
