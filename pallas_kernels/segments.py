"""Short segments: several query rows a sequence, as a drafter asks for, in a chain or a tree."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

MOST_ROWS = 32  # bits of a mask of ancestors


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Which rows of R segments of Q rows are in use, and what these see of their own segment.

    Of a segment whose sequence has `length` keys, the last `rows` are its own and those before are committed. Row i's
    key is at cache index length - rows + i, after those of its ancestors. Its position is length - rows plus the
    number of its ancestors, itself left out: a chain's is its cache index, and siblings in a tree share one.
    """

    rows: jax.Array  # i32[R], 0 .. Q; the first ones are in use
    ancestors: jax.Array | None = None  # u32[R, Q], bit j of row i: row j is i itself or its ancestor; None: a chain


def depths(ancestors: jax.Array) -> jax.Array:
    """How many ancestors each row has, itself left out: u32[R, Q] -> i32[R, Q]."""
    return jnp.maximum(jax.lax.population_count(ancestors), 1).astype(jnp.int32) - 1
