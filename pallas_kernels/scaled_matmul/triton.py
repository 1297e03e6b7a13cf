"""Runs int8_matmul on Ampere, Ada and Hopper, and fp8_matmul on the latter two: a program has a tile of the result.
int8 is summed exactly, in int32; float8 in float32, of which Hopper's tensor cores keep fewer bits."""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from pallas_kernels.backends import on_hopper
from pallas_kernels.scaled_matmul.config import TritonConfig, triton_config
from pallas_kernels.triton import triton_call
from pallas_kernels.triton.triton_call import Launch


@partial(jax.jit, static_argnames="out_dtype")
def scaled_matmul(
    x: jax.Array,
    w: jax.Array,
    x_scale: jax.Array,
    w_scale: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    out_dtype: DTypeLike,
) -> jax.Array:
    """Returns [M, N] of x [M, K], w [N, K], both int8 or e4m3; see int8_matmul and fp8_matmul. Takes x_scale [M],
    w_scale [N], or of blocks [M, G] and [G, N], bias [N] and residual [M, N]."""
    if not x.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, w.shape[0]), out_dtype)
    added = [x_scale if each is None else each for each in (bias, residual)]  # what is not there is not read
    in_blocks = w_scale.ndim == 2
    config = triton_config(x.shape[0], on_hopper(), in_blocks)
    made = launch(x, w, bias is not None, residual is not None, out_dtype, config, in_blocks)
    return triton_call.call(made, x, w, x_scale, w_scale, *added)[0]


def launch(
    x: jax.Array | jax.ShapeDtypeStruct,
    w: jax.Array | jax.ShapeDtypeStruct,
    bias: bool,
    residual: bool,
    out_dtype: DTypeLike,
    config: TritonConfig,
    in_blocks: bool = False,
) -> Launch:
    """Returns the launch for arrays or their shapes and dtypes. Arguments: x, w, x_scale, w_scale, bias and
    residual."""
    (M, K), N = x.shape, w.shape[0]
    rows, columns, depth = config.rows, config.columns, config.depth
    constants = {
        "M": M, "N": N, "K": K, "BIAS": bias, "RESIDUAL": residual, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth,
        "IN_BLOCKS": in_blocks,
    }  # fmt: skip
    return Launch(
        _tile,
        (jax.ShapeDtypeStruct((M, N), out_dtype),),
        (triton.cdiv(M, rows) * triton.cdiv(N, columns),),
        constants,
        num_warps=config.warps,
        num_stages=config.stages,
    )


@triton.jit
def _tile(
    x, w, x_scale, w_scale, bias, residual, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IN_BLOCKS: tl.constexpr,
):  # fmt: skip
    # Neighbours share columns of w, whose bytes are most of what is read: rows change first.
    tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // tiles * COLUMNS + tl.arange(0, COLUMNS)
    deep = tl.arange(0, DEPTH)
    of_x = x + row.to(tl.int64)[:, None] * K + deep[None, :]
    of_w = w + (column % N).to(tl.int64)[None, :] * K + deep[:, None]
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros([ROWS, COLUMNS], kind)
    for k in range(0, K, DEPTH):
        left = tl.load(of_x + k, mask=(row < M)[:, None] & (k + deep < K)[None, :], other=0.0)
        if K % DEPTH == 0:
            right = tl.load(of_w + k)  # columns beyond are not stored
        else:
            right = tl.load(of_w + k, mask=(k + deep < K)[:, None], other=0.0)
        if IN_BLOCKS:  # DEPTH is a block's
            of_row = tl.load(x_scale + row * ((K + DEPTH - 1) // DEPTH) + k // DEPTH, mask=row < M, other=0.0)
            of_column = tl.load(w_scale + k // DEPTH * N + column, mask=column < N, other=0.0)
            sums += tl.dot(left, right, out_dtype=kind) * (of_row[:, None] * of_column[None, :])
        else:
            sums = tl.dot(left, right, sums, out_dtype=kind)
    in_rows, in_columns = row < M, column < N
    y = sums.to(tl.float32)
    if not IN_BLOCKS:
        y *= tl.load(x_scale + row, mask=in_rows, other=0.0)[:, None]
        y *= tl.load(w_scale + column, mask=in_columns, other=0.0)[None, :]
    if BIAS:
        y += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    at, inside = row.to(tl.int64)[:, None] * N + column[None, :], in_rows[:, None] & in_columns[None, :]
    if RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
