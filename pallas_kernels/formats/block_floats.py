"""Rounds to blocks of small floats that share a small scale: OCP's Microscaling (MX specification v1.0) and NVFP4.

| kind | elements | block | scale of a block |
|---|---|---|---|
| mxfp4 | E2M1 | 32 | E8M0: a power of two |
| mxfp8, mxfp8-e5m2 | E4M3, E5M2 | 32 | E8M0 |
| nvfp4 | E2M1 | 16 | E4M3, times one float32 of the whole tensor |

MX (section 6.3): a scale's exponent is floor(log2(absmax)) less the exponent of the largest element. It is at least
-126 here, so that the scale is a normal float32. Elements are values over the scale, to nearest even, and saturate.

NVFP4: a block asks for its absmax times 1/6. The float32 is the largest of these times 1/448. Both are products, since
XLA makes them of divisions by constants. A scale is what the block asks for over that float32, rounded to E4M3 (at
least its smallest positive number). Elements are values over both.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.rounding import to_float8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; 8 to 15 are their negatives
LARGEST = {"e2m1": 6.0, "fp8": 448.0, "e5m2": 57344.0}
FLOATS = {"fp8": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_EXPONENT = {"e2m1": 2, "fp8": 8, "e5m2": 15}  # of the largest element
_BIAS = 127
_TINY = 2.0**-126  # the wanted scale of a block of zeros


@dataclass(frozen=True)
class BlockFloat:
    """Describes a kind of the table above."""

    codes: str  # of elements: "e2m1", "fp8" (E4M3) or "e5m2"
    block: int
    scale: str  # "e8m0" or "e4m3"


KINDS = {
    "mxfp4": BlockFloat("e2m1", 32, "e8m0"),
    "mxfp8": BlockFloat("fp8", 32, "e8m0"),
    "mxfp8-e5m2": BlockFloat("e5m2", 32, "e8m0"),
    "nvfp4": BlockFloat("e2m1", 16, "e4m3"),
}


def round_e2m1(x: jax.Array) -> jax.Array:
    """Returns codes int8, 0 to 15, of the nearest elements; between two as near, the one with an even code."""
    size = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.int8)
    for i, (low, high) in enumerate(zip(E2M1, E2M1[1:])):
        middle = jnp.asarray((low + high) / 2, x.dtype)
        code += (size >= middle if i % 2 else size > middle).astype(jnp.int8)
    return code | (jnp.signbit(x).astype(jnp.int8) << 3)


def round_elements(x: jax.Array, codes: str) -> jax.Array:
    """Returns codes of x in units of scales: int8 for E2M1, floats of 8 bits."""
    if codes == "e2m1":
        return round_e2m1(x)
    return to_float8(jnp.clip(x, -LARGEST[codes], LARGEST[codes]), FLOATS[codes])


def element_values(codes: jax.Array, kind: str, dtype: DTypeLike) -> jax.Array:
    """Returns the values of codes, in units of scales."""
    return jnp.asarray((*E2M1, *(-x for x in E2M1)), dtype)[codes] if kind == "e2m1" else codes.astype(dtype)


def mx_scales(absmax: jax.Array, codes: str) -> jax.Array:
    """Returns MX scales, powers of two, of blocks with these largest magnitudes, in the magnitudes' dtype."""
    exponent = jnp.frexp(absmax)[1] - 1 - _EXPONENT[codes]  # frexp's fraction is in [0.5, 1)
    exponent = jnp.where(absmax > 0, exponent, -126)
    return jnp.ldexp(jnp.ones_like(absmax), jnp.clip(exponent, -126, 127))


def encode_e8m0(scales: jax.Array) -> jax.Array:
    """Returns powers of two as uint8, the exponent plus 127."""
    return (jnp.frexp(scales)[1] - 1 + _BIAS).astype(jnp.uint8)


def decode_e8m0(stored: jax.Array) -> jax.Array:
    """Reverses encode_e8m0, to float32."""
    return jnp.ldexp(jnp.ones(stored.shape, jnp.float32), stored.astype(jnp.int32) - _BIAS)


def wanted_scales(absmax: jax.Array) -> jax.Array:
    """Returns NVFP4's scales, not yet rounded, of blocks with these largest magnitudes, in the magnitudes' dtype."""
    return jnp.maximum(absmax * jnp.asarray(1 / 6, absmax.dtype), jnp.asarray(_TINY, absmax.dtype))


def split_scales(scales: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns scales as E4M3, and the float32 that is their unit. In this unit `largest`, which broadcasts to the
    scales, is 448."""
    f32 = jnp.finfo(jnp.float32)
    unit = jnp.asarray(1 / 448, largest.dtype)
    tensor = jnp.clip(largest * unit, float(f32.tiny), float(f32.max)).astype(jnp.float32)
    return to_e4m3(scales, tensor), tensor


def to_e4m3(scales: jax.Array, tensor: jax.Array) -> jax.Array:
    """Returns scales as E4M3, in units of the float32 `tensor`, which broadcasts to them."""
    return to_float8(jnp.clip(scales / tensor.astype(scales.dtype), 2.0**-9, 448), FLOATS["fp8"])


def round_blocks(x: jax.Array, kind: str, scale: jax.Array | None = None, *, axis: str | None = None) -> jax.Array:
    """Returns activations x [..., K] rounded to the values that a kind can hold, in x's float dtype. K is a multiple of
    the block. NVFP4 has a float32 for each row, so that a token does not depend on others, or `scale` [1] for all
    rows. With `axis`, a row's columns are sharded over that mesh axis, and its float32 is the whole row's."""
    fmt = KINDS[kind]
    blocks = x.astype(compute_dtype(x.dtype)).reshape(*x.shape[:-1], -1, fmt.block)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    if fmt.scale == "e8m0":
        scales = mx_scales(absmax, fmt.codes)
    else:
        wanted = wanted_scales(absmax)
        if scale is None:
            largest = jnp.max(wanted, axis=-1, keepdims=True)
            stored, tensor = split_scales(wanted, largest if axis is None else jax.lax.pmax(largest, axis))
        else:
            tensor = jnp.broadcast_to(scale, (*wanted.shape[:-1], 1))
            stored = to_e4m3(wanted, tensor)
        scales = (stored.astype(jnp.float32) * tensor).astype(blocks.dtype)
    codes = round_elements(blocks / scales[..., None], fmt.codes)
    return (element_values(codes, fmt.codes, blocks.dtype) * scales[..., None]).reshape(x.shape).astype(x.dtype)


def nan_scales(stored: np.ndarray) -> bool:
    """Returns whether scales as they are stored (E8M0 as uint8, or E4M3) hold NaN."""
    bits, nan = stored.view(np.uint8), 0xFF if stored.dtype == np.uint8 else 0x7F
    return bool((bits & nan == nan).any())
