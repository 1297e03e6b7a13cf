"""What backend "deterministic" is made of: sums in one order, whatever the number of rows.

Kernels that add each row in the order of K, whoever computes beside it, may be cut as they like. XLA chooses its own
products and sums by shape, and each adds in an order of its own: so they get tiles of one shape.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.backends import capability, on_hopper

ROWS = 16  # of a tile


def in_tiles[T](run: Callable[..., T], *rows: jax.Array | None) -> T:
    """`run` on arrays [M, ...] (or None) cut into tiles of 16 rows, one after the other; its arrays are [M, ...] too.

    It is compiled once, for one tile, and is handed zeros where rows end inside of one. XLA unrolls the loop of a
    single tile: barriers keep it from being fused with what is around it, as a product and a sum would be rounded
    together there."""
    (M,) = {each.shape[0] for each in rows if each is not None}
    tiles = -(-M // ROWS)

    def cut(each: jax.Array) -> jax.Array:
        padded = jnp.pad(each, [(0, tiles * ROWS - M)] + [(0, 0)] * (each.ndim - 1))
        return padded.reshape(tiles, ROWS, *each.shape[1:])

    def apart(tile: tuple[jax.Array | None, ...]) -> T:
        return jax.lax.optimization_barrier(run(*jax.lax.optimization_barrier(tile)))

    found = jax.lax.map(apart, jax.tree.map(cut, rows))
    return jax.tree.map(lambda each: each.reshape(tiles * ROWS, *each.shape[2:])[:M], found)


def check_device() -> None:
    """Raises NotImplementedError on a device whose products are not known to add in one order."""
    if capability() and not on_hopper():
        raise NotImplementedError("backend deterministic is for Hopper GPUs and CPUs; this is another GPU")
