"""Runs silu_mul_quant on Ampere, Ada and Hopper: a program holds a row in registers, from gate and up to its codes."""

from functools import partial

import jax
import triton
import triton.language as tl

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.silu_mul_quant import xla
from pallas_kernels.silu_mul_quant.config import check_triton
from pallas_kernels.triton import rows_triton, triton_call
from pallas_kernels.triton.triton_call import Launch


@partial(jax.jit, static_argnames="kind")
def silu_mul_quant(gate_up: jax.Array, *, kind: str | None = None) -> jax.Array | QuantizedRows:
    """Returns rows [T, F] of gate_up [T, 2F]; see api.py. Gradients are xla's."""
    check_triton(kind, str(gate_up.dtype), gate_up.shape[0], gate_up.shape[1] // 2)

    def run(gate_up):
        values, *scales = triton_call.call(launch(gate_up, kind), gate_up)
        return values if kind is None else rows_triton.quantized(values, scales[0], kind)

    return triton_call.with_gradients(run, partial(xla.silu_mul_quant, kind=kind))(gate_up)


def launch(gate_up: jax.Array | jax.ShapeDtypeStruct, kind: str | None) -> Launch:
    """Returns the launch for gate_up [T, 2F], its only argument."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    return Launch(
        _silu_mul if kind is None else _silu_mul_codes,
        rows_triton.outputs(rows, width, gate_up.dtype, kind),
        (rows,),
        rows_triton.constants(width, kind),
        num_warps=rows_triton.block_and_warps(width)[1],
    )


@triton.jit
def _silu_mul(gate_up, values, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr):
    _silu_mul_codes(gate_up, values, values, WIDTH, BLOCK, LARGEST_CODE)


@triton.jit
def _silu_mul_codes(gate_up, values, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = gate_up + row.to(tl.int64) * (2 * WIDTH) + column
    gate = tl.load(at, mask=column < WIDTH, other=0.0)
    up = tl.load(at + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    product = (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype)
    rows_triton.store_row(product, values, scales, row, WIDTH, BLOCK, LARGEST_CODE)
