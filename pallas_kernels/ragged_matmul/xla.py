"""Runs ragged_matmul in plain jnp: rows in tiles of one group each, one tile after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.formats.numerics import compute_dtype
from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.quantized_weights import QuantizedWeight, decode, take_block
from pallas_kernels.one_order import ROWS, in_tiles
from pallas_kernels.scaled_matmul.xla import grouped_matmul, scaled_matmul

Inputs = jax.Array | QuantizedRows
Weights = jax.Array | QuantizedWeight


class Tiles(NamedTuple):
    """Cuts M rows, sorted by group, into G tiles of one group each. A tile that is not used has no rows."""

    group: jax.Array  # i32[G]
    rows: jax.Array  # i32[G, ROWS], M where the tile has no more


def cut(sizes: jax.Array, rows: int) -> Tiles:
    """Returns the tiles of M rows in groups of sizes i32[X]. All row counts of a group make the same tiles but for the
    last one."""
    groups = sizes.shape[0]
    most = (rows + (ROWS - 1) * min(groups, rows)) // ROWS
    count = -(-sizes // ROWS)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    tile = jnp.arange(most, dtype=jnp.int32)
    # Compares all: a search is a loop, whose steps are kernels of their own.
    group = jnp.searchsorted(ends, tile, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, groups - 1)
    place = (tile - (ends - count)[group])[:, None] * ROWS + jnp.arange(ROWS, dtype=jnp.int32)[None, :]
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    inside = (tile < ends[-1])[:, None] & (place < sizes[group][:, None])
    return Tiles(group, jnp.where(inside, starts[group][:, None] + place, rows))


def in_groups(run: Callable[[Any, jax.Array], jax.Array], x: Any, sizes: jax.Array) -> jax.Array:
    """Returns run(rows, group) of all rows of a pytree of arrays [M, ...], a tile of ROWS rows at a time; rows of no
    group are zero. Every tile has the same shape, so a row's bits do not depend on its group's size."""
    M = jax.tree.leaves(x)[0].shape[0]
    tiles = cut(sizes, M)

    def compute(tile: Tiles) -> jax.Array:
        rows = jax.tree.map(lambda each: each.at[tile.rows].get(mode="fill", fill_value=0), x)
        return lax.optimization_barrier(run(lax.optimization_barrier(rows), tile.group))

    def one(tile: Tiles) -> jax.Array:
        empty = jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), jax.eval_shape(compute, tile))
        return lax.cond(tile.rows[0] < M, compute, lambda _: empty, tile)

    out = lax.map(one, tiles)
    flat = out.reshape(-1, *out.shape[2:])
    return jnp.zeros((M, *flat.shape[1:]), flat.dtype).at[tiles.rows.reshape(-1)].set(flat, mode="drop")


@partial(jax.jit, static_argnames=("gated", "out_dtype"))
def ragged_matmul(x: Inputs, w: Weights, sizes: jax.Array, gated: bool, out_dtype: DTypeLike) -> jax.Array:
    """Returns [M, N] of x [M, K], w [X N, K] and sizes i32[X]; see api.py."""
    if not jax.tree.leaves(x)[0].shape[0]:  # of which there are no tiles
        return jnp.zeros((0, w.shape[0] // (sizes.shape[0] * (2 if gated else 1))), out_dtype)
    if gated:
        wide = compute_dtype(x.scales.dtype if isinstance(x, QuantizedRows) else x.dtype)
        gate_up = ragged_matmul(x, w, sizes, False, wide)

        def gate(gate_up: jax.Array) -> jax.Array:
            gate, up = jnp.split(gate_up, 2, axis=-1)
            return (jax.nn.silu(gate) * up).astype(out_dtype)

        return in_tiles(gate, gate_up)
    if isinstance(w, QuantizedWeight):
        return in_groups(lambda rows, group: _of_codes(rows, _own(w, group, sizes), out_dtype), x, sizes)
    assert not isinstance(x, QuantizedRows), "a plain weight takes plain rows"
    return _plain(x, w, sizes, out_dtype)


def _own(w: QuantizedWeight, group: jax.Array, sizes: jax.Array) -> QuantizedWeight:
    return take_block(w, group, w.shape[0] // sizes.shape[0])


def _of_codes(x: Inputs, w: QuantizedWeight, out_dtype: DTypeLike) -> jax.Array:
    """Multiplies a tile by its group's weight, whose columns may be padded."""
    if isinstance(x, QuantizedRows):
        values = jnp.pad(x.values, ((0, 0), (0, w.values.shape[1] - x.values.shape[1])))
        run = scaled_matmul if x.scales.ndim == 1 else grouped_matmul
        return run(values, w.values, x.scales, w.scales.astype(x.scales.dtype), None, None, out_dtype)
    return _dot(x, decode(w, compute_dtype(x.dtype))).astype(out_dtype)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = compute_dtype(x.dtype)
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(wide), w.astype(wide), contract, precision="highest", preferred_element_type=wide)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _plain(x: jax.Array, w: jax.Array, sizes: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """Multiplies by weights that are not quantized. Its gradient adds to one group's part of w at a time."""
    N = w.shape[0] // sizes.shape[0]

    def run(rows: jax.Array, group: jax.Array) -> jax.Array:
        return _dot(rows, lax.dynamic_slice_in_dim(w, group * N, N)).astype(out_dtype)

    return in_groups(run, x, sizes)


def _forward(x: jax.Array, w: jax.Array, sizes: jax.Array, out_dtype: DTypeLike) -> tuple[jax.Array, Any]:
    return _plain(x, w, sizes, out_dtype), (x, w, sizes)


def _backward(_: DTypeLike, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    N, wide = w.shape[0] // sizes.shape[0], compute_dtype(x.dtype)

    def of_rows(rows: jax.Array, group: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(w, group * N, N)
        return _dot(rows, own.T).astype(x.dtype)

    def add(total: jax.Array, tile: Tiles) -> tuple[jax.Array, Any]:
        rows = [each.at[tile.rows].get(mode="fill", fill_value=0) for each in (g, x)]
        own = lax.dynamic_slice_in_dim(total, tile.group * N, N) + _dot(rows[0].T, rows[1].T)
        return lax.dynamic_update_slice_in_dim(total, own, tile.group * N, axis=0), None

    total, _ = lax.scan(add, jnp.zeros(w.shape, wide), cut(sizes, x.shape[0]))
    return in_groups(of_rows, g, sizes), total.astype(w.dtype), None


_plain.defvjp(_forward, _backward)
