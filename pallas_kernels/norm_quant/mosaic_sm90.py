"""Runs norm_quant on Hopper: the residual is added, the sum stored, normed and quantized while it is in registers.
Memory bounds it, or the launch when rows are few. One block of four warps has a row."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_rows import KINDS, QuantizedRows
from pallas_kernels.hopper import row_pieces_sm90 as row_pieces
from pallas_kernels.hopper.row_pieces_sm90 import VECTOR, Part
from pallas_kernels.norm_quant import xla
from pallas_kernels.norm_quant.config import check_supported


@partial(jax.jit, static_argnames=("eps", "kind", "interpret"))
def norm_quant(
    x: jax.Array,
    weight: jax.Array | None,
    *,
    eps: float,
    residual: jax.Array | None = None,
    kind: str | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    """Returns rows [T, E], summed [T, E] of x, residual [T, E] and weight [E]; see api.py. Gradients are xla's."""
    check_supported(str(x.dtype), *x.shape)
    return _norm_quant(x, weight, residual, eps, kind, interpret)


def normed(
    rows: jax.Array, norm: jax.Array, *, eps: float, interpret: plgpu.InterpretGPUParams | None = None
) -> jax.Array:
    """Returns the norm of rows [M, K] for a kernel that takes more K than this one: plain jnp computes the others."""
    try:
        check_supported(str(rows.dtype), *rows.shape)
    except NotImplementedError:
        return xla.norm_quant(rows, norm, eps=eps)[0]
    return norm_quant(rows, norm, eps=eps, interpret=interpret)[0]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _norm_quant(
    x: jax.Array,
    weight: jax.Array | None,
    residual: jax.Array | None,
    eps: float,
    kind: str | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array | QuantizedRows, jax.Array]:
    rows, width = x.shape
    vectors = width // VECTOR
    shape = (rows, vectors, VECTOR)
    sources = [array.reshape(shape) for array in (x, residual) if array is not None]
    if weight is not None:
        sources.append(weight.reshape(shape[1:]))
    out = [jax.ShapeDtypeStruct(shape, x.dtype if kind is None else KINDS[kind])]
    scratch: list[Any] = []
    if weight is not None:
        scratch = [plgpu.SMEM((vectors,), jnp.float32), plgpu.Barrier()]
    if kind is not None:
        out.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
        peaks = row_pieces.num_peaks(row_pieces.pieces(vectors))
        scratch += [plgpu.SMEM((peaks,), jnp.float32), plgpu.Barrier()]
    if residual is not None:
        out.append(jax.ShapeDtypeStruct(shape, x.dtype))
    values, *others = plgpu.kernel(
        partial(_body, eps=eps, kind=kind, add=residual is not None, norm=weight is not None),
        out_type=out,
        grid=(rows,),
        grid_names=("row",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=row_pieces.COMPILER_PARAMS,
        kernel_name="norm_quant",
    )(*sources)
    values = values.reshape(rows, width)
    summed = x if residual is None else others[-1].reshape(rows, width)
    return (values if kind is None else QuantizedRows(values, others[0])), summed


def _forward(x, weight, residual, eps, kind, interpret):
    return _norm_quant(x, weight, residual, eps, kind, interpret), (x, weight, residual)


def _backward(eps, kind, interpret, saved, gradients):
    def run(x, weight, residual):
        return xla.norm_quant(x, weight, eps=eps, residual=residual, kind=kind)

    return jax.vjp(run, *saved)[1](gradients)


_norm_quant.defvjp(_forward, _backward)


def _body(x: Any, *refs: Any, eps: float, kind: str | None, add: bool, norm: bool) -> None:
    rest = list(refs)
    residual = rest.pop(0) if add else None
    weight = rest.pop(0) if norm else None
    values = rest.pop(0)
    scales = None if kind is None else rest.pop(0)
    summed = rest.pop(0) if add else None
    squares = [rest.pop(0) for _ in range(2 if norm else 0)]  # and their barrier
    row = jax.lax.axis_index("row")
    part = Part(jax.lax.axis_index("warpgroup"), row_pieces.pieces(x.shape[1]))
    sums = part.load(x.at[row])
    if residual is not None:
        sums = [a + b for a, b in zip(sums, part.load(residual.at[row]))]
    weights = None if weight is None else part.load(weight)
    if summed is not None:
        part.store(summed.at[row], sums)
    normed = sums if weights is None else part.norm(sums, weights, eps, *squares)
    if kind is None or scales is None:
        part.store(values.at[row], normed)
        return
    inverse = part.store_scale(scales.at[row], part.peak(normed, *rest), kind)
    part.store(values.at[row], [row_pieces.codes(row_pieces.widen(y), inverse, kind) for y in normed])
