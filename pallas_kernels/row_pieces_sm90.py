"""What the Hopper kernels over whole rows share: a row in registers, its reductions, and its codes.

A row of E values is split evenly among the warpgroups of a block, and each part into pieces of at most 1024 values: a
vector of eight to a thread. What is left after the full pieces takes powers of two, which fewer threads hold (the
others hold copies). Arrays in memory are [.., E / 8, 8], so that a piece is a slice [n, 8].

Reductions go through shared memory once: a float32 per vector, then one barrier of all threads, then every warp reads
the row's values and reduces them in one and the same order. So the sum of a row is the same bits in all configurations.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_rows import KINDS, LARGEST

WARPS, LANES = 4, 32
VECTOR = 8  # values of 16 bits that a thread loads at once
FULL = WARPS * LANES  # vectors in a full piece

COMPILER_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    approx_math=True,  # exp and rsqrt are the special function unit's: within 2^-21 of the exact ones
    unsafe_no_auto_barriers=True,  # kernels order their few accesses to shared memory themselves
)


@dataclass(frozen=True)
class Piece:
    """Vectors start .. start + size of a warpgroup's part of a row; size is a power of two."""

    start: int
    size: int


def pieces(vectors: int) -> tuple[Piece, ...]:
    """`vectors` in full pieces, then in powers of two."""
    cut, start = [], 0
    while start < vectors:
        size = min(FULL, 1 << ((vectors - start).bit_length() - 1))
        cut.append(Piece(start, size))
        start += size
    return tuple(cut)


@dataclass(frozen=True)
class Block:
    """What one warpgroup handles: part `part` of each of `count` rows of T, from row `first` on.

    A block may reach past the last row: it loads that one again, and stores nothing for it.
    """

    rows: int  # T
    first: jax.Array
    count: int
    part: jax.Array
    cut: tuple[Piece, ...]

    @property
    def base(self) -> jax.Array:
        """The part's first vector in a row."""
        return self.part * (self.cut[-1].start + self.cut[-1].size)

    def load(self, ref: Any) -> list[list[jax.Array]]:
        """This warpgroup's pieces, each [n, 8] in registers, of every row of [T, E / 8, 8] in memory."""
        return [self.load_row(ref.at[jnp.minimum(self.first + i, self.rows - 1)]) for i in range(self.count)]

    def load_row(self, ref: Any) -> list[jax.Array]:
        """The same of one row [E / 8, 8]."""
        return [
            plgpu.load(ref.at[pl.ds(self.base + p.start, p.size)], layout=_piece_layout(p.size), optimized=False)
            for p in self.cut
        ]

    def store(self, ref: Any, values: Sequence[Sequence[jax.Array]]) -> None:
        """`load`'s inverse."""
        for i, row in enumerate(values):
            self._store_row(i, partial(self._put, ref.at[self.first + i], row))

    def sums(self, values: Sequence[Sequence[jax.Array]], scratch: Any, barrier: Any) -> list[jax.Array]:
        """The sum of each row, from float32 pieces, by scratch f32[count, E / 8]: each vector's sum at its place."""
        for i, row in enumerate(values):
            self._put(scratch.at[i], [jnp.sum(piece, axis=1) for piece in row])
        _everyone(barrier)
        return [_take(scratch.at[i], scratch.shape[1], jnp.sum, jnp.add) for i in range(self.count)]

    def peaks(self, values: Sequence[Sequence[jax.Array]], scratch: Any, barrier: Any) -> list[jax.Array]:
        """The largest magnitude of each row, float32, by scratch f32[count, parts * num_peaks(cut)]."""
        for i, row in enumerate(values):
            start = self.part * num_peaks(self.cut)
            for peak in _fold_full([jnp.abs(piece) for piece in row]):
                scratch[i, pl.ds(start, len(peak))] = jnp.max(peak, axis=1).astype(jnp.float32)
                start += len(peak)
        _everyone(barrier)
        return [_take(scratch.at[i], scratch.shape[1], jnp.max, jnp.maximum) for i in range(self.count)]

    def quantize(
        self, values: Any, scales: Any, results: Sequence[Sequence[jax.Array]], kind: str, scratch: Any, barrier: Any
    ) -> None:
        """Stores `results` as quantize_rows has it: values [T, E / 8, 8] and scales [T] in memory."""
        for i, (row, peak) in enumerate(zip(results, self.peaks(results, scratch, barrier))):
            self._store_row(
                i, partial(self._quantize_row, values, scales, self.first + i, row, _scale(peak, kind), kind)
            )

    def _quantize_row(
        self, values: Any, scales: Any, at: jax.Array, row: Sequence[jax.Array], scale: jax.Array, kind: str
    ) -> None:
        inverse = 1.0 / scale
        self._put(values.at[at], [_codes(piece, inverse, kind) for piece in row])

        @pl.when(self.part == 0)
        def _() -> None:
            scales[at] = scale

    def _store_row(self, i: int, save: Callable[[], None]) -> None:
        if self.rows % self.count:
            pl.when(self.first + i < self.rows)(save)
        else:
            save()

    def _put(self, ref: Any, row: Sequence[jax.Array]) -> None:
        for piece, value in zip(self.cut, row):
            ref[pl.ds(self.base + piece.start, piece.size)] = value


def widen(x: jax.Array) -> jax.Array:
    """float32 of 16-bit values."""
    return x.astype(jnp.float32)


def num_peaks(cut: Sequence[Piece]) -> int:
    """How many values Block.peaks puts into scratch for each part."""
    sizes = [piece.size for piece in cut]
    return FULL * (FULL in sizes) + sum(size for size in sizes if size != FULL)


def _take(scratch: Any, size: int, reduce: Callable[..., jax.Array], join: Callable[..., jax.Array]) -> jax.Array:
    """The reduction of scratch f32[size] to a scalar that every thread gets: `reduce` is jnp.sum or jnp.max, `join`
    its binary operation."""
    found, start = [], 0
    while start < size:
        many = (size - start) // FULL * FULL or 1 << ((size - start).bit_length() - 1)
        values = plgpu.load(scratch.at[pl.ds(start, many)], layout=_scratch_layout(many), optimized=False)
        found.append(reduce(values, axis=0))
        start += many
    return functools.reduce(join, found)


def _everyone(barrier: Any) -> None:
    """Waits until all warpgroups of the block came here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _scale(peak: jax.Array, kind: str) -> jax.Array:
    """The scale of a row by its largest magnitude, as quantize_rows defines it."""
    scaled = peak * float(np.float32(1 / LARGEST[kind]))
    return jnp.maximum(scaled, float(np.finfo(np.float32).smallest_normal))


def _codes(x: jax.Array, inverse: jax.Array, kind: str) -> jax.Array:
    """x over its scale as int8 or float8_e4m3fn, as quantize_rows defines it; `inverse` is 1 / scale.

    The sum with 1.5 * 2^23 has no bits left for a fraction, so that adding rounds, and its low bits are the integer.
    """
    scaled = jnp.minimum(jnp.maximum(widen(x) * inverse, -LARGEST[kind]), LARGEST[kind])
    if kind == "int8":
        return jax.lax.bitcast_convert_type(scaled + 1.5 * 2.0**23, jnp.int32).astype(jnp.int8)
    return scaled.astype(KINDS[kind])


def _fold_full(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The maximum of all full pieces, and what else there is."""
    full = [value for value in values if len(value) == FULL]
    rest = [value for value in values if len(value) != FULL]
    return ([functools.reduce(jnp.maximum, full)] if full else []) + rest


def _piece_layout(size: int) -> Any:
    """Registers [size, 8]: a vector to a thread; warps and lanes that are too many hold copies."""
    lanes = min(LANES, size)
    warps = size // lanes
    tiling = ((size, VECTOR), (lanes, VECTOR), (1, VECTOR))
    return _tiled(tiling, (-6, plgpu.Replicated(WARPS // warps)), (-4, plgpu.Replicated(LANES // lanes)))


def _scratch_layout(size: int) -> Any:
    """Registers [size] of float32 in every warp, up to four in a row to a lane."""
    vector = min(4, size)
    lanes = min(LANES, size // vector)
    tiling = ((lanes * vector,), (vector,))
    return _tiled(tiling, (plgpu.Replicated(WARPS),), (-2, plgpu.Replicated(LANES // lanes)))


def _tiled(tiling: tuple[tuple[int, ...], ...], *distributed: tuple[Any, ...]) -> Any:
    warps, lanes = (tuple(dim for dim in dims if dim != plgpu.Replicated(1)) for dims in distributed)
    layout = TiledLayout(plgpu.Tiling(tiling), warps, lanes, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)
