"""Adds the residual and applies the norm before a projection, in 16 bits or quantized for that projection."""

from typing import overload

import jax

from pallas_kernels.backends import DETERMINISTIC, Backend, choose
from pallas_kernels.checks import bind_shapes, check_floats
from pallas_kernels.formats.quantized_rows import QuantizedRows, check_kind
from pallas_kernels.norm_quant import xla
from pallas_kernels.norm_quant.config import check_supported, check_triton
from pallas_kernels.one_order import in_tiles


@overload
def norm_quant(
    x: jax.Array, weight: jax.Array, *, eps: float, residual: jax.Array | None = ..., backend: str | None = ...
) -> tuple[jax.Array, jax.Array]: ...
@overload
def norm_quant(
    x: jax.Array,
    weight: jax.Array | None,
    *,
    eps: float,
    residual: jax.Array | None = ...,
    kind: str | None,
    backend: str | None = ...,
) -> tuple[jax.Array | QuantizedRows, jax.Array]: ...
def norm_quant(
    x: jax.Array,
    weight: jax.Array | None,
    *,
    eps: float,
    residual: jax.Array | None = None,
    kind: str | None = None,
    backend: str | None = None,
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    """Returns rows [T, E] of RMSNorm(x + residual) * weight, and summed [T, E].

    x, residual [T, E] and weight [E] have one dtype. summed = x + residual is rounded to x's dtype (x itself without a
    residual). Its norm over the last axis is computed in promote_types(x.dtype, float32) with `eps` added to the mean
    square. It is rounded to x's dtype, multiplied by weight and rounded again. Then it is quantized as quantize_rows
    does where `kind` is "int8" or "fp8". `eps` is a Python number, static under jit. Without a weight there is no norm:
    summed is quantized as it is.

    The codes and the scale of a row follow from the rounded row, to the same bits on all backends. So is summed. The
    rounded row itself may differ between them by one unit in the last place in few values. They sum the squares in
    different orders. Raises ValueError for an unknown kind and for shapes or dtypes that don't fit, and
    NotImplementedError for what a named backend doesn't do.
    """
    optional = {"x": x, "weight": weight, "residual": residual}
    arrays = {name: array for name, array in optional.items() if array is not None}
    sizes = bind_shapes(**{name: (array, "E" if name == "weight" else "T E") for name, array in arrays.items()})
    check_floats(**arrays)
    if kind is not None:
        check_kind(kind)
    elif weight is None:
        raise ValueError("neither a weight nor a kind: expected something to do")
    rows, width = sizes["T"], sizes["E"]
    if width < 1:
        raise ValueError(f"x has shape {x.shape}, expected [T, E] with E of at least 1")
    backends = BACKENDS if weight is not None else WITHOUT_NORM
    chosen = choose(backends, backend, str(x.dtype), rows, width)
    return chosen.run(x, weight, eps=eps, residual=residual, kind=kind)


def _mosaic(*args, **options):
    from pallas_kernels.norm_quant import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.norm_quant(*args, **options)


def _triton(*args, **options):
    from pallas_kernels.norm_quant import triton  # imports Triton

    return triton.norm_quant(*args, **options)


def _one_order(
    x: jax.Array, weight: jax.Array | None, *, eps: float, residual: jax.Array | None, kind: str | None
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    """Runs in tiles on a CPU, where XLA sums few rows in another order than many."""
    return in_tiles(lambda x, r: xla.norm_quant(x, weight, eps=eps, residual=r, kind=kind), x, residual)


BACKENDS = {
    "mosaic": Backend(_mosaic, check_supported),
    "triton": Backend(_triton, check_triton, unasked_on=("ampere",)),
    "xla": Backend(xla.norm_quant),
    DETERMINISTIC: Backend(_one_order, for_xla=True),
}
# Triton has no kernel for rows that are quantized as they are: what XLA makes of it is one pass, too.
WITHOUT_NORM = {name: each for name, each in BACKENDS.items() if name != "triton"}
