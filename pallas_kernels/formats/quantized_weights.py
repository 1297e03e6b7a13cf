"""Makes the arrays of quantized weights that all matmul kernels share (encode), and reads them back (decode).
weight_formats.py says which formats there are and what each stores. weight_codes.py says how numbers become codes and
scales."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.formats.block_floats import decode_e8m0
from pallas_kernels.formats.hadamard import turn
from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.weight_codes import (
    code_values,
    decode_scales,
    fit_scales,
    pack4,
    round_codes,
    store_scales,
    unpack4,
)
from pallas_kernels.formats.weight_formats import WeightFormat, check_shape, padded


@dataclass(frozen=True)
class Origin:
    """Tells how codes were found. Programs do not depend on it, so any two are equal."""

    nearest: bool = field(default=False, compare=False, repr=False)  # encode() rounded the weight to nearest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight:
    """Holds a weight [N, K] in a format; N' and K' are the padded sizes."""

    values: jax.Array  # [N', K'], or uint8 [N', K'/2] where two codes share a byte; a format may have groups rotated
    # float32 [N'], or float16 [K'/group, N'] (fp8 in blocks: float32; double_quant: int8; e8m0: uint8; e4m3: itself)
    scales: jax.Array
    zeros: jax.Array | None  # int8, shaped as scales are
    # double_quant: float32 [1 + blocks of 256 scales]: their mean, each block's step; e4m3: float32 [N'], scales' unit
    scale_steps: jax.Array | None
    columns: jax.Array | None  # int32 [K]: stored column i multiplies input columns[i]; None: in order
    shape: tuple[int, int] = field(metadata={"static": True})  # (N, K)
    format: WeightFormat = field(metadata={"static": True})
    input_scale: jax.Array | None = None  # float32 [1], of every input token, found ahead; None: each has its own
    original: jax.Array | None = None  # [N, K], what was rounded, where training passes the weight's gradient to it
    origin: Origin = field(default=Origin(), metadata={"static": True})

    @property
    def takes_plain_inputs(self) -> bool:
        """Tells whether inputs meet the weight as it is stored: in order, and not rotated."""
        return self.columns is None and not self.format.rotated


def encode(w: jax.Array, fmt: WeightFormat) -> QuantizedWeight:
    """Rounds w [N, K], which is finite, to the nearest values that the format holds.

    No format holds NaN or infinity, which callers refuse. Symmetric int8 steps are absmax / 127 and symmetric int4 ones
    absmax / 7.5 (all 16 codes: -absmax and absmax are half a step away). With a zero point, the range of w and 0 is cut
    into 255 or 15 steps. fp8: absmax / 448. Scales of groups are rounded up to float16 within its normal range. So
    nothing is clipped by more than half a step. Values are divided by the rounded scale. Formats of block_floats.py
    are as defined there. Raises ValueError where the shape does not fit.
    """
    rounded = encode_with(w, *fit_scales(rotate_groups(grouped(w, fmt), fmt), fmt), fmt)
    return replace(rounded, origin=Origin(nearest=True))


def encode_with(
    w: jax.Array, scales: jax.Array, zeros: jax.Array | None, fmt: WeightFormat, *, columns: jax.Array | None = None
) -> QuantizedWeight:
    """Encodes with scales and zeros [N', groups] that the caller chose: storable ones, as fit_scales gives them. Values
    beyond the largest code are clipped. With columns, an order i32[K], groups are of w's columns in that order."""
    ordered = w if columns is None else jnp.take(w, columns, axis=1)
    x = rotate_groups(grouped(ordered, fmt), fmt)
    scales, stored, steps = store_scales(scales.astype(x.dtype), fmt)
    codes = round_codes(x / scales[..., None], None if zeros is None else zeros[..., None], fmt)
    return assemble(codes.reshape(codes.shape[0], -1), stored, zeros, steps, w.shape, fmt, columns=columns)  # type: ignore[arg-type]


def assemble(
    codes: jax.Array,
    stored: jax.Array,
    zeros: jax.Array | None,
    steps: jax.Array | None,
    shape: tuple[int, int],
    fmt: WeightFormat,
    *,
    columns: jax.Array | None = None,
) -> QuantizedWeight:
    """Returns the weight of codes [N', K'] as round_codes makes them, zeros [N', groups], and scales as store_scales
    does."""
    by_row = fmt.group is None
    if columns is not None and fmt.rotated:
        raise ValueError(f"{fmt.name} rotates groups of inputs in their order: its columns must be None")
    return QuantizedWeight(
        values=pack4(codes) if fmt.packed else codes,
        scales=stored[:, 0] if by_row else stored.T,
        zeros=None if zeros is None else (zeros[:, 0] if by_row else zeros.T).astype(jnp.int8),
        scale_steps=steps,
        columns=columns,
        shape=shape,
        format=fmt,
    )


def grouped(w: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns w [N, K], padded, in float32 at least: [N', groups, group]. Raises ValueError where the shape does not
    fit."""
    check_shape(w.shape, fmt)  # type: ignore[arg-type]
    N, K = w.shape
    x = w.astype(compute_dtype(w.dtype))
    x = jnp.pad(x, ((0, padded(N) - N), (0, fmt.columns(K) - K)))
    return x.reshape(x.shape[0], -1, fmt.group or x.shape[1])


def rotate_groups(x: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Multiplies each group of x [..., K] or [..., group] by hadamard(group) where the format has them rotated. Twice
    is x."""
    if not fmt.rotated:
        return x
    assert fmt.group is not None, "rows with one scale are not rotated"
    wide = x.astype(compute_dtype(x.dtype)).reshape(*x.shape[:-1], -1, fmt.group)
    return turn(wide).reshape(x.shape).astype(x.dtype)


def decode(w: QuantizedWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Returns the weight [N, K] that the codes stand for, computed in float32 at least."""
    N, K = w.shape
    zeros = None if w.zeros is None else w.zeros[..., :N]
    return _decode_rows(w, w.values[:N], group_scales(w)[..., :N], zeros, dtype)[:, :K]


def decode_padded(w: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    """Returns the weight [N', K'] as it is stored: columns in their order, groups rotated, padding included."""
    ordered = replace(w, columns=None, format=replace(w.format, rotated=False))
    return _decode_rows(ordered, w.values, group_scales(w), w.zeros, dtype)


def take_rows(w: QuantizedWeight, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns rows i32[...] of the weight, as of an embedding: [..., K]. Indices out of range are clipped."""
    flat = jnp.clip(rows.reshape(-1), 0, w.shape[0] - 1)  # never the padding

    def take(x: jax.Array, axis: int) -> jax.Array:
        return jnp.take(x, flat, axis=axis, mode="clip")

    zeros = None if w.zeros is None else take(w.zeros, -1)
    out = _decode_rows(w, take(w.values, 0), take(group_scales(w), -1), zeros, dtype)
    return out[:, : w.shape[1]].reshape(*rows.shape, w.shape[1])


def take_block(w: QuantizedWeight, index: jax.Array, rows: int) -> QuantizedWeight:
    """Returns rows index * rows .. (index + 1) * rows of the weight, index i32[] in range. Rows are not padded."""

    def take(x: jax.Array | None, axis: int) -> jax.Array | None:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, index * rows, rows, axis)

    fmt = replace(w.format, double_quant=False)  # its scales come decoded
    scales, steps = (group_scales(w), None) if w.format.double_quant else (w.scales, w.scale_steps)
    block = replace(w, values=take(w.values, 0), zeros=take(w.zeros, -1), scale_steps=take(steps, 0))  # type: ignore[arg-type]
    return replace(block, scales=take(scales, -1), shape=(rows, w.shape[1]), format=fmt)  # type: ignore[arg-type]


def _decode_rows(
    w: QuantizedWeight, values: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: DTypeLike
) -> jax.Array:
    """Decodes some rows of w's values, with their scales and zeros: [rows, K']."""
    compute = compute_dtype(dtype)
    if w.format.packed:
        values = unpack4(values, signed=w.format.codes == "int4")
    zeros = None if zeros is None else _spread(zeros.astype(compute), values.shape[1])
    x = code_values(values, zeros, w.format, compute)
    x = rotate_groups(x * _spread(scales.astype(compute), x.shape[1]), w.format)
    if w.columns is not None:
        x = jnp.zeros_like(x).at[:, w.columns].set(x[:, : w.shape[1]])
    return x.astype(dtype)


def group_scales(w: QuantizedWeight) -> jax.Array:
    """Returns scales as the kernels take them: float32 [N'], or float16 [K'/group, N'] (float32 of fp8 in blocks). They
    are decoded where they are quantized (those of block_floats.py to float32)."""
    if w.format.scale_codes == "e8m0":
        return decode_e8m0(w.scales)
    if w.format.scale_codes == "e4m3":
        assert w.scale_steps is not None
        return w.scales.astype(jnp.float32) * w.scale_steps[None, :]
    if w.scale_steps is None:
        return w.scales
    return decode_scales(w.scales.T, w.scale_steps).T


def unpacked(w: QuantizedWeight) -> QuantizedWeight:
    """Returns a weight without packing and padding, so that it may be cut anywhere. Scales that are stored as int8 are
    decoded."""
    (N, K), fmt = w.shape, w.format
    codes = unpack4(w.values, signed=False) if fmt.packed else w.values
    scales = group_scales(w) if fmt.double_quant else w.scales
    zeros = None if w.zeros is None else w.zeros[..., :N]
    steps = None if w.scale_steps is None or fmt.double_quant else w.scale_steps[:N]
    return replace(w, values=codes[:N, :K], scales=scales[..., :N], zeros=zeros, scale_steps=steps)


def _spread(x: jax.Array, columns: int) -> jax.Array:
    """Spreads [rows] or [groups, rows] to [rows, columns] or [rows, 1]."""
    return x[:, None] if x.ndim == 1 else jnp.repeat(x.T, columns // x.shape[0], axis=1)
