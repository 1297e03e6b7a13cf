"""Multiplies each row by two matrices of its own on Hopper, in Pallas Mosaic GPU: b (a x) of a low-rank adapter.

A CTA has a row, one of its parts, and a share of that part's columns. All of the part's a, then the share of its b
stream through rings in shared memory. b is on its way while a is multiplied. So one launch reads both, and what lies
between them never leaves the CTA. CTAs of one part all read its a, the later ones from the second-level cache. With
`gated` a CTA has the same columns of two parts, gate and up, and stores SiLU(gate) * up.

A warpgroup multiplies every chunk of a that is its turn, and the warpgroups' sums are added in one order. Nothing
depends on other rows.
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
from pallas_kernels.hopper.gemm_sm90.gemv_config import VECTOR, WARPS
from pallas_kernels.hopper.ring_sm90 import drain, free_slot, slot_of
from pallas_kernels.row_matmul.config import LANES, LOW_RANK_CHUNK, LowRank, low_rank_config

INSIDE = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # a run of bytes is copied as one, and not cut into rows


def low_rank(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array | None,
    layer: jax.Array,
    group: jax.Array,
    residual: jax.Array | None,
    parts: tuple[int, ...],
    out_dtype: jnp.dtype,
    config: LowRank | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
    gated: bool = False,
) -> jax.Array:
    """Returns [M, N] of x [M, K], a [L, X, P r, K], b [L, X, N, r], scale [L, X, P] and residual [M, N]; see api.py.
    gated: [M, N / 2] of two parts and a residual."""
    config = low_rank_config(x.shape[0], parts, x.shape[1], b.shape[3], gated) if config is None else config
    assert config is not None, "config.fits_low_rank was asked"
    wide = None if scale is None else scale.astype(jnp.float32)
    return _call(x, a, b, wide, layer[None], group, residual, parts, jnp.dtype(out_dtype), config, interpret, gated)


@partial(jax.jit, static_argnames=("parts", "out_dtype", "config", "interpret", "gated"))
def _call(x, a, b, scale, layer, group, residual, parts, out_dtype, config, interpret, gated):
    (M, K), (_, X, N, r) = x.shape, b.shape
    pieces = 2 if gated else 1
    given = {name: array for name, array in (("scale", scale), ("residual", residual)) if array is not None}
    kernel = plgpu.kernel(
        partial(_kernel, config, X, parts, pieces, tuple(given)),
        out_type=jax.ShapeDtypeStruct((M, N // pieces), out_dtype),
        scratch_types={
            "x_s": plgpu.SMEM((K,), x.dtype),
            "a_s": plgpu.SMEM((config.a_stages, config.rows, LOW_RANK_CHUNK), a.dtype),
            "b_s": plgpu.SMEM((config.b_stages, config.columns, r), b.dtype),
            "low_s": plgpu.SMEM((config.warpgroups, pieces * r), jnp.float32),
            "x_full": plgpu.Barrier(),
            "low_full": plgpu.Barrier(num_arrivals=config.warpgroups),
            **{f"{name}_full": plgpu.Barrier(num_barriers=n) for name, n in config.stages.items()},
            **{f"{name}_free": plgpu.Barrier(num_barriers=n) for name, n in config.stages.items()},
        },
        grid=(len(parts) // pieces * config.splits, M),
        grid_names=("share", "row"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=row_pieces.COMPILER_PARAMS,
        interpret=interpret,
        kernel_name="low_rank_gated" if gated else "low_rank",
    )
    return kernel(x, a.reshape(-1, K), b.reshape(-1, r), layer, group, *given.values())


def _kernel(
    config: LowRank, X: int, parts: tuple[int, ...], pieces: int, names: tuple[str, ...], x: Any, a: Any, b: Any,
    layer: Any, group: Any, *refs: Any, x_s: Any, a_s: Any, b_s: Any, low_s: Any, x_full: Any, low_full: Any,
    a_full: Any, a_free: Any, b_full: Any, b_free: Any,
) -> None:  # fmt: skip
    *arrays, out = refs
    extra, r = dict(zip(names, arrays, strict=True)), b.shape[1]
    row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    part, split = lax.div(lax.axis_index("share"), config.splits), lax.rem(lax.axis_index("share"), config.splits)
    tiles = _of_part(part, [size // config.columns for size in parts])
    first, last = (lax.div(tiles * (split + i), config.splits) for i in range(2))
    begin = _of_part(part, [sum(parts[:i]) for i in range(len(parts))]) + first * config.columns
    own, count = group[row], last - first
    valid = (own >= 0) & (own < X)
    matrix = layer[0] * X + jnp.where(valid, own, 0)
    blocks, chunks = pieces * r // config.rows, x.shape[1] // LOW_RANK_CHUNK
    assert not config.a_stages % (blocks * config.warpgroups), "a warpgroup meets the same slots again"
    assert not config.b_stages % (pieces * config.warpgroups), "a warpgroup meets the same slots again"

    def columns(tile: Any, piece: Any = 0) -> Any:
        return pl.ds(begin + piece * parts[0] + tile * config.columns, config.columns)

    def copy_a() -> None:
        plgpu.copy_gmem_to_smem(x.at[row], x_s, x_full, oob_mode=INSIDE)
        top = (matrix * len(parts) + part) * r

        @pl.loop(0, chunks * blocks)
        def _(n: jax.Array) -> None:
            slot, chunk = free_slot(n, a_free), lax.div(n, blocks)
            at = pl.ds(top + (n - chunk * blocks) * config.rows, config.rows)
            source = a.at[at, pl.ds(chunk * LOW_RANK_CHUNK, LOW_RANK_CHUNK)]
            plgpu.copy_gmem_to_smem(source, a_s.at[slot], a_full.at[slot])

        drain(jnp.int32(chunks * blocks), a_free)

    def copy_b() -> None:
        top = matrix * sum(parts)

        @pl.loop(0, count * pieces)
        def _(n: jax.Array) -> None:
            slot, tile = free_slot(n, b_free), lax.div(n, pieces)
            source = b.at[pl.ds(top + columns(tile, n - tile * pieces).start, config.columns)]
            plgpu.copy_gmem_to_smem(source, b_s.at[slot], b_full.at[slot], oob_mode=INSIDE)

        drain(count * pieces, b_free)

    def multiply_a() -> None:
        """Puts this warpgroup's sums of a x into low_s."""
        shape = config.rows, LOW_RANK_CHUNK
        plgpu.barrier_wait(x_full)

        def add(i: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
            chunk, found = i * config.warpgroups + warpgroup, []
            place = pl.ds(chunk * LOW_RANK_CHUNK, LOW_RANK_CHUNK)
            values = row_pieces.widen(_load(x_s.at[place], A_LAYOUT.reduce((0,))))
            spread = plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (1,)), A_LAYOUT)
            for block, total in enumerate(sums):
                slot = slot_of(chunk * blocks + block, config.a_stages)
                plgpu.barrier_wait(a_full.at[slot])
                weights = _load(a_s.at[slot], A_LAYOUT)
                plgpu.barrier_arrive(a_free.at[slot])
                found.append(total + row_pieces.widen(weights) * spread)
            return found

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), A_LAYOUT)
        sums = lax.fori_loop(0, _turns(jnp.int32(chunks), warpgroup, config.warpgroups), add, [zeros] * blocks)
        for block, total in enumerate(sums):
            low_s[warpgroup, pl.ds(block * config.rows, config.rows)] = jnp.sum(total, axis=1)

    def residual(tile: Any, piece: int) -> jax.Array:
        return _load(extra["residual"].at[row, columns(tile, piece)], _row_layout(r).reduce((1,)))

    def store(tile: Any, totals: list[jax.Array]) -> None:
        total = row_pieces.silu_mul(*totals) if pieces == 2 else totals[0]
        out.at[row, columns(tile)][...] = total.astype(out.dtype)

    def multiply_b() -> None:
        layout, spread = _row_layout(r), []
        for piece in range(pieces):
            at = pl.ds(piece * r, r)
            sums = [_load(low_s.at[i, at], layout.reduce((0,))) for i in range(config.warpgroups)]
            low = lax.broadcast_in_dim(sum(sums[1:], sums[0]), (config.columns, r), (1,))
            spread.append(plgpu.layout_cast(low, layout))
        scales = [extra["scale"][layer[0], own, part + i] for i in range(pieces)] if "scale" in extra else None

        @pl.loop(0, _turns(count, warpgroup, config.warpgroups))
        def _(i: jax.Array) -> None:
            tile, totals, added = i * config.warpgroups + warpgroup, [], None
            if "residual" in extra:  # on its way while this waits for b
                added = [residual(tile, piece) for piece in range(pieces)]
            for piece in range(pieces):
                slot = slot_of(tile * pieces + piece, config.b_stages)
                plgpu.barrier_wait(b_full.at[slot])
                weights = _load(b_s.at[slot], layout)
                plgpu.barrier_arrive(b_free.at[slot])
                total = jnp.sum(row_pieces.widen(weights) * spread[piece], axis=1)
                total = total if scales is None else total * scales[piece]
                totals.append(total if added is None else row_pieces.widen(added[piece]) + total)
            store(tile, totals)

    def skip() -> None:
        zeros = plgpu.layout_cast(jnp.zeros((config.columns,), jnp.float32), _row_layout(r).reduce((1,)))

        @pl.loop(0, _turns(count, warpgroup, config.warpgroups))
        def _(i: jax.Array) -> None:
            tile = i * config.warpgroups + warpgroup
            kept = [row_pieces.widen(residual(tile, j)) if "residual" in extra else zeros for j in range(pieces)]
            store(tile, kept)

    @pl.when(valid & (warpgroup < config.warpgroups))
    def _() -> None:
        multiply_a()
        row_pieces.everyone(low_full)
        multiply_b()

    @pl.when(valid & (warpgroup == config.warpgroups))
    def _() -> None:
        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            pl.when(warp == 0)(copy_a)
            pl.when(warp == 1)(copy_b)

    pl.when(jnp.logical_not(valid) & (warpgroup < config.warpgroups))(skip)


def _of_part(part: Any, values: list[int]) -> Any:
    """Returns the value of a part."""
    found = jnp.int32(values[-1])
    for i, value in enumerate(values[:-1]):
        found = jnp.where(part == i, value, found)
    return found


def _turns(count: jax.Array, warpgroup: jax.Array, warpgroups: int) -> jax.Array:
    """Counts a warpgroup's turns at `count` things, of which each has every n-th."""
    return lax.div(count - warpgroup + (warpgroups - 1), jnp.int32(warpgroups))


def _layout(*tiling: tuple[int, ...], warps: int, lanes: tuple[int, ...]) -> Any:
    layout = TiledLayout(plgpu.Tiling(tiling), (warps,), lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


# Of a [rows, columns]: a warp has every fourth row, a lane a vector of each chunk.
A_LAYOUT = _layout((WARPS, LANES * VECTOR), (1, VECTOR), warps=-4, lanes=(-3,))


def _row_layout(r: int) -> Any:
    """Lays out b [columns, r]: a vector to a lane, and rows of b side by side in a warp."""
    rows = LANES * VECTOR // r
    return _layout((WARPS * rows, r), (rows, r), (1, VECTOR), warps=-6, lanes=(-4, -3))


def _load(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
