"""Rounds rows to eight bits in Triton kernels over whole rows, to the bits of quantized_rows.py. Integers find the
codes, since GPUs before compute capability 8.9 convert nothing to float8."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.formats.quantized_rows import KINDS, LARGEST, QuantizedRows

# The least block for each number of warps: a thread has at most 32 numbers of a row. All compute capabilities share
# this table: memory bounds the kernels, and they have enough loads in flight.
WARPS = ((16384, 16), (8192, 8), (0, 4))


def block_and_warps(width: int) -> tuple[int, int]:
    """Returns the block that holds a row of `width` numbers, and the warps that share it."""
    block = triton.next_power_of_2(width)
    return block, next(warps for least, warps in WARPS if block >= least)


def outputs(rows: int, width: int, dtype: jnp.dtype, kind: str | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns a kernel's outputs of rows [T, E], as codes in bytes and with scales [T] where there is a kind."""
    if kind is None:
        return (jax.ShapeDtypeStruct((rows, width), dtype),)
    return jax.ShapeDtypeStruct((rows, width), jnp.int8), jax.ShapeDtypeStruct((rows,), jnp.float32)


def quantized(codes: jax.Array, scales: jax.Array, kind: str) -> QuantizedRows:
    """Returns quantized rows of codes in bytes, in the codes' own dtype."""
    return QuantizedRows(jax.lax.bitcast_convert_type(codes, KINDS[kind]), scales)


def constants(width: int, kind: str | None) -> dict[str, int | float]:
    """Returns the constants of `store_row`; LARGEST_CODE is 0 for rows that are not quantized."""
    block, _ = block_and_warps(width)
    return {"WIDTH": width, "BLOCK": block, "LARGEST_CODE": 0.0 if kind is None else LARGEST[kind]}


@triton.jit
def store_row(y, values, scales, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """Stores y [BLOCK], rounded to 16 bits already: as it is, or as codes and a scale. Beyond WIDTH y is zero."""
    column = tl.arange(0, BLOCK)
    at = values + row.to(tl.int64) * WIDTH + column
    if LARGEST_CODE == 0.0:
        tl.store(at, y, mask=column < WIDTH)
    else:
        y = y.to(tl.float32)
        # As integers magnitudes have the same order, and NaN is above all.
        peak = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
        scale = peak * (1.0 / LARGEST_CODE)
        scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
        tl.store(scales + row, scale)
        scaled = y * tl.div_rn(1.0, scale)
        clipped = tl.minimum(tl.maximum(scaled, -LARGEST_CODE), LARGEST_CODE)
        if LARGEST_CODE == 127.0:
            codes = tl.where(scaled == scaled, nearest(clipped), 0)
        else:
            codes = tl.where(scaled == scaled, to_e4m3(clipped), 0x7F)
        tl.store(at, codes.to(tl.int8), mask=column < WIDTH)


@triton.jit
def nearest(x):
    """Rounds to nearest integers, ties to even: the low bits of a sum whose unit in the last place is 1."""
    bits = (x + 12582912.0).to(tl.int32, bitcast=True)
    return bits - 0x4B400000


@triton.jit
def to_e4m3(x):
    """Returns the bits of float8_e4m3fn, ties to even, of |x| up to 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 120 * 8: exponents are off by 127 - 7
    tiny = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # steps of 2^-9
    code = tl.where(size < 0x3C800000, tiny, normal)  # below 2^-6
    return code | ((bits >> 24) & 0x80)
