"""Makes additions have one order, whatever the number of rows, for the backend "deterministic".

Kernels that add each row in the order of K may take any number of rows. XLA chooses its matmuls and sums by shape, and
each adds in an order of its own. So XLA gets tiles of one shape. On a CPU, XLA also decides by shape what to fuse. That
changes how a product and a sum are rounded, so there all arithmetic of rows runs in tiles. On a GPU kernels do all sums
but those over the vocabulary, whose order is written down here. What is left to XLA runs between barriers.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import DETERMINISTIC, capability, on_hopper

ROWS = 16  # of a tile
TILE = 8  # query rows that attention computes at once: a decoded row pays for all of them
PARTS = 32  # of a row, whose sum is one kernel
type Run = Callable[..., Any]  # plainly, or in_tiles


def plainly[T](run: Callable[..., T], *rows: Any) -> T:
    """Runs `run` on all rows at once."""
    return run(*rows)


def in_tiles[T](run: Callable[..., T], *rows: Any, size: int = ROWS) -> T:
    """Runs `run` on pytrees of arrays [M, ...], in tiles of `size` rows, one after another. Returns arrays [M, ...].
    `run` is compiled once, for one tile; the last tile is padded with zeros. There are always two tiles at least: XLA
    unrolls a loop over a single one, drops its barriers, and shares what `run` computes with what is around it. Sums
    then have another order."""
    (M,) = {each.shape[0] for each in jax.tree.leaves(rows)}
    tiles = max(2, -(-M // size))

    def cut(each: jax.Array) -> jax.Array:
        padded = jnp.pad(each, [(0, tiles * size - M)] + [(0, 0)] * (each.ndim - 1))
        return padded.reshape(tiles, size, *each.shape[1:])

    found = jax.lax.map(partial(_apart, run), jax.tree.map(cut, rows))
    return jax.tree.map(lambda each: each.reshape(tiles * size, *each.shape[2:])[:M], found)


def _apart[T](run: Callable[..., T], rows: tuple[Any, ...]) -> T:
    """Runs `run` between barriers. XLA then neither fuses it with what is around it nor computes constants on the
    host."""
    return jax.lax.optimization_barrier(run(*jax.lax.optimization_barrier(rows)))


def fenced[T](backend: str | None, run: Callable[..., T], *rows: Any) -> T:
    """Runs `run`, plain jnp that computes each row by itself. With a deterministic backend it runs between barriers,
    and in tiles on a CPU. A GPU needs no tiles: a thread computes one number, whatever the number of rows."""
    if backend != DETERMINISTIC:
        return run(*rows)
    return _apart(run, rows) if on_hopper() else in_tiles(run, *rows)


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Returns log(sum(exp(logits))) [R] of logits [R, V] on a GPU, in one order for any R. Barriers keep XLA from
    joining one operation with the next."""
    logits = jax.lax.optimization_barrier(logits)
    peak = jnp.max(logits, axis=1, keepdims=True)
    peak = jax.lax.optimization_barrier(jnp.where(jnp.isfinite(peak), peak, 0))
    total = sum_in_order(jax.lax.optimization_barrier(jnp.exp(logits - peak)))
    return peak[:, 0] + jax.lax.optimization_barrier(jnp.log(total))


def sum_in_order(x: jax.Array) -> jax.Array:
    """Returns the sums [R] of x [R, n]: parts of each row are added one after the other, as whole arrays."""
    while (n := x.shape[1]) > 1:
        parts = min(PARTS, n)
        x = jnp.pad(x, ((0, 0), (0, -n % parts))).reshape(x.shape[0], parts, -1)
        x = jax.lax.optimization_barrier(reduce(jnp.add, [x[:, i] for i in range(parts)]))
    return x[:, 0]


def check_device() -> None:
    """Raises NotImplementedError on a device whose products are not known to add in one order."""
    if capability() and not on_hopper():
        raise NotImplementedError("backend deterministic is for Hopper GPUs and CPUs; this is another GPU")
