"""weight_only_matmul for Ampere, Ada and Hopper: codes become floats in registers, in tiles or for one row of x.

Codes meet x as they are, less their zeros, which 16 bits hold; entries of tables are rounded to x's dtype. Scales
multiply the float32 sum of a group.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from pallas_kernels import triton_call
from pallas_kernels.block_floats import E2M1
from pallas_kernels.pages_triton import from_e4m3
from pallas_kernels.quantized_weights import TABLES, QuantizedWeight, group_scales
from pallas_kernels.triton_call import Launch
from pallas_kernels.weight_only_matmul.config import TritonConfig, triton_config

_TABLES = {**TABLES, "e2m1": (*E2M1, *(-x for x in E2M1))}


@partial(jax.jit, static_argnames="out_dtype")
def weight_only_matmul(
    x: jax.Array, w: QuantizedWeight, bias: jax.Array | None, residual: jax.Array | None, out_dtype: DTypeLike
) -> jax.Array:
    """x [M, K'] with columns as stored, bias [N], residual [M, N] -> [M, N]; see api.py."""
    if not x.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, w.shape[0]), out_dtype)
    scales = group_scales(w)
    table = jnp.asarray(_TABLES[w.format.codes], x.dtype) if w.format.codes in _TABLES else None
    optional = [scales if each is None else each for each in (w.zeros, table, bias, residual)]  # not read where None
    made = launch(x, w, bias is not None, residual is not None, out_dtype, triton_config(x.shape[0]))
    values = jax.lax.bitcast_convert_type(w.values, jnp.uint8)
    return triton_call.call(made, x, values, scales, *optional)[0]


def launch(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: QuantizedWeight,
    bias: bool,
    residual: bool,
    out_dtype: DTypeLike,
    config: TritonConfig,
) -> Launch:
    """The launch for arrays or their shapes and dtypes. Arguments: x, values as uint8, scales, zeros, table, bias and
    residual."""
    (M, K), N, fmt = x.shape, w.shape[0], w.format
    step = 32 if config.rows == 1 else math.gcd(config.depth, K)  # without groups: a row's scale waits for the last sum
    group = fmt.group or step
    constants = {
        "M": M, "N": N, "K": K, "STORED": w.values.shape[0], "GROUP": group, "GROUPED": fmt.group is not None,
        "PACKED": fmt.packed, "MIDDLE": {"int4": 8, "int8": 128}.get(fmt.codes, 0), "TABLE": fmt.codes in _TABLES,
        "ZEROS": fmt.zero_point, "BIAS": bias, "RESIDUAL": residual, "COLUMNS": config.columns,
    }  # fmt: skip
    if config.rows == 1:
        constants["GROUPS"] = max(1, config.depth // group)
    else:
        constants |= {"STEP": min(group, config.depth), "ROWS": config.rows}
    return Launch(
        _row if config.rows == 1 else _tile,
        (jax.ShapeDtypeStruct((M, N), out_dtype),),
        (triton.cdiv(M, config.rows) * triton.cdiv(N, config.columns),),
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
):  # fmt: skip
    # Columns of the result are rows of the product: Hopper's tensor cores take its left operand from registers.
    BYTES: tl.constexpr = STEP // 2 if PACKED else STEP
    tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // tiles * COLUMNS + tl.arange(0, COLUMNS)
    stored = column % STORED  # rows and columns beyond are not written
    of_x = x + (row % M).to(tl.int64)[:, None] * K + tl.arange(0, STEP)[None, :]
    of_w = w + stored.to(tl.int64)[:, None] * (K // STEP * BYTES) + tl.arange(0, BYTES)[None, :]
    later_scale, later_offset = tl.load(scales + stored).to(tl.float32), _offset(zeros, stored, MIDDLE, ZEROS)
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in range(K // STEP):
        code = tl.load(of_w + step * BYTES).to(tl.int32)
        tokens = tl.load(of_x + step * STEP)
        scale, offset = later_scale, later_offset
        if GROUPED:  # the next step's are under way during this one
            at = stored + tl.minimum(step + 1, K // STEP - 1) // (GROUP // STEP) * STORED
            later_scale, later_offset = tl.load(scales + at).to(tl.float32), _offset(zeros, at, MIDDLE, ZEROS)
        offset = offset[:, None]
        part = tl.zeros([COLUMNS, ROWS], tl.float32) if GROUPED else sums
        if PACKED:
            low, high = _halves(tokens)
            part = tl.dot(_numbers(code & 15, offset, table, MIDDLE, TABLE).to(tokens.dtype), tl.trans(low), part)
            part = tl.dot(_numbers(code >> 4, offset, table, MIDDLE, TABLE).to(tokens.dtype), tl.trans(high), part)
        else:
            part = tl.dot(_numbers(code, offset, table, MIDDLE, TABLE).to(tokens.dtype), tl.trans(tokens), part)
        sums = sums + part * scale[:, None] if GROUPED else part
    y = sums if GROUPED else sums * later_scale[:, None]
    in_columns = column < N
    if BIAS:
        y += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    at, inside = row.to(tl.int64)[None, :] * N + column[:, None], (row < M)[None, :] & in_columns[:, None]
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row(
    x, w, scales, zeros, table, bias, residual, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr,
    GROUPED: tl.constexpr, PACKED: tl.constexpr, MIDDLE: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    # All in float32, without tensor cores; GROUPS groups of COLUMNS rows of the weight at a time.
    BYTES: tl.constexpr = GROUP // 2 if PACKED else GROUP
    row, column = tl.program_id(0) % M, tl.program_id(0) // M * COLUMNS + tl.arange(0, COLUMNS)
    stored = column % STORED
    of_w = w + stored.to(tl.int64)[:, None, None] * (K // GROUP * BYTES) + tl.arange(0, BYTES)[None, None, :]
    sums = tl.zeros([COLUMNS, GROUPS, BYTES], tl.float32)
    for first in tl.range(0, K // GROUP, GROUPS, num_stages=3):
        group = first + tl.arange(0, GROUPS)
        inside = group < K // GROUP
        code = tl.load(of_w + group[None, :, None] * BYTES, mask=inside[None, :, None], other=0).to(tl.int32)
        deep = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tokens = tl.load(x + row.to(tl.int64) * K + deep, mask=inside[:, None], other=0.0)
        at = stored[:, None] + group[None, :] * STORED if GROUPED else stored[:, None] + tl.zeros([1, GROUPS], tl.int32)
        at = tl.where(inside[None, :], at, 0)
        offset = _offset(zeros, at, MIDDLE, ZEROS)[:, :, None]
        if PACKED:
            low, high = _halves(tokens)
            part = _numbers(code & 15, offset, table, MIDDLE, TABLE) * low.to(tl.float32)[None, :, :]
            part += _numbers(code >> 4, offset, table, MIDDLE, TABLE) * high.to(tl.float32)[None, :, :]
        else:
            part = _numbers(code, offset, table, MIDDLE, TABLE) * tokens.to(tl.float32)[None, :, :]
        sums += part * tl.load(scales + at).to(tl.float32)[:, :, None] if GROUPED else part
    y = tl.sum(tl.sum(sums, axis=2), axis=1)
    if not GROUPED:
        y *= tl.load(scales + stored)
    inside, at = column < N, row.to(tl.int64) * N + column
    if BIAS:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _halves(x):
    """What meets the low and the high halves of bytes as pack4 orders them: [R, G] -> two [R, G/2]."""
    R: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (R, G // 32, 2, 2, 4, 2))  # column 16 a + 8 half + 2 c + i of a block is in byte 4 c + 2 i + a
    x = tl.permute(x, (0, 1, 4, 5, 2, 3))
    return tl.split(tl.reshape(x, (R, G // 2, 2)))


@triton.jit
def _offset(zeros, at, MIDDLE: tl.constexpr, ZEROS: tl.constexpr):
    """What _numbers subtracts from integer codes."""
    offset = tl.full(at.shape, 8388608.0 + MIDDLE, tl.float32)
    if ZEROS:
        offset += tl.load(zeros + at).to(tl.float32)
    return offset


@triton.jit
def _numbers(code, offset, table, MIDDLE: tl.constexpr, TABLE: tl.constexpr):
    """float32 of codes, int32 of 4 or 8 bits, in units of scales."""
    if MIDDLE != 0:  # as the low bits of a float whose unit in the last place is 1: conversions are slow
        x = ((code ^ MIDDLE) | 0x4B000000).to(tl.float32, bitcast=True) - offset
    elif TABLE:
        x = tl.load(table + code).to(tl.float32)
    else:
        x = from_e4m3(code)
    return x
