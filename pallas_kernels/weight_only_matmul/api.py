"""Computes x @ decode(w).T + bias + residual, of x or of its norm; and swiglu of such matmuls."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.backends import DETERMINISTIC, Backend, choose, on_hopper, where_faster
from pallas_kernels.checks import check_floats, check_listed, check_norm, check_out_dtype, check_weight
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode_padded, rotate_groups
from pallas_kernels.formats.weight_formats import WeightFormat
from pallas_kernels.matmul import matmul
from pallas_kernels.norm_quant import norm_quant
from pallas_kernels.one_order import check_device, fenced, in_tiles
from pallas_kernels.silu_mul_quant import silu_mul_quant
from pallas_kernels.weight_only_matmul import xla
from pallas_kernels.weight_only_matmul.config import (
    check_faster,
    check_supported,
    check_triton,
    in_one_order,
    takes_one_row,
)


def weight_only_matmul(
    x: jax.Array,
    w: QuantizedWeight,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    backend: str | None = None,
) -> jax.Array:
    """Returns x [..., K] times a quantized weight [N, K] transposed, plus bias [N] and residual [..., N]: [..., N].

    With norm [K], in x's dtype, RMSNorm(x) * norm replaces x, as norm_quant computes it with `eps`. The mosaic kernel
    of one row includes this norm, with the same bits. Before other kernels it is an operation of its own. K is the
    logical size: this function handles padding, the weight's order of columns and rotated groups. It ignores
    `w.format.activations`: x is multiplied as it is, in its own dtype.

    The result has `out_dtype` (x's by default), rounded once from a float32 sum (float64 for float64 inputs). The
    mosaic kernel and xla on a GPU round the decoded weight to x's dtype. The kernel also rounds scales that multiply
    weights. With few rows, scales mostly multiply sums. A row's bits do not depend on the other rows within one
    configuration.

    The mosaic backend takes bf16 and f16, groups of 32, 64 and 128, and K a multiple of 256 (128 for codes of eight
    bits). If no backend is named, it runs where it was measured to be faster. The triton backend takes bf16 and f16,
    groups of 32, 64 and 128 and any K. It rounds only the values of tables, and its scales multiply sums. Raises
    ValueError where shapes or dtypes disagree.
    """
    N, K = w.shape
    if x.ndim < 1 or x.shape[-1] != K:
        raise ValueError(f"x has shape {x.shape}, expected [..., K] with K={K} as the weight has")
    check_floats(x=x)
    check_weight(w)
    check_norm(norm, x)
    for name, term, shape in (("bias", bias, (N,)), ("residual", residual, (*x.shape[:-1], N))):
        if term is not None:
            check_floats(**{name: term})
            if term.shape != shape:
                raise ValueError(f"{name} has shape {term.shape}, expected {shape}")
    out_dtype = check_out_dtype(x.dtype if out_dtype is None else out_dtype)
    m, stored = math.prod(x.shape[:-1]), _stored_columns(w)
    chosen = choose(BACKENDS, backend, w, x.dtype, m, w.values.shape[0], stored, w.format)
    rows = x.reshape(m, K)
    inside = {}
    if norm is not None and _runs_one_row(chosen, m, w) and w.takes_plain_inputs and stored == K:
        inside = {"norm": norm, "eps": eps}
    elif norm is not None:
        rows = norm_quant(rows, norm, eps=eps, backend=backend)[0]
    if w.columns is not None:
        rows = jnp.take(rows, w.columns, axis=1)
    if w.format.rotated:
        rows = fenced(backend, lambda x: rotate_groups(x, w.format), rows)
    if stored != K:
        rows = jnp.pad(rows, ((0, 0), (0, stored - K)))
    residual = None if residual is None else residual.reshape(m, N)
    return chosen.run(rows, w, bias, residual, out_dtype, **inside).reshape(*x.shape[:-1], N)


def weight_only_swiglu(
    x: jax.Array, w: QuantizedWeight, *, norm: jax.Array | None = None, eps: float = 0.0, backend: str | None = None
) -> jax.Array:
    """Returns SiLU(x gate^T) * (x up^T) of x [..., K] and a quantized weight [2F, K]: [..., F] in x's dtype. Gate's
    rows come first. norm and backends are those of weight_only_matmul. The mosaic kernel of one row keeps products in
    float32 until the result is rounded. Else there are two operations, and products are rounded to x's dtype in
    between."""
    N, K = w.shape
    if N % 2:
        raise ValueError(f"w has shape {w.shape}, expected [2F, K]")
    if math.prod(x.shape[:-1]) == 1 and x.shape[-1] == K == _stored_columns(w) and w.takes_plain_inputs:
        check_weight(w)
        check_norm(norm, x)
        chosen = choose(BACKENDS, backend, w, x.dtype, 1, w.values.shape[0], K, w.format)
        if _runs_one_row(chosen, 1, w, gated=True):
            options = {"norm": norm, "eps": eps, "gated": True}
            return chosen.run(x.reshape(1, K), w, None, None, x.dtype, **options).reshape(*x.shape[:-1], N // 2)
    y = weight_only_matmul(x, w, norm=norm, eps=eps, backend=backend).reshape(-1, N)
    return silu_mul_quant(y, backend=where_faster(backend)).reshape(*x.shape[:-1], N // 2)


def _stored_columns(w: QuantizedWeight) -> int:
    return w.values.shape[1] * (2 if w.format.packed else 1)


def _runs_one_row(chosen: Backend, m: int, w: QuantizedWeight, gated: bool = False) -> bool:
    """Returns whether that is the mosaic kernel of one row, with SiLU in it if the product is gated."""
    whole = not gated or w.shape[0] == w.values.shape[0]
    return chosen is BACKENDS["mosaic"] and m == 1 and whole and takes_one_row(w.values.shape[0], w.format, gated)


def _mosaic(
    rows: jax.Array,
    w: QuantizedWeight,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
    **inside: Any,
) -> jax.Array:
    from pallas_kernels.weight_only_matmul import mosaic_sm90  # imports all of Pallas

    if not rows.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, w.shape[0]), out_dtype)
    return mosaic_sm90.weight_only_matmul(rows, w, bias, residual, out_dtype, **inside)


def _stored_scales(w: QuantizedWeight) -> None:
    check_listed(("scales in", str(w.scales.dtype), (str(w.format.scale_dtype),)))


def _check_supported(w: QuantizedWeight, *sizes) -> None:
    _stored_scales(w)
    check_supported(*sizes)


def _check_faster(w: QuantizedWeight, *sizes) -> None:
    _stored_scales(w)
    check_faster(*sizes)


def _triton(*args) -> jax.Array:
    from pallas_kernels.weight_only_matmul import triton  # imports Triton

    return triton.weight_only_matmul(*args)


def _check_triton(w: QuantizedWeight, x_dtype: DTypeLike, m: int, n: int, k: int, fmt: WeightFormat) -> None:
    check_listed(("scales in", str(w.scales.dtype), (str(fmt.scale_dtype),)), backend="triton")
    check_triton(x_dtype, fmt)


def _one_order(
    rows: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    """Cuts K in one way. A format that the kernel lacks is decoded, and multiplied as a plain weight."""
    (M, K), N = rows.shape, w.values.shape[0]
    if not on_hopper():
        return in_tiles(lambda x, r: xla.weight_only_matmul(x, w, bias, r, out_dtype), rows, residual)
    if BACKENDS["mosaic"].supports(w, rows.dtype, M, N, K, w.format) is None:
        from pallas_kernels.weight_only_matmul import mosaic_sm90  # imports all of Pallas

        return mosaic_sm90.weight_only_matmul(rows, w, bias, residual, out_dtype, config=in_one_order(M, N))
    decoded = decode_padded(w, rows.dtype)[: w.shape[0]]
    return matmul(rows, decoded, bias=bias, residual=residual, out_dtype=out_dtype, backend=DETERMINISTIC)


BACKENDS = {
    "mosaic": Backend(_mosaic, _check_supported, _check_faster),
    "triton": Backend(_triton, _check_triton, unasked_on=("ampere",)),
    "xla": Backend(xla.weight_only_matmul),
    DETERMINISTIC: Backend(_one_order, lambda *_: check_device()),
}
