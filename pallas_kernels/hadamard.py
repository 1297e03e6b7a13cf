"""Rotation by Hadamard matrices: it spreads a channel that is larger than others over all of them, before rounding.

Of Sylvester's construction, with entries +-1 / sqrt(n): symmetric and orthonormal, so that it is its own inverse. Axes
that are no power of two are turned in blocks of the largest one that divides them.
"""

import jax
import jax.numpy as jnp
import numpy as np


def hadamard(size: int) -> np.ndarray:
    """The matrix float64 [size, size] that `turn` multiplies by."""
    block = size & -size
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(size // block), matrix / np.sqrt(block))


def turn(x: jax.Array) -> jax.Array:
    """x [..., D] of a float dtype times hadamard(D), in that dtype. Twice is x again, and scalar products of two
    turned vectors are those of the vectors, but for rounding."""
    block = x.shape[-1] & -x.shape[-1]
    matrix = jnp.asarray(hadamard(block), x.dtype)
    return jnp.matmul(x.reshape(*x.shape[:-1], -1, block), matrix, precision="highest").reshape(x.shape)
