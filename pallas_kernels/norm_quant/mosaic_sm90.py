"""norm_quant on Hopper: the residual is added, the sum stored, normed and quantized while it is in registers.

Bound by memory, or by the launch when rows are few: then several warpgroups share a row.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import row_pieces_sm90 as pieces_sm90
from pallas_kernels.norm_quant import xla
from pallas_kernels.norm_quant.config import Config, check_supported, choose_config
from pallas_kernels.quantized_rows import KINDS, QuantizedRows
from pallas_kernels.row_pieces_sm90 import VECTOR, Piece


@partial(jax.jit, static_argnames=("eps", "kind", "config", "interpret"))
def norm_quant(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    residual: jax.Array | None = None,
    kind: str | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    """x, residual [T, E], weight [E] -> rows [T, E], summed [T, E]; see api.py. Gradients are xla's."""
    rows, width = x.shape
    check_supported(str(x.dtype), rows, width)
    config = choose_config(rows, width, kind, residual is not None) if config is None else config
    config.check(width)
    return _norm_quant(x, weight, residual, eps, kind, config, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _norm_quant(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    eps: float,
    kind: str | None,
    config: Config,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    rows, width = x.shape
    vectors, warpgroups = width // VECTOR, config.warpgroups
    cut = pieces_sm90.pieces(vectors // warpgroups)
    shape = (rows, vectors, VECTOR)
    out = [jax.ShapeDtypeStruct(shape, x.dtype if kind is None else KINDS[kind])]
    scratch: list[Any] = [plgpu.SMEM((config.rows, vectors), jnp.float32), plgpu.Barrier(num_arrivals=warpgroups)]
    if kind is not None:
        out.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
        peaks = warpgroups * pieces_sm90.num_peaks(cut)
        scratch += [plgpu.SMEM((config.rows, peaks), jnp.float32), plgpu.Barrier(num_arrivals=warpgroups)]
    sources = [array.reshape(shape) for array in (x, residual) if array is not None]
    if residual is not None:
        out.append(jax.ShapeDtypeStruct(shape, x.dtype))
    values, *others = plgpu.kernel(
        partial(_body, rows=rows, eps=eps, kind=kind, config=config, cut=cut, add=residual is not None),
        out_type=out,
        grid=(-(-rows // config.rows),),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=pieces_sm90.COMPILER_PARAMS,
        kernel_name="norm_quant",
    )(weight.reshape(shape[1:]), *sources)
    values = values.reshape(rows, width)
    summed = x if residual is None else others[-1].reshape(rows, width)
    return (values if kind is None else QuantizedRows(values, others[0])), summed


def _forward(x, weight, residual, eps, kind, config, interpret):
    return _norm_quant(x, weight, residual, eps, kind, config, interpret), (x, weight, residual)


def _backward(eps, kind, config, interpret, saved, gradients):
    def run(x, weight, residual):
        return xla.norm_quant(x, weight, eps=eps, residual=residual, kind=kind)

    return jax.vjp(run, *saved)[1](gradients)


_norm_quant.defvjp(_forward, _backward)


def _body(
    weight: Any, *refs: Any, rows: int, eps: float, kind: str | None, config: Config, cut: tuple[Piece, ...], add: bool
) -> None:
    x, *rest = refs
    residual = rest.pop(0) if add else None
    values = rest.pop(0)
    scales = None if kind is None else rest.pop(0)
    summed = rest.pop(0) if add else None
    squares, barrier, *peaks = rest
    first, part = jax.lax.axis_index("block") * config.rows, jax.lax.axis_index("warpgroup")
    block = pieces_sm90.Block(rows, first, config.rows, part, cut)
    sums = block.load(x)
    if add:
        sums = [[a + b for a, b in zip(*pair)] for pair in zip(sums, block.load(residual))]
    weights = block.load_row(weight)
    if add:
        block.store(summed, sums)
    totals = block.sums([[jnp.square(pieces_sm90.widen(y)) for y in row] for row in sums], squares, barrier)
    share = float(np.float32(1 / (VECTOR * weight.shape[0])))
    normed = [_norm(row, weights, total * share, eps) for row, total in zip(sums, totals)]
    if kind is None:
        block.store(values, normed)
    else:
        block.quantize(values, scales, normed, kind, *peaks)


def _norm(row: Sequence[jax.Array], weights: Sequence[jax.Array], mean: jax.Array, eps: float) -> list[jax.Array]:
    """A row's pieces over their root mean square, rounded, times the weights, rounded."""
    rstd = jax.lax.rsqrt(mean + float(np.float32(eps)))
    return [(pieces_sm90.widen(y) * rstd).astype(y.dtype) * w for y, w in zip(row, weights)]
