"""Computes quantized weights: scales of groups, codes in units of scales, and codes of four bits in bytes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.formats.block_floats import (
    element_values,
    encode_e8m0,
    mx_scales,
    round_elements,
    split_scales,
    wanted_scales,
)
from pallas_kernels.formats.rounding import to_float8
from pallas_kernels.formats.weight_formats import BLOCK, TABLES, WeightFormat

_BLOCK = 256  # scales that share a step when they are quantized themselves
_FP8_MAX = 448.0


def fit_scales(x: jax.Array, fmt: WeightFormat) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scales that encode gives x [N', groups, group], as they will be stored, and zeros: [N', groups]."""
    low, high = jnp.min(x, axis=-1), jnp.max(x, axis=-1)
    absmax = jnp.maximum(high, -low)
    if fmt.scale_codes is not None:
        return mx_scales(absmax, fmt.codes) if fmt.scale_codes == "e8m0" else wanted_scales(absmax), None
    if fmt.zero_point:
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        scales = storable((high - low) / (15 if fmt.packed else 255), fmt)
        return scales, jnp.round(-low / scales) - (8 if fmt.packed else 128)
    if fmt.in_blocks:
        absmax = _of_blocks(absmax)
    return storable(
        absmax / {"int8": 127, "int4": 7.5, "nf4": 1, "fp4": 1, "iq4nl": 113, "fp8": _FP8_MAX}[fmt.codes], fmt
    ), None


def _of_blocks(absmax: jax.Array) -> jax.Array:
    """Returns the largest of each block of rows, for each of its rows: [N', groups]."""
    N, groups = absmax.shape
    blocks = jnp.pad(absmax, ((0, -N % BLOCK), (0, 0))).reshape(-1, BLOCK, groups)
    return jnp.repeat(jnp.max(blocks, axis=1), BLOCK, axis=0)[:N]


def storable(scales: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns scales in their own dtype, rounded as they will be stored: never to zero, and float16 never down."""
    wide = fmt.group is None or fmt.in_blocks
    dtype = jnp.finfo(jnp.float32 if wide else jnp.float16)
    scales = jnp.clip(scales, jnp.asarray(dtype.tiny, scales.dtype), jnp.asarray(dtype.max, scales.dtype))
    if wide:
        return scales.astype(jnp.float32).astype(scales.dtype)
    rounded = jax.lax.reduce_precision(scales, exponent_bits=5, mantissa_bits=10)  # XLA may drop a pair of conversions
    up = rounded * (1 + 1.25 * 2.0**-11)  # 0.6 to 1.25 float16 steps more: rounds to the next one
    up = jax.lax.reduce_precision(up, exponent_bits=5, mantissa_bits=10)
    return jnp.minimum(jnp.where(rounded < scales, up, rounded), jnp.asarray(dtype.max, scales.dtype))


def round_codes(x: jax.Array, zeros: jax.Array | None, fmt: WeightFormat) -> jax.Array:
    """Returns codes of x in units of scales, clipped: int8 in range, indices of TABLES or E2M1, or floats of 8 bits.
    Zeros are shaped as x is, or broadcast to it."""
    if fmt.codes in ("e2m1", "e5m2"):
        return round_elements(x, fmt.codes)
    if fmt.codes == "fp8":
        return to_float8(jnp.clip(x, -_FP8_MAX, _FP8_MAX), jnp.float8_e4m3fn)
    if fmt.codes in TABLES:
        table, order = np.unique(TABLES[fmt.codes], return_index=True)
        middles = jnp.asarray((table[1:] + table[:-1]) / 2, x.dtype)
        above = x[..., None] > middles.reshape((1,) * x.ndim + (-1,))
        return jnp.asarray(order, jnp.int8)[jnp.sum(above.astype(jnp.int8), axis=-1, dtype=jnp.int8)]
    low, high = (-8, 7) if fmt.packed else (-128, 127)
    if zeros is None:
        return jnp.clip(jnp.round(x), low if fmt.packed else -127, high).astype(jnp.int8)
    return jnp.clip(jnp.round(x) + zeros, low, high).astype(jnp.int8)


def code_values(codes: jax.Array, zeros: jax.Array | None, fmt: WeightFormat, dtype: DTypeLike) -> jax.Array:
    """Returns the values of codes in units of scales, in `dtype`. Zeros are as round_codes takes them."""
    if fmt.codes in ("e2m1", "e5m2"):
        return element_values(codes, fmt.codes, dtype)
    x = jnp.asarray(TABLES[fmt.codes], dtype)[codes] if fmt.codes in TABLES else codes.astype(dtype)
    return x if zeros is None else x - zeros


def store_scales(scales: jax.Array, fmt: WeightFormat) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns storable scales [N', groups] as they will be decoded, in their dtype, and as they are stored. The third
    result is QuantizedWeight.scale_steps."""
    if fmt.scale_codes == "e8m0":
        return scales, encode_e8m0(scales), None
    if fmt.scale_codes == "e4m3":
        stored, tensor = split_scales(scales, jnp.max(scales))
        decoded = stored.astype(jnp.float32) * tensor
        return decoded.astype(scales.dtype), stored, jnp.broadcast_to(tensor, scales.shape[:1])
    if not fmt.double_quant:
        return scales, scales.astype(fmt.scale_dtype), None
    stored, steps = _quantize_scales(scales)
    return decode_scales(stored, steps).astype(scales.dtype), stored, steps


def _quantize_scales(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes scales [N', groups] to int8 around their mean, in blocks of 256: int8 [N', groups], float32 [1 +
    blocks]. This is QLoRA's double quantization, with a linear code."""
    flat = scales.reshape(-1)
    mean = jnp.mean(flat).astype(jnp.float32)
    blocks = jnp.pad(flat - mean.astype(flat.dtype), (0, -flat.size % _BLOCK)).reshape(-1, _BLOCK)
    tiny = jnp.asarray(jnp.finfo(jnp.float32).tiny, flat.dtype)
    steps = jnp.maximum(jnp.max(jnp.abs(blocks), axis=1) / 127, tiny).astype(jnp.float32)
    codes = jnp.round(blocks / steps[:, None].astype(flat.dtype)).astype(jnp.int8)
    return codes.reshape(-1)[: flat.size].reshape(scales.shape), jnp.concatenate([mean[None], steps])


def decode_scales(codes: jax.Array, steps: jax.Array) -> jax.Array:
    """Returns what _quantize_scales stored, as float16 within its normal range: int8 [N', groups] gives [N',
    groups]."""
    block = jnp.arange(codes.size, dtype=jnp.int32) // _BLOCK
    scales = steps[0] + codes.reshape(-1).astype(jnp.float32) * steps[1:][block]
    limits = jnp.finfo(jnp.float16)
    scales = jnp.clip(scales, float(limits.tiny), float(limits.max))
    return scales.reshape(codes.shape).astype(jnp.float16)


def pack4[A: (jax.Array, np.ndarray)](codes: A) -> A:
    """Packs two codes of 4 bits a byte: [..., K] of any integers gives uint8 [..., K/2], K a multiple of 32. Each 32
    columns 8p + 2c + i are stored as nibble 4i + p of 32-bit word c, p and c below 4 and i below 2. So word c is what
    one thread in four gives to wgmma's 16-bit left operand, whose pairs (i) are 16 bits apart."""
    if codes.shape[-1] % 32:
        raise ValueError(f"{codes.shape[-1]} codes cannot be packed: expected a multiple of 32")
    parts = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, 4, 4, 2).swapaxes(-3, -2).swapaxes(-2, -1)
    low, high = parts[..., 0::2], parts[..., 1::2]  # of [.., c, i, p]
    return ((low & np.uint8(15)) | (high << np.uint8(4))).reshape(*codes.shape[:-1], -1)


def unpack4(packed: jax.Array, *, signed: bool) -> jax.Array:
    """Reverses pack4: uint8 [..., K/2] gives int8 [..., K] in -8..7, or in 0..15."""
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1).astype(jnp.int8)
    codes = jnp.moveaxis(pairs.reshape(*packed.shape[:-1], -1, 4, 2, 4), -1, -3).reshape(*packed.shape[:-1], -1)
    return (codes ^ jnp.int8(8)) - jnp.int8(8) if signed else codes
