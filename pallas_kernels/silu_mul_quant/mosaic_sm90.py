"""silu_mul_quant on Hopper: gate and up are read once, where the projection left them, and only codes are written.

Bound by memory, or by the launch when rows are few: then several warpgroups share a row.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_pieces_sm90 as pieces_sm90
from pallas_kernels.quantized_rows import KINDS, QuantizedRows
from pallas_kernels.row_pieces_sm90 import VECTOR, Piece
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
    """gate_up [T, 2F] -> rows [T, F]; see api.py. Gradients are xla's."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    check_supported(str(gate_up.dtype), rows, width)
    config = choose_config(rows, width, kind) if config is None else config
    config.check(width, kind)
    return _silu_mul_quant(gate_up, kind, config, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _silu_mul_quant(
    gate_up: jax.Array, kind: str | None, config: Config, interpret: plgpu.InterpretGPUParams | None
) -> jax.Array | QuantizedRows:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    parts = config.warpgroups * config.splits
    cut = pieces_sm90.pieces(width // VECTOR // parts)
    out = [jax.ShapeDtypeStruct((rows, width // VECTOR, VECTOR), gate_up.dtype if kind is None else KINDS[kind])]
    scratch: list[Any] = []
    if kind is not None:
        out.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
        peaks = config.warpgroups * pieces_sm90.num_peaks(cut)
        scratch = [plgpu.SMEM((config.rows, peaks), jnp.float32), plgpu.Barrier(num_arrivals=config.warpgroups)]
    values, *scales = plgpu.kernel(
        partial(_body, rows=rows, kind=kind, config=config, cut=cut),
        out_type=out,
        grid=(-(-rows // config.rows), config.splits),
        grid_names=("block", "split"),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=pieces_sm90.COMPILER_PARAMS,
        kernel_name="silu_mul_quant",
    )(gate_up.reshape(rows, 2, width // VECTOR, VECTOR))
    values = values.reshape(rows, width)
    return values if kind is None else QuantizedRows(values, scales[0])


def _forward(gate_up, kind, config, interpret):
    return _silu_mul_quant(gate_up, kind, config, interpret), gate_up


def _backward(kind, config, interpret, gate_up, gradient):
    return jax.vjp(partial(xla.silu_mul_quant, kind=kind), gate_up)[1](gradient)


_silu_mul_quant.defvjp(_forward, _backward)


def _body(
    gate_up: Any, values: Any, *rest: Any, rows: int, kind: str | None, config: Config, cut: tuple[Piece, ...]
) -> None:
    first = jax.lax.axis_index("block") * config.rows
    part = jax.lax.axis_index("split") * config.warpgroups + jax.lax.axis_index("warpgroup")
    block = pieces_sm90.Block(rows, first, config.rows, part, cut)
    loaded = [block.load(gate_up.at[:, half]) for half in range(2)]
    results = [[_silu_mul(*halves) for halves in zip(*row)] for row in zip(*loaded)]
    if kind is None:
        block.store(values, results)
    else:
        scales, *scratch = rest
        block.quantize(values, scales, results, kind, *scratch)


def _silu_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate * sigmoid(gate) * up in float32, rounded. 1 / y is rsqrt(y)^2: a division takes ten times as long."""
    g = pieces_sm90.widen(gate)
    root = jax.lax.rsqrt(1.0 + jnp.exp(-g))
    return (g * (root * root) * pieces_sm90.widen(up)).astype(gate.dtype)
