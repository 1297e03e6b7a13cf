"""Adds in one order, whatever the number of rows: what backend "deterministic" is made of.

Kernels that add each row in the order of K, whoever computes beside it, may be cut as they like. XLA chooses its own
matmuls and sums by shape, and each adds in an order of its own. So they get tiles of one shape. On a CPU it also
chooses by shape what to fuse, and so how a product and a sum are rounded. There all arithmetic of rows is in tiles.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import DETERMINISTIC, capability, on_hopper

ROWS = 16  # of a tile
type Run = Callable[..., Any]  # plainly, or in_tiles


def plainly[T](run: Callable[..., T], *rows: Any) -> T:
    """Runs `run` on all rows at once."""
    return run(*rows)


def in_tiles[T](run: Callable[..., T], *rows: Any, size: int = ROWS) -> T:
    """Runs `run` on pytrees of arrays [M, ...] cut into tiles of `size` rows, one after the other; it returns [M, ...]
    too. It is compiled once, for one tile, and is handed zeros where rows end inside of one. XLA unrolls the loop of a
    single tile. Barriers keep it from being fused with what is around it, as a product and a sum would be rounded
    together there."""
    (M,) = {each.shape[0] for each in jax.tree.leaves(rows)}
    tiles = -(-M // size)

    def cut(each: jax.Array) -> jax.Array:
        padded = jnp.pad(each, [(0, tiles * size - M)] + [(0, 0)] * (each.ndim - 1))
        return padded.reshape(tiles, size, *each.shape[1:])

    def apart(tile: tuple[Any, ...]) -> T:
        return jax.lax.optimization_barrier(run(*jax.lax.optimization_barrier(tile)))

    found = jax.lax.map(apart, jax.tree.map(cut, rows))
    return jax.tree.map(lambda each: each.reshape(tiles * size, *each.shape[2:])[:M], found)


def fenced[T](backend: str | None, run: Callable[..., T], *rows: Any) -> T:
    """Runs `run` on rows, each of which it computes by itself and in plain jnp. It runs in tiles where a deterministic
    backend has a CPU to compute on. A GPU's thread computes one number, whatever the number of rows."""
    return in_tiles(run, *rows) if backend == DETERMINISTIC and not on_hopper() else run(*rows)


def check_device() -> None:
    """Raises NotImplementedError on a device whose products are not known to add in one order."""
    if capability() and not on_hopper():
        raise NotImplementedError("backend deterministic is for Hopper GPUs and CPUs; this is another GPU")
