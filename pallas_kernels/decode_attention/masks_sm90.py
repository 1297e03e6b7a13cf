"""Masks keys for each column of decode_attention's matmuls: a column sees what its row of a short segment does. Where a
segment has one row, that is what its item has. A chain's columns differ in two bounds: that of the row's own key and
that of its window. A tree's see their ancestors instead. Only tiles with keys of the segment's own ask for them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention.config import ROWS
from pallas_kernels.decode_attention.shape_sm90 import MASKED, Item, Shape, Sum
from pallas_kernels.decode_attention.warp_layouts_sm90 import BY_WARP
from pallas_kernels.formats.segments import WORD

WGMMA = plgpu.Layout.WGMMA


class Bounds(NamedTuple):
    """Holds keys low <= j < high, for all columns or i32[ROWS, columns]."""

    low: jax.Array
    high: jax.Array


def bounds_of(shape: Shape, item: Item, trees_ref: Any) -> Bounds:
    """Returns what columns see of an item's keys, without a tree's own keys. columns_of_trees makes trees_ref."""
    if item.committed is None:
        return Bounds(item.low, item.high)
    if shape.words and shape.window is None:
        return Bounds(item.low, item.high)
    depth = _by_column(shape, trees_ref, item, 0) if shape.words else _row_of_column(shape)
    end = depth + (item.committed + 1)
    low = item.low if shape.window is None else jnp.maximum(end - shape.window, item.low)
    return Bounds(low, item.high if shape.words else jnp.minimum(end, item.high))


def visible(
    shape: Shape, item: Item, bounds: Bounds, trees_ref: Any, tokens: jax.Array, logits: jax.Array
) -> jax.Array:
    """Returns logits [ROWS, columns] of the tokens from `tokens` on, MASKED where a column does not see them."""
    token = plgpu.broadcasted_iota(jnp.int32, logits.shape, 0, layout=WGMMA) + tokens
    committed = item.committed

    def within_bounds() -> jax.Array:
        return jnp.where(jnp.logical_and(token >= bounds.low, token < bounds.high), logits, MASKED)

    if committed is None or not shape.words:
        return within_bounds()

    def ancestors_too() -> jax.Array:
        own = token - committed
        seen = jnp.logical_and(own < 0, token >= bounds.low)
        for i in range(shape.words):
            bit = own - i * WORD
            word = lax.shift_right_logical(_by_column(shape, trees_ref, item, 1 + i), jnp.clip(bit, 0, WORD - 1))
            in_word = jnp.logical_and(bit >= 0, bit < WORD)
            seen = jnp.logical_or(seen, jnp.logical_and(in_word, (word & 1) == 1))
        inside = jnp.logical_and(token >= item.low, token < item.high)
        return jnp.where(jnp.logical_and(seen, inside), logits, MASKED)

    return lax.cond(tokens + ROWS > committed, ancestors_too, within_bounds)


def without_unused(shape: Shape, item: Item, total: Sum) -> Sum:
    """Returns the sum such that columns of unused rows have zero results, whatever their queries hold."""
    if item.used is None:
        return total
    columns = item.used * shape.heads

    def select(x: jax.Array, layout: Any, other: float) -> jax.Array:
        column = plgpu.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1, layout=layout)
        return jnp.where(column < columns, x, other)

    each = BY_WARP if shape.by_warps else WGMMA.reduce(0)
    return Sum(select(total.top, each, MASKED), select(total.total, each, 1.0), select(total.acc, WGMMA, 0.0))


def _row_of_column(shape: Shape) -> jax.Array:
    column = plgpu.broadcasted_iota(jnp.int32, (ROWS, shape.columns), 1, layout=WGMMA)
    return column if shape.heads == 1 else lax.div(column, jnp.int32(shape.heads))


def _by_column(shape: Shape, trees_ref: Any, item: Item, number: int) -> jax.Array:
    """Returns one of the numbers of each column, in all rows: i32[ROWS, columns]."""
    numbers = plgpu.load(trees_ref.at[item.row, number], layout=WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(numbers, (ROWS, shape.columns), [1])
