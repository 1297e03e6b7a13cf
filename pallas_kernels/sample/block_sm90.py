"""Reduces over the warpgroups of a block: sums and maxima that all of them get, and bisection by these.

A reduction goes through shared memory once: each thread leaves one number, then there is one barrier of the block. Then
every warp reads all numbers and reduces them in one and the same order. Successive reductions use different areas, so
that no second barrier is needed. Who comes to an area again has passed the barrier of the one between.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.fragmented_array import TiledLayout
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sample.config import THREADS, VECTOR

LANES = 32
NUMBERS = 3  # that are reduced at once


class Area(enum.IntEnum):
    """Names areas for reductions. Loops take the first two in turn. Loops come one after another only with a single
    reduction between them."""

    LOOP, OTHER, TOP, TOKEN, MASS, PROOF = range(6)


def _tiled(tiling: tuple[tuple[int, ...], ...], warp: Any, lane: Any) -> Any:
    layout = TiledLayout(plgpu.Tiling(tiling), (warp,), (lane,), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


PIECE_LAYOUT = _tiled(((THREADS, VECTOR), (LANES, VECTOR), (1, VECTOR)), -6, -4)  # [128, 4]: a vector to a thread
ALL_LAYOUT = _tiled(
    ((LANES * VECTOR,), (VECTOR,)), plgpu.Replicated(THREADS // LANES), -2
)  # [n]: the same in all warps


@dataclass(frozen=True)
class Block:
    """Gives one warpgroup's view of the block."""

    warpgroup: jax.Array
    scratch: Any  # f32[areas, NUMBERS, 128 * warpgroups]
    barrier: Any

    def sums(self, pieces: Sequence[jax.Array], area: Any) -> list[jax.Array]:
        """Returns the sum over all warpgroups of each f32[128, 4]."""
        return self._reduce([(piece, jnp.sum) for piece in pieces], area)

    def extremes(self, largest: Sequence[jax.Array], smallest: Sequence[jax.Array], area: Any) -> list[jax.Array]:
        """Returns the maxima, then the minima, of pieces f32[128, 4] over all warpgroups."""
        return self._reduce([(x, jnp.max) for x in largest] + [(x, jnp.min) for x in smallest], area)

    def _reduce(self, pairs: Sequence[tuple[jax.Array, Callable[..., jax.Array]]], area: Any) -> list[jax.Array]:
        mine = pl.ds(self.warpgroup * THREADS, THREADS)
        for i, (piece, reduce) in enumerate(pairs):
            self.scratch[area, i, mine] = reduce(piece, axis=1)
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)
        found = []
        for i, (_, reduce) in enumerate(pairs):
            everyone = plgpu.load(self.scratch.at[area, i], layout=ALL_LAYOUT, optimized=False)
            found.append(reduce(everyone, axis=0))
        return found


def scratch(warpgroups: int) -> list[Any]:
    """Returns Block's scratch and barrier."""
    return [
        plgpu.SMEM((len(Area), NUMBERS, THREADS * warpgroups), jnp.float32),
        plgpu.Barrier(num_arrivals=warpgroups),
    ]


State = tuple[jax.Array, jax.Array, jax.Array]  # which area is next, low, high
Probe = Callable[[Sequence[jax.Array], Any], tuple[Sequence[jax.Array], Sequence[jax.Array] | None]]


def last(probe: Probe, low: jax.Array, high: jax.Array, pivots: int) -> jax.Array:
    """Returns the last i32 of low .. high - 1 at which something holds. It holds at `low`, and never again once it
    doesn't. probe(numbers, area) tells for each of 1 or 3 numbers, in ascending order, whether it holds. For each it
    also tells whether the search may end there, or None. It reduces once, in that area; the first is Area.LOOP."""

    def more(state: State) -> jax.Array:
        _, low, high = state
        return low + 1 < high

    def narrow(state: State) -> State:
        turn, low, high = state
        middle = _middle(low, high)
        at = [middle] if pivots == 1 else [_middle(low, middle), middle, _middle(middle, high)]
        holds, ends = probe(at, Area.LOOP + turn)
        for i, held in zip(at, holds):
            low = jnp.where(held, i, low)
        for i, held in zip(at[::-1], holds[::-1]):
            high = jnp.where(held, high, i)
        for i, end in zip(at, ends or ()):
            low, high = jnp.where(end, i, low), jnp.where(end, i + 1, high)
        return 1 - turn, low, high

    return lax.while_loop(more, narrow, (jnp.int32(0), low, high))[1]


def _middle(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the middle, rounded down, of numbers whose difference may be too large."""
    return (a & b) + lax.shift_right_arithmetic(a ^ b, jnp.int32(1))


def image(x: jax.Array) -> jax.Array:
    """Maps a float32 scalar that is not NaN to an i32 of the same order; its own inverse except for the types."""
    return _flip(lax.bitcast_convert_type(x, jnp.int32))


def number(image: jax.Array) -> jax.Array:
    """Returns the float32 of an image."""
    return lax.bitcast_convert_type(_flip(image), jnp.float32)


def _flip(bits: jax.Array) -> jax.Array:
    return bits ^ (lax.shift_right_arithmetic(bits, jnp.int32(31)) & jnp.int32(0x7FFFFFFF))
