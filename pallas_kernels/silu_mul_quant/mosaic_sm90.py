"""Runs silu_mul_quant on Hopper: gate and up are read once, where the projection left them, and only codes are written.

A row is loaded at once, computed, and quantized in registers. Memory bounds it when rows are many, but not well. A
block computes nothing while it loads. As all blocks of an SM do so at the same time, memory idles while they compute.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_rows import KINDS, QuantizedRows
from pallas_kernels.hopper import row_pieces_sm90 as row_pieces
from pallas_kernels.hopper.row_pieces_sm90 import VECTOR, Part, Piece
from pallas_kernels.silu_mul_quant import xla
from pallas_kernels.silu_mul_quant.config import Config, check_supported, choose_config


@partial(jax.jit, static_argnames=("kind", "config", "interpret"))
def silu_mul_quant(
    gate_up: jax.Array,
    *,
    kind: str | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array | QuantizedRows:
    """Returns rows [T, F] of gate_up [T, 2F]; see api.py. Gradients are xla's."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    check_supported(str(gate_up.dtype), rows, width)
    config = choose_config(rows, width) if config is None else config
    config.check(width)
    return _silu_mul_quant(gate_up, kind, config, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _silu_mul_quant(
    gate_up: jax.Array, kind: str | None, config: Config, interpret: plgpu.InterpretGPUParams | None
) -> jax.Array | QuantizedRows:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    vectors, warpgroups = width // VECTOR, config.warpgroups
    cut = row_pieces.pieces(vectors // warpgroups)
    out = [jax.ShapeDtypeStruct((rows, vectors, VECTOR), gate_up.dtype if kind is None else KINDS[kind])]
    scratch: list[Any] = []
    if kind is not None:
        out.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
        scratch = [
            plgpu.SMEM((warpgroups * row_pieces.num_peaks(cut),), jnp.float32),
            plgpu.Barrier(num_arrivals=warpgroups),
        ]
    values, *scales = plgpu.kernel(
        partial(_body, kind=kind, cut=cut),
        out_type=out,
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=row_pieces.COMPILER_PARAMS,
        kernel_name="silu_mul_quant",
    )(gate_up.reshape(rows, 2, vectors, VECTOR))
    values = values.reshape(rows, width)
    return values if kind is None else QuantizedRows(values, scales[0])


def _forward(gate_up, kind, config, interpret):
    return _silu_mul_quant(gate_up, kind, config, interpret), gate_up


def _backward(kind, config, interpret, gate_up, gradient):
    return jax.vjp(partial(xla.silu_mul_quant, kind=kind), gate_up)[1](gradient)


_silu_mul_quant.defvjp(_forward, _backward)


def _body(gate_up: Any, values: Any, *rest: Any, kind: str | None, cut: tuple[Piece, ...]) -> None:
    row, part = jax.lax.axis_index("row"), Part(jax.lax.axis_index("warpgroup"), cut)
    gate, up = part.load(gate_up.at[row, 0]), part.load(gate_up.at[row, 1])
    results = [_silu_mul(*pair) for pair in zip(gate, up)]
    if kind is None:
        part.store(values.at[row], results)
        return
    scales, *scratch = rest
    inverse = part.store_scale(scales.at[row], part.peak(results, *scratch), kind)
    part.store(values.at[row], [row_pieces.codes(row_pieces.widen(x), inverse, kind) for x in results])


def _silu_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    product = row_pieces.silu_mul(row_pieces.widen(gate), row_pieces.widen(up))
    return product.astype(gate.dtype)
