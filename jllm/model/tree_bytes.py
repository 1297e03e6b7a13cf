"""Counts the bytes of a tree of arrays."""

import math
from typing import Any

import jax


def tree_bytes(tree: Any) -> int:
    """Counts the bytes of a pytree of arrays or jax.ShapeDtypeStruct."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
