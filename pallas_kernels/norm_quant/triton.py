"""Runs norm_quant on Ampere, Ada and Hopper: a program holds a row in registers, from the sum to its codes."""

from functools import partial

import jax
import triton
import triton.language as tl

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.norm_quant import xla
from pallas_kernels.norm_quant.config import check_triton
from pallas_kernels.triton import rows_triton, triton_call
from pallas_kernels.triton.triton_call import Launch


@partial(jax.jit, static_argnames=("eps", "kind"))
def norm_quant(
    x: jax.Array, weight: jax.Array, *, eps: float, residual: jax.Array | None = None, kind: str | None = None
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    """Returns rows [T, E], summed [T, E] of x, residual [T, E] and weight [E]; see api.py. Gradients are xla's."""
    check_triton(str(x.dtype), *x.shape)

    def run(x, weight, residual):
        arrays = (x, weight) if residual is None else (x, weight, residual)
        values, *others = triton_call.call(launch(x, residual is not None, eps, kind), *arrays)
        rows = values if kind is None else rows_triton.quantized(values, others[0], kind)
        return rows, x if residual is None else others[-1]

    def plain(x, weight, residual):
        return xla.norm_quant(x, weight, eps=eps, residual=residual, kind=kind)

    return triton_call.with_gradients(run, plain)(x, weight, residual)


def launch(x: jax.Array | jax.ShapeDtypeStruct, add: bool, eps: float, kind: str | None) -> Launch:
    """Returns the launch for x [T, E], with a residual or without. Arguments: x, weight, the residual if there is
    one."""
    (rows, width), dtype = x.shape, x.dtype
    kernels = {(False, False): _norm, (True, False): _add_norm, (False, True): _norm_codes, (True, True): _add_codes}
    return Launch(
        kernels[add, kind is not None],
        rows_triton.outputs(rows, width, dtype, kind) + ((jax.ShapeDtypeStruct(x.shape, dtype),) if add else ()),
        (rows,),
        {"EPS": eps, **rows_triton.constants(width, kind)},
        num_warps=rows_triton.block_and_warps(width)[1],
    )


@triton.jit
def _row(
    x, weight, residual, values, scales, summed,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row.to(tl.int64) * WIDTH + column
    loaded = tl.load(x + at, mask=inside, other=0.0)
    dtype = loaded.dtype
    sums = loaded.to(tl.float32)
    if ADD:
        both = (sums + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(summed + at, both, mask=inside)
        sums = both.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(sums * sums, axis=0) / WIDTH + EPS)
    normed = (sums * inverse).to(dtype).to(tl.float32)
    normed = (normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    rows_triton.store_row(normed, values, scales, row, WIDTH, BLOCK, LARGEST_CODE)


# One kernel a list of arguments: an output that is not asked for has no pointer.


@triton.jit
def _norm(
    x, weight, values,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    _row(x, weight, x, values, values, values, EPS, WIDTH, BLOCK, LARGEST_CODE, False)


@triton.jit
def _add_norm(
    x, weight, residual, values, summed,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    _row(x, weight, residual, values, values, summed, EPS, WIDTH, BLOCK, LARGEST_CODE, True)


@triton.jit
def _norm_codes(
    x, weight, values, scales,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    _row(x, weight, x, values, scales, values, EPS, WIDTH, BLOCK, LARGEST_CODE, False)


@triton.jit
def _add_codes(
    x, weight, residual, values, scales, summed,
    EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr,
):  # fmt: skip
    _row(x, weight, residual, values, scales, summed, EPS, WIDTH, BLOCK, LARGEST_CODE, True)
