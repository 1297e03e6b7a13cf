"""Reads one row of logits as the block does: in chunks from memory, or held in registers for many passes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sample.block_sm90 import PIECE_LAYOUT
from pallas_kernels.sample.config import PIECE, THREADS, VECTOR, Config

Pieces = list[jax.Array]  # f32[128, 4] each
INFINITY, LARGEST = float("inf"), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Row:
    """Holds a row of V logits in memory, and what a warpgroup reads of it. The last chunk ends with the row. What it
    shares with the one before is masked where it must not count twice."""

    ref: Any  # f32[V / 4, 4]
    warpgroup: jax.Array
    vocabulary: int  # V, padding included
    size: int  # logits before the padding, which is -inf
    config: Config

    @property
    def chunks(self) -> int:
        return -(-self.vocabulary // self.config.chunk)

    def start(self, chunk: Any) -> jax.Array:
        """Returns the first token of a chunk as it is read."""
        return jnp.minimum(chunk * self.config.chunk, self.vocabulary - self.config.chunk).astype(jnp.int32)

    def offset(self) -> jax.Array:
        """Returns i32[128, 4]: where in a chunk the first piece of this warpgroup is; others follow at PIECE."""
        down, across = (plgpu.broadcasted_iota(jnp.int32, (THREADS, VECTOR), i, layout=PIECE_LAYOUT) for i in (0, 1))
        return down * VECTOR + across + self.warpgroup * (self.config.pieces * PIECE)

    def raw(self, chunk: Any) -> Pieces:
        """Returns a chunk's logits as they are."""
        first = self.start(chunk) // VECTOR + self.warpgroup * (self.config.pieces * THREADS)
        return [
            plgpu.load(self.ref.at[pl.ds(first + i * THREADS, THREADS)], layout=PIECE_LAYOUT, optimized=False)
            for i in range(self.config.pieces)
        ]

    def given(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """Loads logits of these ids, zeros for the padding."""
        return x if self.size == self.vocabulary else jnp.where(ids < self.size, x, 0.0)

    def own(self, chunk: Any, raw: Pieces) -> Pieces:
        """Returns clean logits of a chunk. What the chunk before has too is -inf, and so is all that is past the last
        one."""
        values = [clean(x) for x in raw]
        if self.vocabulary % (self.config.chunk * self.config.parts(self.vocabulary)[1]) == 0:
            return values  # parts end with the row
        shared, offset = chunk * self.config.chunk - self.start(chunk), self.offset()
        return [jnp.where(offset + i * PIECE >= shared, x, -INFINITY) for i, x in enumerate(values)]

    def fold(
        self, step: Callable[[Any, Pieces, Any], Any], carry: Any, first: Any = 0, count: int | None = None
    ) -> Any:
        """Folds step(chunk, raw, carry) over `count` chunks (None: all) in order, each loaded while the one before is
        in work. A chunk past the row's last reads the same as that one."""
        first = jnp.int32(first)
        last = first + ((self.chunks if count is None else count) - 1)

        def body(chunk: jax.Array, state: tuple[Pieces, Any]) -> tuple[Pieces, Any]:
            raw, carry = state
            return self.raw(chunk + 1), step(chunk, raw, carry)

        raw, carry = lax.fori_loop(first, last, body, (self.raw(first), carry))
        return step(last, raw, carry)


def clean(x: jax.Array) -> jax.Array:
    """Returns NaN as -inf, and +inf as the largest number."""
    return jnp.where(jnp.abs(x) < INFINITY, x, jnp.where(x > 0, LARGEST, -INFINITY))


def zeros() -> jax.Array:
    return full(0.0)


def full(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((THREADS, VECTOR), value, jnp.float32), PIECE_LAYOUT)


@dataclass(frozen=True)
class Weights:
    """Holds probabilities in units of the row's largest."""

    top: jax.Array
    scale: jax.Array  # log2(e) / temperature

    def of(self, x: jax.Array) -> jax.Array:
        return jnp.exp2(self.scaled(x))

    def scaled(self, x: jax.Array) -> jax.Array:
        """Returns their logarithms to base 2."""
        return (x - self.top) * self.scale


class Streamed:
    """Sums over a row that each pass reads again. Memory bounds a pass, so it takes three pivots at once."""

    pivots = 3

    def __init__(self, row: Row, weights: Weights):
        self.row, self.weights = row, weights

    def counts(self, lowest: Sequence[jax.Array]) -> Pieces:
        """Returns a piece for each of `lowest`. It adds up to the number of logits that reach it."""
        return self._add(lowest, lambda x: 1.0)

    def prepare(self) -> None:
        """Prepares the weights that masses() reads. Call it first."""

    def masses(self, lowest: Sequence[jax.Array]) -> Pieces:
        """Returns a piece for each of `lowest`. It adds up to the weights of the logits that reach it."""
        return self._add(lowest, self.weights.of)

    def _add(self, lowest: Sequence[jax.Array], weigh: Callable[[jax.Array], Any]) -> Pieces:
        def step(chunk: Any, raw: Pieces, sums: Pieces) -> Pieces:
            for x in self.row.own(chunk, raw):
                weight = weigh(x)
                sums = [s + jnp.where(x >= bound, weight, 0.0) for s, bound in zip(sums, lowest)]
            return sums

        return self.row.fold(step, [zeros() for _ in lowest])


class Held:
    """Sums over a row whose logits are in registers, and their weights in shared memory. Each thread reads there what
    it wrote."""

    pivots = 1

    def __init__(self, row: Row, weights: Weights, ref: Any):
        self.weights, self.ref = weights, ref
        self.values = [x for chunk in range(row.chunks) for x in row.own(chunk, row.raw(chunk))]
        self.first = row.warpgroup * len(self.values)

    def counts(self, lowest: Sequence[jax.Array]) -> Pieces:
        return self._add(lowest, lambda i: 1.0)

    def prepare(self) -> None:
        for i, x in enumerate(self.values):
            self.ref[self.first + i] = self.weights.of(x)

    def masses(self, lowest: Sequence[jax.Array]) -> Pieces:
        return self._add(
            lowest, lambda i: plgpu.load(self.ref.at[self.first + i], layout=PIECE_LAYOUT, optimized=False)
        )

    def _add(self, lowest: Sequence[jax.Array], weigh: Callable[[int], Any]) -> Pieces:
        sums = [zeros() for _ in lowest]
        for i, x in enumerate(self.values):
            weight = weigh(i)
            sums = [s + jnp.where(x >= bound, weight, 0.0) for s, bound in zip(sums, lowest)]
        return sums
