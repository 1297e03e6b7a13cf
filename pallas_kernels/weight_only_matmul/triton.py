"""Runs weight_only_matmul on Ampere, Ada and Hopper: codes become floats in registers, in tiles or for one row of x.
Codes meet x as they are, less their zeros, which 16 bits hold; entries of tables are rounded to x's dtype. Scales
multiply the float32 sum of a group. Weights are read as words of 32 bits, of eight codes or four."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from pallas_kernels.formats.block_floats import E2M1
from pallas_kernels.formats.quantized_weights import QuantizedWeight, group_scales
from pallas_kernels.formats.weight_formats import TABLES
from pallas_kernels.triton import triton_call
from pallas_kernels.triton.codes_triton import from_e4m3
from pallas_kernels.triton.triton_call import Launch
from pallas_kernels.weight_only_matmul.config import TritonConfig, triton_config

CODE_VALUES = {**TABLES, "e2m1": (*E2M1, *(-x for x in E2M1))}


@partial(jax.jit, static_argnames="out_dtype")
def weight_only_matmul(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    """Returns [M, N] of x [M, K'] with columns as stored, bias [N] and residual [M, N]; see api.py."""
    if not x.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, w.shape[0]), out_dtype)
    scales = group_scales(w)
    table = jnp.asarray(CODE_VALUES[w.format.codes], x.dtype) if w.format.codes in CODE_VALUES else None
    optional = [scales if each is None else each for each in (w.zeros, table, bias, residual)]  # not read where None
    config = triton_config(x.shape[0], x.shape[1], w.shape[0], w.format.codes)
    made = launch(x, w, bias is not None, residual is not None, out_dtype, config)
    values = w.values  # GPUs before compute capability 8.9 have no float8
    values = jax.lax.bitcast_convert_type(values, jnp.uint8) if w.format.codes == "fp8" else values
    (sums,) = triton_call.call(made, x, values, scales, *optional)
    if sums.ndim == 2:
        return sums
    y = sums[0]
    for part in range(1, len(sums)):  # of x's columns: one by one, as a reduction's order could depend on M
        y = y + sums[part]
    y = y if bias is None else y + bias.astype(jnp.float32)[None, :]
    return (y if residual is None else y + residual.astype(jnp.float32)).astype(out_dtype)


def launch(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: QuantizedWeight,
    bias: bool,
    residual: bool,
    out_dtype: DTypeLike,
    config: TritonConfig,
) -> Launch:
    """Returns the launch for arrays or their shapes and dtypes. Arguments: x, values, scales, zeros, table, bias and
    residual. The output is the result [M, N]. Where the configuration has parts it is their sums, float32 [parts, M,
    N]."""
    (M, K), N, fmt = x.shape, w.shape[0], w.format
    step = math.gcd(config.depth, K)  # without groups: a row's scale waits for the last sum
    group = fmt.group or step
    constants = {
        "M": M, "N": N, "K": K, "STORED": w.values.shape[0], "GROUP": group, "GROUPED": fmt.group is not None,
        "PACKED": fmt.packed, "MIDDLE": {"int4": 8, "int8": 128}.get(fmt.codes, 0), "TABLE": fmt.codes in CODE_VALUES,
        "ZEROS": fmt.zero_point, "BIAS": bias, "RESIDUAL": residual, "COLUMNS": config.columns,
    }  # fmt: skip
    if config.rows == 1:
        constants["QUADS"] = 32 * config.warps
    else:
        constants |= {"STEP": min(group, config.depth), "ROWS": config.rows, "PARTS": config.parts}
    whole = config.parts == 1
    return Launch(
        _row if config.rows == 1 else _tile,
        (jax.ShapeDtypeStruct((M, N) if whole else (config.parts, M, N), out_dtype if whole else jnp.float32),),
        (triton.cdiv(M, config.rows) * triton.cdiv(N, config.columns), config.parts),
        constants,
        num_warps=config.warps,
        num_stages=config.stages,
    )


@triton.jit
def _tile(
    x, w, scales, zeros, table, bias, residual, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr,
    GROUPED: tl.constexpr, PACKED: tl.constexpr, MIDDLE: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    # Columns of the result are rows of the product: Hopper's tensor cores take its left operand from registers.
    tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // tiles * COLUMNS + tl.arange(0, COLUMNS)
    stored = column % STORED  # rows and columns beyond are not written
    of_x = x + (row % M).to(tl.int64)[:, None] * K
    CODES: tl.constexpr = 8 if PACKED else 4  # of a word
    of_w = w.to(tl.pointer_type(tl.int32), bitcast=True) + stored.to(tl.int64)[:, None] * (K // CODES)
    of_w += tl.arange(0, STEP // CODES)[None, :]
    steps: tl.constexpr = K // STEP
    begin = tl.program_id(1) * steps // PARTS
    end = (tl.program_id(1) + 1) * steps // PARTS
    at = stored + begin // (GROUP // STEP) * STORED if GROUPED else stored
    later_scale, later_zero = tl.load(scales + at).to(tl.float32), load_zeros(zeros, at, ZEROS)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(begin, end):
        code = tl.load(of_w + step * (STEP // CODES))
        scale, zero = later_scale, later_zero
        if GROUPED:  # the next step's are under way during this one
            at = stored + tl.minimum(step + 1, steps - 1) // (GROUP // STEP) * STORED
            later_scale, later_zero = tl.load(scales + at).to(tl.float32), load_zeros(zeros, at, ZEROS)
        part = tl.zeros([COLUMNS, ROWS], tl.float32) if GROUPED else sums
        tokens = tl.load(of_x + (step * STEP + tl.arange(0, STEP))[None, :])
        if PACKED:
            numbers = packed(code, zero, table, x, MIDDLE, TABLE)
        else:
            even = tl.join(_byte(code, 0, zero, MIDDLE), _byte(code, 2, zero, MIDDLE))
            odd = tl.join(_byte(code, 1, zero, MIDDLE), _byte(code, 3, zero, MIDDLE))
            numbers = tl.reshape(tl.join(even, odd), (COLUMNS, STEP)).to(tokens.dtype)
        part = tl.dot(numbers, tl.trans(tokens), part)
        sums = sums + part * scale[:, None] if GROUPED else part
    y = sums if GROUPED else sums * later_scale[:, None]
    in_columns = column < N
    at, inside = row.to(tl.int64)[None, :] * N + column[:, None], (row < M)[None, :] & in_columns[:, None]
    if PARTS == 1:
        if BIAS:
            y += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    else:
        at += tl.program_id(1).to(tl.int64) * M * N
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row(
    x, w, scales, zeros, table, bias, residual, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr,
    GROUPED: tl.constexpr, PACKED: tl.constexpr, MIDDLE: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    # All in float32, without tensor cores. A thread has quads of words, each with COLUMNS rows of the weight: what it
    # makes of x meets all of these.
    CODES: tl.constexpr = 8 if PACKED else 4  # of a word
    row, column = tl.program_id(0) % M, tl.program_id(0) // M * COLUMNS + tl.arange(0, COLUMNS)
    stored = column % STORED
    of_w = w.to(tl.pointer_type(tl.int32), bitcast=True) + stored.to(tl.int64)[None, :, None] * (K // CODES)
    of_x = x.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * (K // 2)
    word = tl.arange(0, 4)[None, None, :]
    sums = tl.zeros([QUADS, COLUMNS], tl.float32)
    for first in range(0, K // (4 * CODES), QUADS):
        quad = first + tl.arange(0, QUADS)
        inside = quad < K // (4 * CODES)
        code = tl.load(of_w + quad[:, None, None] * 4 + word, mask=inside[:, None, None], other=0)
        part = tl.zeros([QUADS, COLUMNS, 4], tl.float32)
        total = tl.zeros([QUADS, 1, 4], tl.float32)
        for p in tl.static_range(CODES // 2):
            at = quad[:, None, None] * (2 * CODES) + (p * 4 + word if PACKED else word * 2 + p)
            pair = tl.load(of_x + at, mask=inside[:, None, None], other=0)
            for i in tl.static_range(2):
                token = (pair >> (16 * i)).to(tl.int16).to(x.dtype.element_ty, bitcast=True).to(tl.float32)
                part += _number(code, p, i, table, PACKED, MIDDLE, TABLE) * token
                total += token
        part, total = tl.sum(part, axis=2), tl.sum(total, axis=2)
        at = stored[None, :]
        if GROUPED:
            at = tl.where(inside[:, None], at + (quad * (4 * CODES) // GROUP)[:, None] * STORED, 0)
        if MIDDLE != 0:
            part = part * (2.0 * MIDDLE) - total * (3.0 * MIDDLE + load_zeros(zeros, at, ZEROS))
        sums += part * tl.load(scales + at).to(tl.float32) if GROUPED else part
    y = tl.sum(sums, axis=0)
    if not GROUPED:
        y *= tl.load(scales + stored)
    inside, at = column < N, row.to(tl.int64) * N + column
    if BIAS:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_zeros(zeros, at, ZEROS: tl.constexpr):
    """Returns what is subtracted from integer codes, float32."""
    zero = tl.zeros(at.shape, tl.float32)
    if ZEROS:
        zero += tl.load(zeros + at).to(tl.float32)
    return zero


@triton.jit
def _number(
    word, p: tl.constexpr, i: tl.constexpr, table, PACKED: tl.constexpr, MIDDLE: tl.constexpr, TABLE: tl.constexpr
):
    """Returns float32 of code i of pair p of each word. Of integers c between -MIDDLE and MIDDLE it is 1.5 + c / (2
    MIDDLE), which are their bits below a 1: conversions are slow."""
    at: tl.constexpr = 4 * p + 16 * i if PACKED else 16 * p + 8 * i
    if MIDDLE != 0:
        BITS: tl.constexpr = 4 if PACKED else 8
        shift: tl.constexpr = 23 - BITS - at
        bits = word << shift if shift > 0 else word >> -shift
        mask: tl.constexpr = (2 * MIDDLE - 1) << (23 - BITS)
        flip: tl.constexpr = 0x3F800000 | (MIDDLE << (23 - BITS))
        x = ((bits & mask) ^ _opaque(flip)).to(tl.float32, bitcast=True)
    elif TABLE:
        x = tl.load(table + ((word >> at) & 15)).to(tl.float32)
    else:
        x = from_e4m3((word >> at) & 255)
    return x


@triton.jit
def _opaque(number: tl.constexpr):
    """Keeps the number in a register: ptxas makes one instruction of two operations that have one constant, not of
    two."""
    return tl.num_programs(2) * number  # there is one


@triton.jit
def packed(code, zero, table, x, MIDDLE: tl.constexpr, TABLE: tl.constexpr):
    """Returns the codes of words [N, W] in units of scales, less their zeros [N], in x's dtype [N, 8 W]. Of each 32
    columns pair p of word c has columns 8 p + 2 c and the next."""
    N: tl.constexpr = code.shape[0]
    WORDS: tl.constexpr = code.shape[1]
    even = tl.join(_pairs(code, 0, zero, table, x, MIDDLE, TABLE), _pairs(code, 2, zero, table, x, MIDDLE, TABLE))
    odd = tl.join(_pairs(code, 1, zero, table, x, MIDDLE, TABLE), _pairs(code, 3, zero, table, x, MIDDLE, TABLE))
    numbers = tl.reshape(tl.join(even, odd), (N, WORDS // 4, 4, 2, 2, 2))
    return tl.reshape(tl.permute(numbers, (0, 1, 4, 5, 2, 3)), (N, 8 * WORDS))


@triton.jit
def _pairs(word, p: tl.constexpr, zero, table, x, MIDDLE: tl.constexpr, TABLE: tl.constexpr):
    """Returns the two codes of pair p of each word [N, W] in units of scales, in x's dtype [N, W, 2]; see pack4."""
    dtype: tl.constexpr = x.dtype.element_ty
    if TABLE:
        low, high = tl.load(table + ((word >> (4 * p)) & 15)), tl.load(table + ((word >> (4 * p + 16)) & 15))
    else:  # the low bits of numbers whose unit in the last place is 1: 128 and more, or 1024
        base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        flip: tl.constexpr = (0x43004300 if dtype == tl.bfloat16 else 0x64006400) | (MIDDLE * 0x10001)
        both = ((word >> (4 * p)) & 0x000F000F) ^ flip
        offset = (zero + (base + MIDDLE)).to(dtype)[:, None]
        low = both.to(tl.int16).to(dtype, bitcast=True) - offset
        high = (both >> 16).to(tl.int16).to(dtype, bitcast=True) - offset
    return tl.join(low, high)


@triton.jit
def _byte(word, i: tl.constexpr, zero, MIDDLE: tl.constexpr):
    """Returns float32 of byte i of each word [N, W], in units of scales."""
    code = (word >> (8 * i)) & 255
    if MIDDLE != 0:  # the low bits of a number whose unit in the last place is 1
        x = (code ^ (0x4B000000 | MIDDLE)).to(tl.float32, bitcast=True) - (zero + (8388608.0 + MIDDLE))[:, None]
    else:
        x = from_e4m3(code)
    return x
