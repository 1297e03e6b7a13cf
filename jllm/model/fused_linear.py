"""Fuses linear with the operations before it: a norm, SiLU, or both.

The rows have the form that the weight takes. For quantized activations, the norm or SiLU quantizes its rows to eight
bits in the same pass (`norm`, `silu_mul`). A weight with adapters takes plain rows. Its product has the addend in the
place of a residual, or leaves it to SiLU (`norm_gate_up`). Of many rows one kernel adds it and applies SiLU.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jllm.model.adapted import Adapted, gates, with_addend
from jllm.model.linear import column_parts, linear, multiply, straight_through, sum_parts, with_gradient
from jllm.model.params import Weight
from jllm.model.shapes import Array, Float, shaped
from jllm.model.weight_inputs import is_weight_only, rows_kind, takes_plain_rows
from pallas_kernels.all_reduce import MeshAxis
from pallas_kernels.backends import DETERMINISTIC, DIFFERENTIABLE, where_faster
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.matmul import matmul
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import fenced
from pallas_kernels.scaled_matmul.plain_rows import of_plain_rows, one_kernel
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.swiglu import swiglu
from pallas_kernels.weight_only_matmul import weight_only_matmul, weight_only_swiglu


@shaped
def norm(
    x: Float[Array, "T E"], weight: Float[Array, " E"], eps: float, reader: Weight, *, backend: str | None = None
) -> Float[Array, "T E"] | QuantizedRows:
    """Returns RMSNorm of x in the form that its reader, a weight, takes."""
    return norm_quant(x, weight, eps=eps, kind=rows_kind(reader), backend=backend)[0]


@shaped
def silu_mul(
    gate_up: Float[Array, "T G"], reader: Weight, *, backend: str | None = None
) -> Float[Array, "T G//2"] | QuantizedRows:
    """Returns SiLU(gate) * up of the halves of gate_up [T, 2F] in the form that its reader, a weight, takes."""
    kind = rows_kind(reader)
    return silu_mul_quant(gate_up, kind=kind, backend=where_faster(backend) if kind is None else backend)


@shaped
def norm_linear(
    x: Float[Array, "T E"],
    weight: Float[Array, " E"],
    w: Weight | Adapted,
    bias: Float[Array, " outputs"] | None = None,
    *,
    eps: float,
    out_dtype=None,
    backend: str | None = None,
) -> Float[Array, "T outputs"]:
    """Returns linear of norm of x in out_dtype (default: x's). It is differentiable also where codes lie between the
    norm and the product."""
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if isinstance(w, Adapted):
        rows = norm_quant(x, weight, eps=eps, backend=where_faster(backend))[0]
        return linear(rows, w, bias, out_dtype=out_dtype, backend=backend)
    if not isinstance(w, QuantizedWeight):
        return matmul(x, w, norm=weight, eps=eps, bias=bias, out_dtype=out_dtype, backend=where_faster(backend))

    def run(x, weight, w, bias):
        if takes_plain_rows(w):
            how: dict[str, Any] = {"norm": weight, "eps": eps, "out_dtype": out_dtype, "backend": backend}
            return of_plain_rows(x, w.values, w.scales, bias=bias, **how)
        if is_weight_only(w):
            return weight_only_matmul(x, w, norm=weight, eps=eps, bias=bias, out_dtype=out_dtype, backend=backend)
        rows = norm(x, weight, eps, w, backend=backend)
        return multiply(rows, w, bias, None, out_dtype=out_dtype, backend=backend)

    def straight(x, weight, w, bias):
        rows = _plain_norm(x, weight, eps)
        return straight_through(rows, w, bias, None, out_dtype=out_dtype)

    return with_gradient(run, straight)(x, weight, w, bias)


@shaped
def norm_gate_up(
    x: Float[Array, "T E"],
    weight: Float[Array, " E"],
    w: Weight | Adapted,
    bias: Float[Array, " outputs"] | None = None,
    *,
    eps: float,
    backend: str | None = None,
) -> Float[Array, "T outputs"]:
    """Returns norm_linear for silu_linear. What adapters add is summed after the product, so that XLA makes one pass of
    this sum and SiLU."""
    if not isinstance(w, Adapted):
        return norm_linear(x, weight, w, bias, eps=eps, backend=backend)
    rows, wide = norm_quant(x, weight, eps=eps, backend=where_faster(backend))[0], compute_dtype(x.dtype)
    added = with_addend(rows, w, None, out_dtype=x.dtype, backend=backend)
    product = linear(rows, w.base, bias, backend=backend)
    return fenced(backend, lambda y, added: (y.astype(wide) + added.astype(wide)).astype(y.dtype), product, added)


@shaped
def silu_linear(
    gate_up: Float[Array, "T G"],
    w: Weight | Adapted,
    bias: Float[Array, " outputs"] | None = None,
    *,
    residual: Float[Array, "T outputs"],
    backend: str | None = None,
    axis: MeshAxis | None = None,
    parts: int = 1,
) -> Float[Array, "T outputs"]:
    """Returns linear of silu_mul of gate_up in the residual's dtype. `axis` and `parts` are as in linear."""
    if isinstance(w, Adapted):
        plain = silu_mul_quant(gate_up, backend=where_faster(backend))
        added: dict[str, Any] = {"residual": residual, "out_dtype": residual.dtype}
        return linear(plain, w, bias, **added, backend=backend, axis=axis, parts=parts)
    if parts > 1 and isinstance(w, QuantizedWeight) and w.format.row_codes is not None:
        gates, ups = (jnp.split(half, parts, axis=-1) for half in jnp.split(gate_up, 2, axis=-1))
        cut = [jnp.concatenate(pair, axis=-1) for pair in zip(gates, ups)]
        options: dict[str, Any] = {"out_dtype": residual.dtype, "backend": backend}
        each = zip(cut, column_parts(w, parts))
        return sum_parts([linear(silu_mul(r, v, backend=backend), v, **options) for r, v in each], bias, residual)
    if axis is not None:
        whole = backend == DETERMINISTIC  # linear quantizes whole rows, and this device has a part of each
        rows = silu_mul_quant(gate_up, backend=backend) if whole else silu_mul(gate_up, w, backend=backend)
        return linear(rows, w, bias, residual=residual, out_dtype=residual.dtype, backend=backend, axis=axis)

    def run(gate_up, w, bias, residual):
        rows = silu_mul(gate_up, w, backend=backend)
        return multiply(rows, w, bias, residual, out_dtype=residual.dtype, backend=backend, parts=parts)

    def straight(gate_up, w, bias, residual):
        rows = silu_mul_quant(gate_up, backend=DIFFERENTIABLE)
        return straight_through(rows, w, bias, residual, out_dtype=residual.dtype, parts=parts)

    return (with_gradient(run, straight) if isinstance(w, QuantizedWeight) else run)(gate_up, w, bias, residual)


def fuses_swiglu(
    x: jax.Array, w: Weight | Adapted, bias: jax.Array | None, reader: Weight | Adapted, *, backend: str | None
) -> bool:
    """Returns whether the gate and up projections of x [T, E], SiLU and the product are one operation. For plain and
    weight-only weights they are, if the reader takes plain rows. For int8 codes they are, if the reader quantizes its
    inputs likewise and one kernel does all of it. A bias prevents both. With adapters of w they are, if the kernel that
    adds them applies SiLU."""
    if isinstance(w, Adapted):
        return bias is None and rows_kind(reader) is None and gates(x, w, backend=backend)
    if bias is not None or not isinstance(w, QuantizedWeight) or is_weight_only(w):
        return bias is None and rows_kind(reader) is None
    if not takes_plain_rows(w) or rows_kind(reader) != rows_kind(w):
        return False
    return one_kernel(x, w.values, gated=True, backend=backend) is not None


@shaped
def norm_swiglu(
    x: Float[Array, "T E"], weight: Float[Array, " E"], w: Weight | Adapted, *, eps: float, backend: str | None = None
) -> Float[Array, "T F"]:
    """Returns swiglu of norm of x with w [2F, E], for weights that fuses_swiglu accepts."""
    if isinstance(w, Adapted):
        rows = norm_quant(x, weight, eps=eps, backend=where_faster(backend))[0]
        product = linear(rows, w.base, backend=backend)
        return with_addend(rows, w, product, out_dtype=x.dtype, backend=backend, gated=True)
    if not isinstance(w, QuantizedWeight):
        return swiglu(x, w, norm=weight, eps=eps, backend=where_faster(backend))

    def run(x, weight, w):
        if is_weight_only(w):
            return weight_only_swiglu(x, w, norm=weight, eps=eps, backend=backend)
        return of_plain_rows(x, w.values, w.scales, norm=weight, eps=eps, gated=True, backend=backend)

    def straight(x, weight, w):
        rows = _plain_norm(x, weight, eps)
        return silu_mul_quant(straight_through(rows, w, None, None, out_dtype=None), backend=DIFFERENTIABLE)

    return with_gradient(run, straight)(x, weight, w)


def _plain_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return norm_quant(x, weight, eps=eps, backend=DIFFERENTIABLE)[0]
