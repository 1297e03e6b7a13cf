"""Quantizes rows to eight bits with a scale each, or one for each group of their columns.

Quantized matmuls take them as their left operand. They are symmetric and dynamic: the scale of a row is its largest
magnitude over the largest code. So a token's codes depend on that token alone. Or they are static, with one scale found
ahead for all rows. The arithmetic is spelled out as products (with 1/127 or 1/448, and with one reciprocal a row). XLA
on a GPU would turn divisions into these, and the kernels that quantize give the same bits.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.rounding import to_float8

KINDS = {"int8": jnp.dtype("int8"), "fp8": jnp.dtype("float8_e4m3fn")}
LARGEST = {"int8": 127.0, "fp8": 448.0}  # -128 is not used: symmetric


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedRows:
    """Holds x = values * scales[..., None], or of each group."""

    values: jax.Array  # int8 or float8_e4m3fn [..., E]
    scales: jax.Array  # float32 (float64 of float64 inputs) [...], positive; of groups of columns [..., E / group]


def quantize_rows(
    x: jax.Array,
    kind: str,
    *,
    group: int | None = None,
    per_tensor: bool = False,
    scale: jax.Array | None = None,
    axis: str | None = None,
) -> QuantizedRows:
    """Returns values of `kind` ("int8", "fp8": float8_e4m3fn) and a scale a row, of x [..., E] of bf16, f16, f32 or
    f64.

    In c = promote_types(x.dtype, float32): scale = max(absmax * c(1/largest), the smallest normal c). Codes are x * (1
    / scale), clipped to +-largest and rounded to nearest even. A row of zeros has zeros for codes; one that holds NaN
    has a NaN scale.

    - `per_tensor`: all rows share the scale of the largest one. It is for experiments, as a token's codes then depend
      on the batch.
    - `scale` [1], positive: all rows have that one. What is beyond it is clipped (int8 down to -128), and a row that
      holds NaN or infinity has a NaN scale.
    - `axis`: a row's columns are sharded over the devices of that mesh axis, and its scale is that of the whole row.
    - `group`, and none of these three: every `group` columns of a row have a scale as a row has.

    Raises ValueError for another kind, dtype, an E of zero or no multiple of `group`, or options that exclude each
    other.
    """
    check_kind(kind)
    if group is not None:
        if per_tensor or scale is not None or axis is not None or group < 1 or x.ndim < 1 or x.shape[-1] % group:
            raise ValueError(f"group={group} of x {list(x.shape)}, expected a divisor of E, and no other option")
        rows = quantize_rows(x.reshape(*x.shape[:-1], -1, group), kind)
        return QuantizedRows(rows.values.reshape(x.shape), rows.scales)
    if x.ndim < 1 or x.shape[-1] < 1 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}{list(x.shape)}, expected floating point [..., E] with E of at least 1")
    if scale is not None and (per_tensor or scale.shape != (1,)):
        raise ValueError(f"scale has shape {scale.shape} and per_tensor={per_tensor}, expected one scale or per_tensor")
    x = x.astype(compute_dtype(x.dtype))
    absmax, lowest = jnp.max(jnp.abs(x), axis=-1), -LARGEST[kind]
    if axis is not None:
        absmax = jax.lax.pmax(absmax, axis)
    if per_tensor:
        absmax = jnp.broadcast_to(jnp.max(absmax, initial=0), absmax.shape)
    if scale is None:
        scales = absmax * jnp.asarray(1 / LARGEST[kind], x.dtype)
        scales = jnp.maximum(scales, jnp.finfo(x.dtype).smallest_normal.astype(x.dtype))
    else:
        scales = jnp.where(jnp.isfinite(absmax), scale[0].astype(x.dtype), jnp.asarray(jnp.nan, x.dtype))
        lowest = -128.0 if kind == "int8" else lowest
    scaled = jnp.clip(x * (1 / scales)[..., None], lowest, LARGEST[kind])
    codes = jnp.round(scaled).astype(KINDS[kind]) if kind == "int8" else to_float8(scaled, KINDS[kind])
    return QuantizedRows(codes, scales)


def dequantize_rows(rows: QuantizedRows, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns the numbers that `rows` stand for [..., E], in `dtype` (default: that of the scales)."""
    parts = rows.values.reshape(*rows.scales.shape, -1).astype(rows.scales.dtype)
    x = (parts * rows.scales[..., None]).reshape(rows.values.shape)
    return x if dtype is None else x.astype(dtype)


def check_kind(kind: str | None) -> None:
    """Raises ValueError for a kind that is neither "int8" nor "fp8"."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind of quantized rows {kind!r}; kinds: {', '.join(KINDS)}")
