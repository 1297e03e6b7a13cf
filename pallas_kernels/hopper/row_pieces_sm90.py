"""Holds a row in registers with its reductions and its codes, for the Hopper kernels over whole rows.

A row of E values is split evenly among the warpgroups of a block. Each part is split into pieces of at most 1024
values: a vector of eight to a thread. What is left after the full pieces takes powers of two, which fewer threads hold
(the others hold copies). Arrays in memory are [.., E / 8, 8], so that a piece is a slice [n, 8].

Reductions go through shared memory once: a float32 for every eight values, then one barrier of all threads. Then every
warp reads all of them and reduces them in one and the same order.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats.quantized_rows import KINDS, LARGEST

WARPS, LANES = 4, 32
VECTOR = 8  # values of 16 bits that a thread loads at once
FULL = WARPS * LANES  # vectors in a full piece

COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    approx_math=True,  # exp and rsqrt are the special function unit's: good to 2^-21
    unsafe_no_auto_barriers=True,  # what a thread reads from shared memory it wrote itself, or a barrier precedes it
)


@dataclass(frozen=True)
class Piece:
    """Names vectors start .. start + size of a warpgroup's part of a row; size is a power of two."""

    start: int
    size: int


def pieces(vectors: int) -> tuple[Piece, ...]:
    """Cuts `vectors` into full pieces, then into powers of two."""
    cut, start = [], 0
    while start < vectors:
        size = min(FULL, 1 << ((vectors - start).bit_length() - 1))
        cut.append(Piece(start, size))
        start += size
    return tuple(cut)


@dataclass(frozen=True)
class Part:
    """Handles one warpgroup's share of a row: part `index` of equal ones, in pieces."""

    index: jax.Array
    cut: tuple[Piece, ...]

    @property
    def base(self) -> jax.Array:
        """Returns its first vector."""
        return self.index * (self.cut[-1].start + self.cut[-1].size)

    def load(self, ref: Any) -> list[jax.Array]:
        """Loads its pieces of a row [E / 8, 8] from memory, each [n, 8] in registers."""
        return [load_piece(ref, self.base + piece.start, piece.size) for piece in self.cut]

    def store(self, ref: Any, values: Sequence[jax.Array]) -> None:
        """Reverses `load`; also for one number a vector [n] and a row [E / 8]."""
        for piece, value in zip(self.cut, values, strict=True):
            ref[pl.ds(self.base + piece.start, piece.size)] = value

    def sum(self, values: Sequence[jax.Array], scratch: Any, barrier: Any) -> jax.Array:
        """Sums the whole row, from float32 pieces of all parts, by scratch f32[E / 8]."""
        self.store(scratch, [jnp.sum(value, axis=1) for value in values])
        everyone(barrier)
        return _take(scratch, jnp.sum, jnp.add)

    def norm(
        self, row: Sequence[jax.Array], gains: Sequence[jax.Array], eps: float, scratch: Any, barrier: Any
    ) -> list[jax.Array]:
        """Returns RMSNorm of the whole row, from pieces of the row and of the gains in 16 bits. The quotient by the
        root mean square is rounded, and so is its product with the gains. `scratch` is as in `sum`."""
        total = self.sum([jnp.square(widen(y)) for y in row], scratch, barrier)
        return _normed(row, gains, total * float(np.float32(1 / (scratch.shape[0] * VECTOR))), eps)

    def peak(self, values: Sequence[jax.Array], scratch: Any, barrier: Any) -> jax.Array:
        """Returns the largest magnitude of the whole row, float32, by scratch f32[parts * num_peaks(cut)]. Full pieces
        are first reduced to one, their maximum."""
        start = self.index * num_peaks(self.cut)
        for value in _fold_full([jnp.abs(value) for value in values]):
            scratch[pl.ds(start, len(value))] = jnp.max(value, axis=1).astype(jnp.float32)
            start += len(value)
        everyone(barrier)
        return _take(scratch, jnp.max, jnp.maximum)

    def store_scale(self, ref: Any, peak: jax.Array, kind: str) -> jax.Array:
        """Stores the row's scale, as quantize_rows defines it, at scalar `ref`; returns its reciprocal."""
        scale = scale_of(peak, kind)

        @pl.when(self.index == 0)
        def _() -> None:
            ref[...] = scale

        return 1.0 / scale


def load_piece(ref: Any, start: jax.Array | int, size: int) -> jax.Array:
    """Loads vectors start .. start + size of ref [.., 8] into registers."""
    return plgpu.load(ref.at[pl.ds(start, size)], layout=_piece_layout(size), optimized=False)


def num_peaks(cut: Sequence[Piece]) -> int:
    """Counts the values that Part.peak puts into scratch for each part."""
    sizes = [piece.size for piece in cut]
    return FULL * (FULL in sizes) + sum(size for size in sizes if size != FULL)


def widen(x: jax.Array) -> jax.Array:
    """Converts 16-bit values to float32."""
    return x.astype(jnp.float32)


def silu_mul(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns gate * sigmoid(gate) * up in float32. 1 / y is rsqrt(y)^2: two instructions, while a reciprocal that
    minds subnormal numbers takes seven."""
    root = jax.lax.rsqrt(1.0 + jnp.exp(-gate))
    return gate * (root * root) * up


def codes(x: jax.Array, inverse: jax.Array, kind: str) -> jax.Array:
    """Returns float32 x over its scale as int8 or float8_e4m3fn, as quantize_rows defines it; `inverse` is 1 / scale.
    The sum with 1.5 * 2^23 has no bits left for a fraction. So adding rounds, and its low bits are the integer. The
    clip keeps it from becoming one operation with the product, which would round once where XLA rounds twice."""
    scaled = jnp.minimum(jnp.maximum(x * inverse, -LARGEST[kind]), LARGEST[kind])
    if kind == "int8":
        return jax.lax.bitcast_convert_type(scaled + 1.5 * 2.0**23, jnp.int32).astype(jnp.int8)
    return scaled.astype(KINDS[kind])


def _normed(row: Sequence[jax.Array], gains: Sequence[jax.Array], mean: jax.Array, eps: float) -> list[jax.Array]:
    rstd = jax.lax.rsqrt(mean + float(np.float32(eps)))
    return [(widen(y) * rstd).astype(y.dtype) * gain for y, gain in zip(row, gains, strict=True)]


def scale_of(peak: jax.Array, kind: str) -> jax.Array:
    """Returns the scale of a row whose largest magnitude is `peak`, as quantize_rows defines it."""
    scaled = peak * float(np.float32(1 / LARGEST[kind]))
    return jnp.maximum(scaled, float(np.finfo(np.float32).smallest_normal))


def everyone(barrier: Any) -> None:
    """Waits until all warpgroups of the block came here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _take(scratch: Any, reduce: Callable[..., jax.Array], join: Callable[..., jax.Array]) -> jax.Array:
    """Reduces scratch f32[n] to a scalar that every thread gets: `reduce` is jnp.sum or jnp.max, `join` its binary
    operation."""
    found, start, size = [], 0, scratch.shape[0]
    while start < size:
        many = (size - start) // FULL * FULL or 1 << ((size - start).bit_length() - 1)
        values = plgpu.load(scratch.at[pl.ds(start, many)], layout=every_warp(many), optimized=False)
        found.append(reduce(values, axis=0))
        start += many
    return functools.reduce(join, found)


def _fold_full(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the maximum of all full pieces, and what else there is."""
    full = [value for value in values if len(value) == FULL]
    rest = [value for value in values if len(value) != FULL]
    return ([functools.reduce(jnp.maximum, full)] if full else []) + rest


def _piece_layout(size: int) -> Any:
    """Lays out registers [size, 8]: a vector to a thread; warps and lanes that are too many hold copies."""
    lanes = min(LANES, size)
    warps = size // lanes
    tiling = ((size, VECTOR), (lanes, VECTOR), (1, VECTOR))
    return tiled(tiling, (-6, plgpu.Replicated(WARPS // warps)), (-4, plgpu.Replicated(LANES // lanes)))


def every_warp(size: int) -> Any:
    """Lays out registers [size] of float32 in every warp, up to four in a row to a lane."""
    vector = min(4, size)
    lanes = min(LANES, size // vector)
    tiling = ((lanes * vector,), (vector,))
    return tiled(tiling, (plgpu.Replicated(WARPS),), (-2, plgpu.Replicated(LANES // lanes)))


def tiled(tiling: tuple[tuple[int, ...], ...], *distributed: tuple[Any, ...]) -> Any:
    warps, lanes = (tuple(dim for dim in dims if dim != plgpu.Replicated(1)) for dims in distributed)
    layout = TiledLayout(plgpu.Tiling(tiling), warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
