"""Runs ragged_matmul on Ampere, Ada and Hopper: a program has a block of rows of one group by a slab of its weight.
Rows of other groups are neither read nor written. Codes of 4 bits become floats in registers, and scales multiply the
float32 sum of a group of columns. An H200 has run these kernels, and no GPU before Hopper."""

from functools import partial

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight
from pallas_kernels.ragged_matmul import xla
from pallas_kernels.ragged_matmul.config import TritonConfig, triton_config
from pallas_kernels.row_groups import most_pairs, pairs_of
from pallas_kernels.triton import triton_call
from pallas_kernels.triton.triton_call import Launch, with_gradients
from pallas_kernels.weight_only_matmul.triton import CODE_VALUES, load_zeros, packed


def ragged_matmul(
    x: jax.Array | QuantizedRows,
    w: jax.Array | QuantizedWeight,
    sizes: jax.Array,
    gated: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """Returns [M, N] of x [M, K], w [X N, K] and sizes i32[X]; see api.py. Gradients are xla's."""
    run = partial(_run, gated=gated, out_dtype=out_dtype)
    if isinstance(x, QuantizedRows):
        return run(x, w, sizes)
    return with_gradients(run, partial(xla.ragged_matmul, gated=gated, out_dtype=out_dtype))(x, w, sizes)


@partial(jax.jit, static_argnames=("gated", "out_dtype"))
def _run(
    x: jax.Array | QuantizedRows, w: jax.Array | QuantizedWeight, sizes: jax.Array, *, gated: bool,
    out_dtype: jnp.dtype,
) -> jax.Array:  # fmt: skip
    rows, groups = x.values if isinstance(x, QuantizedRows) else x, sizes.shape[0]
    n = w.shape[0] // (groups * (2 if gated else 1))
    if not rows.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, n), out_dtype)
    config = triton_config(rows.shape[0], groups, gated, float8=rows.dtype == jnp.float8_e4m3fn)
    pairs = pairs_of(sizes, rows.shape[0], config.rows)[:4]
    made = launch(x, w, groups, gated, out_dtype, config)
    if not isinstance(w, QuantizedWeight):
        return triton_call.call(made, rows, w, sizes, sizes, *pairs)[0]
    if isinstance(x, QuantizedRows):
        rows = jnp.pad(rows, ((0, 0), (0, w.values.shape[1] - rows.shape[1])))
        return triton_call.call(made, rows, w.values, x.scales, w.scales, *pairs)[0]
    zeros = w.scales if w.zeros is None else w.zeros  # not read where there is none, as the table
    table = jnp.asarray(CODE_VALUES[w.format.codes], x.dtype) if w.format.codes in CODE_VALUES else w.scales
    return triton_call.call(made, rows, w.values, w.scales, zeros, table, *pairs)[0]


def launch(
    x: jax.Array | QuantizedRows,
    w: jax.Array | QuantizedWeight,
    groups: int,
    gated: bool,
    out_dtype: jnp.dtype,
    config: TritonConfig,
) -> Launch:
    """Returns the launch for arrays or their shapes and dtypes. Arguments: x, w, scales of rows and of w (of codes of
    4 bits: scales, zeros and the table), and the first four of Pairs."""
    m, halves = (x.values if isinstance(x, QuantizedRows) else x).shape[0], 2 if gated else 1
    n = w.shape[0] // (groups * halves)
    stored = w.values if isinstance(w, QuantizedWeight) else w
    constants = {
        "N": n, "K": stored.shape[1], "GROUPS": groups, "HALVES": halves, "ROWS": config.rows,
        "COLUMNS": config.columns,
    }  # fmt: skip
    kernel = _tile
    if isinstance(w, QuantizedWeight) and not isinstance(x, QuantizedRows):
        kernel, fmt = _codes, w.format
        assert fmt.group is not None, "codes of 4 bits are in groups"
        constants |= {
            "K": w.shape[1], "STORED": stored.shape[0], "GROUP": fmt.group, "MIDDLE": 8 if fmt.codes == "int4" else 0,
            "TABLE": fmt.codes in CODE_VALUES, "ZEROS": fmt.zero_point,
        }  # fmt: skip
    else:
        constants |= {"DEPTH": config.depth // stored.dtype.itemsize, "SCALED": isinstance(w, QuantizedWeight)}
    return Launch(
        kernel,
        (jax.ShapeDtypeStruct((m, n), out_dtype),),
        (most_pairs(m, groups + 1, config.rows) * triton.cdiv(n, config.columns),),
        constants,
        num_warps=config.warps,
        num_stages=config.stages,
    )


@triton.jit
def _tile(
    x, w, x_scale, w_scale, group, first_row, first, last, out,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    slabs: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    pair = tl.program_id(0) // slabs
    row = tl.load(first_row + pair) + tl.arange(0, ROWS)
    own = (row >= tl.load(first + pair)) & (row < tl.load(last + pair))
    number = tl.load(group + pair)
    if tl.load(last + pair) > tl.load(first + pair):  # the last programs may have no pair
        column = tl.program_id(0) % slabs * COLUMNS + tl.arange(0, COLUMNS)
        of_w = tl.minimum(number, GROUPS - 1).to(tl.int64) * (HALVES * N) + column % N  # columns beyond are not written
        deep = tl.arange(0, DEPTH)
        left = x + row.to(tl.int64)[:, None] * K + deep[None, :]
        right = w + of_w[None, :] * K + deep[:, None]
        kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
        sums = tl.zeros([ROWS, COLUMNS], kind)
        ups = tl.zeros([ROWS, COLUMNS], kind)
        for k in range(0, K, DEPTH):
            inside = k + deep < K
            rows = tl.load(left + k, mask=own[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(rows, tl.load(right + k, mask=inside[:, None], other=0.0), sums, out_dtype=kind)
            if HALVES == 2:
                up = tl.load(right + (N * K + k), mask=inside[:, None], other=0.0)
                ups = tl.dot(rows, up, ups, out_dtype=kind)
        y = sums.to(tl.float32)
        up = ups.to(tl.float32)
        if SCALED:
            of_rows = tl.load(x_scale + row, mask=own, other=0.0)[:, None]
            y = y * of_rows * tl.load(w_scale + of_w)[None, :]
            if HALVES == 2:
                up = up * of_rows * tl.load(w_scale + of_w + N)[None, :]
        if HALVES == 2:
            y = y / (1.0 + tl.exp(-y)) * up
        y = tl.where(number < GROUPS, y, 0.0)
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=own[:, None] & (column < N)[None, :])


@triton.jit
def _codes(
    x, w, scales, zeros, table, group, first_row, first, last, out,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STORED: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, TABLE: tl.constexpr,
    ZEROS: tl.constexpr,
):  # fmt: skip
    slabs: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    pair = tl.program_id(0) // slabs
    row = tl.load(first_row + pair) + tl.arange(0, ROWS)
    own = (row >= tl.load(first + pair)) & (row < tl.load(last + pair))
    number = tl.load(group + pair)
    if tl.load(last + pair) > tl.load(first + pair):  # the last programs may have no pair
        column = tl.program_id(0) % slabs * COLUMNS + tl.arange(0, COLUMNS)
        of_w = tl.minimum(number, GROUPS - 1) * (HALVES * N) + column % N
        words = w.to(tl.pointer_type(tl.int32), bitcast=True) + of_w.to(tl.int64)[:, None] * (K // 8)
        words += tl.arange(0, GROUP // 8)[None, :]
        of_x = x + row.to(tl.int64)[:, None] * K + tl.arange(0, GROUP)[None, :]
        sums = tl.zeros([COLUMNS, ROWS], tl.float32)
        ups = tl.zeros([COLUMNS, ROWS], tl.float32)
        for step in range(0, K // GROUP):
            tokens = tl.load(of_x + step * GROUP, mask=own[:, None], other=0.0)
            code, at = words + step * (GROUP // 8), of_w + step * STORED
            sums += _product(code, scales, zeros, table, at, tokens, x, MIDDLE, TABLE, ZEROS)
            if HALVES == 2:
                code += N * (K // 8)
                ups += _product(code, scales, zeros, table, at + N, tokens, x, MIDDLE, TABLE, ZEROS)
        y = sums
        if HALVES == 2:
            y = y / (1.0 + tl.exp(-y)) * ups
        y = tl.where(number < GROUPS, y, 0.0)
        at = row.to(tl.int64)[None, :] * N + column[:, None]
        tl.store(out + at, y.to(out.dtype.element_ty), mask=own[None, :] & (column < N)[:, None])


@triton.jit
def _product(
    words, scales, zeros, table, at, tokens, x, MIDDLE: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr
):
    """Returns the products float32 [COLUMNS, ROWS] of a group of columns of tokens [ROWS, GROUP] and of codes."""
    scale = tl.load(scales + at)
    if scales.dtype.element_ty == tl.uint8:  # powers of two in E8M0
        bits = scale.to(tl.int32)
        scale = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    numbers = packed(tl.load(words), load_zeros(zeros, at, ZEROS), table, x, MIDDLE, TABLE)
    return tl.dot(numbers, tl.trans(tokens)) * scale.to(tl.float32)[:, None]
