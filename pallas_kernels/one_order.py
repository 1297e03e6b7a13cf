"""Makes additions have one order, whatever the number of rows, for the backend "deterministic".

Kernels that add each row in the order of K may take any number of rows. XLA chooses its matmuls and sums by shape, and
each adds in an order of its own. So XLA gets tiles of one shape. On a CPU, XLA also decides by shape what to fuse. That
changes how a product and a sum are rounded, so there all arithmetic of rows runs in tiles.
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
    """Runs `run` on pytrees of arrays [M, ...], in tiles of `size` rows, one after another. Returns arrays [M, ...].
    `run` is compiled once, for one tile; the last tile is padded with zeros. XLA unrolls the loop if there is a single
    tile. Barriers then keep `run` from being fused with its surroundings, which would round a product and a sum
    together."""
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
    """Runs `run`, plain jnp that computes each row by itself. It runs in tiles if the backend is deterministic and the
    device is a CPU. A GPU needs no tiles: a thread computes one number, whatever the number of rows."""
    return in_tiles(run, *rows) if backend == DETERMINISTIC and not on_hopper() else run(*rows)


def check_device() -> None:
    """Raises NotImplementedError on a device whose products are not known to add in one order."""
    if capability() and not on_hopper():
        raise NotImplementedError("backend deterministic is for Hopper GPUs and CPUs; this is another GPU")
