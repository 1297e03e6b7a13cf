"""Keeps the largest logits of a row's parts, in place of the row, where a search passes over a row many times.

A slot is a token's position modulo 512: one element of a thread's vector. For each of 512 slots a part's block keeps
the largest few logits in descending order. They are in registers, without a word between threads. What it drops, it
drops for good, but it remembers the largest number dropped. A threshold above the largest that any part dropped is thus
proven: every logit that reaches it was kept. So counts and masses over what was kept are those of the row. Where no
such threshold will do, the caller searches the row itself. Both follow from the row alone, never from the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sample.block_sm90 import PIECE_LAYOUT
from pallas_kernels.sample.row_sm90 import INFINITY, Held, Pieces, Row, Weights, full, zeros


def keep(row: Row, first: Any, chunks: int, each: int) -> tuple[Pieces, jax.Array]:
    """Returns the largest `each` logits f32[128, 4] of every slot of a part, and for each slot the largest dropped one.
    They are in descending order, -inf where a slot has fewer."""

    def step(chunk: Any, raw: Pieces, carry: tuple[Pieces, jax.Array]) -> tuple[Pieces, jax.Array]:
        kept, dropped = carry
        for x in row.own(chunk, raw):
            kept, x = insert(kept, x)
            dropped = jnp.maximum(dropped, x)
        return kept, dropped

    return row.fold(step, ([full(-INFINITY) for _ in range(each)], full(-INFINITY)), first, chunks)


def insert(kept: Sequence[jax.Array], x: jax.Array) -> tuple[Pieces, jax.Array]:
    """Returns descending pieces with x among them, and what no longer fits."""
    found = []
    for y in kept:
        found.append(jnp.maximum(x, y))
        x = jnp.minimum(x, y)
    return found, x


def mass(row: Row, first: Any, chunks: int, weigh: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns a piece that adds up to the weights of a part."""

    def step(chunk: Any, raw: Pieces, total: jax.Array) -> jax.Array:
        for x in row.own(chunk, raw):
            total = total + weigh(x)
        return total

    return row.fold(step, zeros(), first, chunks)


class Kept(Held):
    """Searches, as Held does, what a row's parts have kept: f32[parts, each, 128, 4] in memory. Each warpgroup takes
    its share of every part."""

    def __init__(self, kept: Any, warpgroup: jax.Array, warpgroups: int, weights: Weights, ref: Any):
        parts, each = kept.shape[:2]
        share = each // warpgroups
        self.weights, self.ref = weights, ref
        self.values = [
            plgpu.load(kept.at[part, warpgroup * share + i], layout=PIECE_LAYOUT, optimized=False)
            for part in range(parts)
            for i in range(share)
        ]
        self.first = warpgroup * len(self.values)
