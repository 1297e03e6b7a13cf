"""Computes the gated activation of an MLP, in 16 bits or quantized for the matmul that follows."""

from typing import overload

import jax

from pallas_kernels.backends import DETERMINISTIC, Backend, choose
from pallas_kernels.checks import bind_shapes, check_floats
from pallas_kernels.formats.quantized_rows import QuantizedRows, check_kind
from pallas_kernels.one_order import fenced
from pallas_kernels.silu_mul_quant import xla
from pallas_kernels.silu_mul_quant.config import check_faster, check_supported, check_triton


@overload
def silu_mul_quant(gate_up: jax.Array, *, backend: str | None = ...) -> jax.Array: ...
@overload
def silu_mul_quant(gate_up: jax.Array, *, kind: str | None, backend: str | None = ...) -> jax.Array | QuantizedRows: ...
def silu_mul_quant(
    gate_up: jax.Array, *, kind: str | None = None, backend: str | None = None
) -> jax.Array | QuantizedRows:
    """Returns rows [T, F] of SiLU(gate) * up of gate_up [T, 2F], gate's columns first.

    Computes in promote_types(gate_up.dtype, float32) and rounds to gate_up's dtype. Then it quantizes as quantize_rows
    does where `kind` is "int8" or "fp8". The codes and the scale of a row follow from the rounded row, to the same bits
    on all backends. The rounded row itself may differ between them by one unit in the last place in few values.
    Mosaic's exponential and reciprocal are good to 2^-21. Raises ValueError for an unknown kind and for shapes or
    dtypes that don't fit, and NotImplementedError for what a named backend doesn't do.
    """
    sizes = bind_shapes(gate_up=(gate_up, "T X"))
    check_floats(gate_up=gate_up)
    if kind is not None:
        check_kind(kind)
    rows, width = sizes["T"], sizes["X"] // 2
    if sizes["X"] % 2 or width < 1:
        raise ValueError(f"gate_up has shape {gate_up.shape}, expected [T, 2F] with F of at least 1")
    return choose(BACKENDS, backend, kind, str(gate_up.dtype), rows, width).run(gate_up, kind=kind)


def _mosaic(gate_up: jax.Array, *, kind: str | None) -> jax.Array | QuantizedRows:
    from pallas_kernels.silu_mul_quant import mosaic_sm90  # imports all of Pallas

    return mosaic_sm90.silu_mul_quant(gate_up, kind=kind)


def _triton(gate_up: jax.Array, *, kind: str | None) -> jax.Array | QuantizedRows:
    from pallas_kernels.silu_mul_quant import triton  # imports Triton

    return triton.silu_mul_quant(gate_up, kind=kind)


def _one_order(gate_up: jax.Array, *, kind: str | None) -> jax.Array | QuantizedRows:
    return fenced(DETERMINISTIC, lambda rows: xla.silu_mul_quant(rows, kind=kind), gate_up)


BACKENDS = {
    "mosaic": Backend(_mosaic, lambda _, *sizes: check_supported(*sizes), check_faster),
    "triton": Backend(_triton, check_triton, unasked_on=("ampere",)),
    "xla": Backend(xla.silu_mul_quant),
    DETERMINISTIC: Backend(_one_order, for_xla=True),
}
