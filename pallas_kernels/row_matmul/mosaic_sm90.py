"""Runs row_matmul on Hopper, in Pallas Mosaic GPU.

Where rows are few, a block has one of them and a part of its matrix, which goes from memory to registers and is
multiplied there. Rows that share a matrix find it in the second-level cache, and memory is read once. If all ALIKE rows
of a run share one, the first row's block computes them all, and the others end. Each row adds in one order, whatever
its company.

There are two kernels of few rows. Where K is large and N is small, a warp has rows of w of its own, as in gemv.py.
Where K is small and N is large, a few lanes have a row of w, and residual and scale are added as it is stored.

Many rows are multiplied by skinny.py of gemm_sm90, whose tiles are blocks of rows by slabs of the matrix of a run of
rows. Prompts are such runs. Nothing is sorted or gathered. Where K is small, spread_sm90.py does the same.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import row_pieces_sm90 as row_pieces
from pallas_kernels.hopper.gemm_sm90 import skinny
from pallas_kernels.hopper.gemm_sm90.gemv import LAYOUT
from pallas_kernels.hopper.gemm_sm90.gemv_config import CHUNK, VECTOR, WARPS
from pallas_kernels.hopper.gemm_sm90.skinny_config import Config
from pallas_kernels.hopper.gemm_sm90.skinny_plan import Blocks
from pallas_kernels.row_matmul.config import (
    ALIKE,
    LANES,
    MOST_ROWS,
    SHORT,
    Long,
    Short,
    columns_of,
    many_config,
    short_config,
    spreads,
)
from pallas_kernels.row_matmul.spread_sm90 import spread


def row_matmul(
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array | None,
    layer: jax.Array,
    group: jax.Array,
    residual: jax.Array | None,
    parts: tuple[int, ...],
    out_dtype: jnp.dtype,
    runs: int | None = None,
    config: Long | Short | Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
    gated: bool = False,
) -> jax.Array:
    """Returns [M, N] of x [M, P, K], w [L, X, N, K], scale [L, X, P] and residual [M, N]; see api.py. gated: SiLU of
    the first of two parts times the second, [M, N / 2], for arguments that config.spreads accepts."""
    if not x.shape[0]:  # of which no kernel can be launched
        return jnp.zeros((0, w.shape[2]), out_dtype)
    if isinstance(config, Config) or (config is None and x.shape[0] > MOST_ROWS):
        most = x.shape[0] if runs is None else min(runs, x.shape[0])
        return _many(x, w, scale, layer, group, residual, parts, jnp.dtype(out_dtype), most, config, interpret, gated)
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


def _many(x, w, scale, layer, group, residual, parts, out_dtype, runs, config, interpret, gated=False):
    (M, P, K), (L, X, N, _) = x.shape, w.shape
    columns = columns_of(parts, residual, out_dtype)
    sizes, own = _runs(group, runs)
    own = jnp.where((own >= 0) & (own < X), layer * X + own, -1)  # a slice of w by its layer would be copied
    wide = None if scale is None else scale.astype(jnp.float32).reshape(L * X, P)
    if gated or (config is None and spreads(M, parts, K, residual, out_dtype)):
        rows, more = x.astype(w.dtype).reshape(M, P * K), {"scale": wide, "residual": residual, "parts": parts}
        how = {"gated": gated, "out_dtype": out_dtype, "interpret": interpret}
        return spread(rows, w.reshape(L * X, N, K), sizes, own, **more, **how)
    config = many_config(M, runs, columns, K, out_dtype) if config is None else config
    out = skinny.gemm(
        x.astype(w.dtype).reshape(M, P * K),
        w.reshape(L * X * N, K),
        residual=None if residual is None else residual.astype(out_dtype),
        sizes=sizes,
        own=own,
        blocks=Blocks(L * X, N, columns),
        block_scale=wide,
        out_dtype=out_dtype,
        config=config,
        interpret=interpret,
    )
    return out[:, :N]


def _runs(group: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Returns the sizes i32[most] of the runs of neighbours in group i32[M] that are alike, and what each run has."""
    before = jnp.concatenate([group[:1], group[:-1]])
    run = jnp.cumsum(group != before, dtype=jnp.int32)
    sizes = jnp.zeros(most, jnp.int32).at[run].add(1, mode="drop")
    return sizes, jnp.full(most, -1, jnp.int32).at[run].set(group, mode="drop")


def _by_rows(
    w: Any, layer: Any, group: Any, multiply: Callable[[Any, list[jax.Array]], None], skip: Callable[[jax.Array], None]
) -> None:
    """Calls multiply(matrix, rows) for the rows that this block computes with one matrix, or skip(row) if its row has
    none."""
    row, total = lax.axis_index("row"), group.shape[0]
    own, first = group[row], row // ALIKE * ALIKE
    valid = (own >= 0) & (own < w.shape[1])
    matrix = w.at[layer[0], jnp.where(valid, own, 0)]
    alike = first + ALIKE <= total
    for i in range(ALIKE):
        alike = alike & (group[jnp.minimum(first + i, total - 1)] == own)
    pl.when(valid & alike & (row == first))(lambda: multiply(matrix, [row + i for i in range(ALIKE)]))
    pl.when(valid & jnp.logical_not(alike))(lambda: multiply(matrix, [row]))
    pl.when(jnp.logical_not(valid))(lambda: skip(row))


def _long(config: Long, x: Any, w: Any, layer: Any, group: Any, out: Any) -> None:
    columns = pl.ds(lax.axis_index("block") * config.rows, config.rows)
    shape, chunks = (config.rows, CHUNK, VECTOR), x.shape[2] // CHUNK

    def add(matrix: Any, rows: list[jax.Array], totals: list[jax.Array], first: Any, count: int) -> list[jax.Array]:
        places = [pl.ds((first + i) * CHUNK, CHUNK) for i in range(count)]
        weights = [_load(matrix.at[columns, place], LAYOUT) for place in places]
        for place, weight in zip(places, weights):
            values = [row_pieces.widen(_load(x.at[row, 0, place], LAYOUT.reduce((0,)))) for row in rows]
            spread = (plgpu.layout_cast(lax.broadcast_in_dim(each, shape, (1, 2)), LAYOUT) for each in values)
            totals = [total + row_pieces.widen(weight) * each for total, each in zip(totals, spread)]
        return totals

    def multiply(matrix: Any, rows: list[jax.Array]) -> None:
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT)
        whole, rest = divmod(chunks, config.ahead)
        step = lambda i, totals: add(matrix, rows, totals, i * config.ahead, config.ahead)  # noqa: E731
        totals = lax.fori_loop(0, whole, step, [zeros] * len(rows))
        if rest:
            totals = add(matrix, rows, totals, whole * config.ahead, rest)
        for row, total in zip(rows, totals):
            out.at[row, columns][...] = jnp.sum(jnp.sum(total, axis=2), axis=1).astype(out.dtype)

    def skip(row: jax.Array) -> None:
        nothing = plgpu.layout_cast(jnp.zeros((config.rows,), jnp.float32), LAYOUT.reduce((1, 2)))
        out.at[row, columns][...] = nothing.astype(out.dtype)

    _by_rows(w, layer, group, multiply, skip)


def _short(
    config: Short, parts: tuple[int, ...], names: tuple[str, ...], x: Any, w: Any, layer: Any, group: Any, *refs: Any
) -> None:
    *arrays, out = refs
    extra, layout = dict(zip(names, arrays, strict=True)), _row_layout(w.shape[3])
    first = lax.axis_index("block") * config.columns
    columns = pl.ds(first, config.columns)
    part = sum(jnp.where(first >= sum(parts[: i + 1]), 1, 0) for i in range(len(parts) - 1)) if parts[1:] else 0

    def store(row: jax.Array, total: jax.Array) -> None:
        if "residual" in extra:
            total = row_pieces.widen(_load(extra["residual"].at[row, columns], layout.reduce((1, 2)))) + total
        out.at[row, columns][...] = total.astype(out.dtype)

    def multiply(matrix: Any, rows: list[jax.Array]) -> None:
        weights = _load(matrix.at[columns], layout)
        for row in rows:
            values = row_pieces.widen(_load(x.at[row, part], layout.reduce((0,))))
            spread = plgpu.layout_cast(lax.broadcast_in_dim(values, weights.shape, (1, 2)), layout)
            total = jnp.sum(jnp.sum(row_pieces.widen(weights) * spread, axis=2), axis=1)
            if "scale" in extra:
                total = total * extra["scale"][layer[0], group[row], part]
            store(row, total)

    def skip(row: jax.Array) -> None:
        store(row, plgpu.layout_cast(jnp.zeros((config.columns,), jnp.float32), layout.reduce((1, 2))))

    _by_rows(w, layer, group, multiply, skip)


def _row_layout(vectors: int) -> Any:
    """Lays out w [columns, vectors, 8] in registers: a vector to a lane, and rows of w side by side in a warp."""
    rows = LANES // vectors
    tiling = ((WARPS * rows, vectors, VECTOR), (rows, vectors, VECTOR), (1, 1, VECTOR))
    layout = TiledLayout(plgpu.Tiling(tiling), (-9,), (-6, -5), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
