"""Runs row_matmul of few rows on Hopper, in Pallas Mosaic GPU. No device has run it yet.

A block has one row of x and a part of that row's matrix, which goes from memory to registers and is multiplied there.
Rows that share a matrix find it in the second-level cache, and memory is read once. Each row adds in one order,
whatever its company. There are two kernels. Where K is large and N is small, a warp has rows of w of its own, as in
gemv.py. Where K is small and N is large, a few lanes have a row of w, and residual and scale are added as it is stored.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import row_pieces_sm90 as row_pieces
from pallas_kernels.hopper.gemm_sm90.gemv import LAYOUT
from pallas_kernels.hopper.gemm_sm90.gemv_config import CHUNK, VECTOR, WARPS
from pallas_kernels.row_matmul.config import LANES, SHORT, Long, Short, short_config


def row_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    layer: jax.Array,
    group: jax.Array,
    residual: jax.Array | None,
    parts: tuple[int, ...],
    out_dtype: jnp.dtype,
    config: Long | Short | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """Returns [M, N] of x [M, P, K], w [L, X, N, K], scale [L, X, P] and residual [M, N]; see api.py."""
    if config is None:
        config = short_config(parts, w.shape[3]) if w.shape[3] in SHORT else Long()
    assert config is not None, "config.check_supported was asked"
    wide = None if scale is None else scale.astype(jnp.float32)
    return _call(x, w, wide, layer[None], group, residual, parts, jnp.dtype(out_dtype), config, interpret)


@partial(jax.jit, static_argnames=("parts", "out_dtype", "config", "interpret"))
def _call(x, w, scale, layer, group, residual, parts, out_dtype, config, interpret):
    (M, P, K), N = x.shape, w.shape[2]
    given = {name: array for name, array in (("scale", scale), ("residual", residual)) if array is not None}
    is_long = isinstance(config, Long)
    run = partial(_long, config) if is_long else partial(_short, config, parts, tuple(given))
    kernel = plgpu.kernel(
        run,
        out_type=jax.ShapeDtypeStruct((M, N), out_dtype),
        grid=(N // (config.rows if is_long else config.columns), M),
        grid_names=("block", "row"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="row_matmul_long" if is_long else "row_matmul_short",
    )
    vectors = (K // VECTOR, VECTOR)
    return kernel(x.reshape(M, P, *vectors), w.reshape(*w.shape[:3], *vectors), layer, group, *given.values())


def _own(w: Any, layer: Any, group: Any) -> tuple[Any, jax.Array]:
    """Returns the matrix of this block's row, and whether it has one."""
    own = group[lax.axis_index("row")]
    valid = (own >= 0) & (own < w.shape[1])
    return w.at[layer[0], jnp.where(valid, own, 0)], valid


def _long(config: Long, x: Any, w: Any, layer: Any, group: Any, out: Any) -> None:
    w, valid = _own(w, layer, group)
    rows = pl.ds(lax.axis_index("block") * config.rows, config.rows)
    row, to = x.at[lax.axis_index("row"), 0], out.at[lax.axis_index("row"), rows]
    chunks = row.shape[0] // CHUNK

    def add(total: jax.Array, first: Any, count: int) -> jax.Array:
        places = [pl.ds((first + i) * CHUNK, CHUNK) for i in range(count)]
        weights = [_load(w.at[rows, place], LAYOUT) for place in places]
        for place, weight in zip(places, weights):
            values = row_pieces.widen(_load(row.at[place], LAYOUT.reduce((0,))))
            spread = plgpu.layout_cast(lax.broadcast_in_dim(values, total.shape, (1, 2)), LAYOUT)
            total = total + row_pieces.widen(weight) * spread
        return total

    @pl.when(valid)
    def _() -> None:
        total = plgpu.layout_cast(jnp.zeros((config.rows, CHUNK, VECTOR), jnp.float32), LAYOUT)
        whole, rest = divmod(chunks, config.ahead)
        total = lax.fori_loop(0, whole, lambda i, total: add(total, i * config.ahead, config.ahead), total)
        if rest:
            total = add(total, whole * config.ahead, rest)
        to[...] = jnp.sum(jnp.sum(total, axis=2), axis=1).astype(out.dtype)

    @pl.when(jnp.logical_not(valid))
    def _() -> None:
        nothing = jnp.zeros((config.rows,), jnp.float32)
        to[...] = plgpu.layout_cast(nothing, LAYOUT.reduce((1, 2))).astype(out.dtype)


def _short(
    config: Short, parts: tuple[int, ...], names: tuple[str, ...], x: Any, w: Any, layer: Any, group: Any, *refs: Any
) -> None:
    *arrays, out = refs
    extra, m = dict(zip(names, arrays, strict=True)), lax.axis_index("row")
    layout = _row_layout(w.shape[3])
    first = lax.axis_index("block") * config.columns
    columns = pl.ds(first, config.columns)
    w, valid = _own(w, layer, group)
    part = sum(jnp.where(first >= sum(parts[: i + 1]), 1, 0) for i in range(len(parts) - 1)) if parts[1:] else 0

    def store(total: jax.Array) -> None:
        if "residual" in extra:
            total = row_pieces.widen(_load(extra["residual"].at[m, columns], layout.reduce((1, 2)))) + total
        out.at[m, columns][...] = total.astype(out.dtype)

    @pl.when(valid)
    def _() -> None:
        weights = _load(w.at[columns], layout)
        values = row_pieces.widen(_load(x.at[m, part], layout.reduce((0,))))
        spread = plgpu.layout_cast(lax.broadcast_in_dim(values, weights.shape, (1, 2)), layout)
        total = jnp.sum(jnp.sum(row_pieces.widen(weights) * spread, axis=2), axis=1)
        if "scale" in extra:
            total = total * extra["scale"][layer[0], group[m], part]
        store(total)

    @pl.when(jnp.logical_not(valid))
    def _() -> None:
        store(plgpu.layout_cast(jnp.zeros((config.columns,), jnp.float32), layout.reduce((1, 2))))


def _row_layout(vectors: int) -> Any:
    """Lays out w [columns, vectors, 8] in registers: a vector to a lane, and rows of w side by side in a warp."""
    rows = LANES // vectors
    tiling = ((WARPS * rows, vectors, VECTOR), (rows, vectors, VECTOR), (1, 1, VECTOR))
    layout = TiledLayout(plgpu.Tiling(tiling), (-9,), (-6, -5), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
