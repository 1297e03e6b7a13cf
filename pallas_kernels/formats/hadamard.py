"""Rotates by Hadamard matrices: this spreads a channel that is larger than others over all of them, before rounding.
They are of Sylvester's construction, with entries +-1 / sqrt(n): symmetric and orthonormal, so each is its own inverse.
Axes that are no power of two are turned in blocks of the largest one that divides them."""

import jax
import jax.numpy as jnp
import numpy as np


def hadamard(size: int) -> np.ndarray:
    """Returns the matrix float64 [size, size] that `turn` multiplies by."""
    block = size & -size
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(size // block), matrix / np.sqrt(block))


def turn(x: jax.Array) -> jax.Array:
    """Multiplies x [..., D] of a float dtype by hadamard(D), in that dtype. Twice is x again. Scalar products of two
    turned vectors are those of the vectors, up to rounding."""
    block = x.shape[-1] & -x.shape[-1]
    matrix = jnp.asarray(hadamard(block), x.dtype)
    return jnp.matmul(x.reshape(*x.shape[:-1], -1, block), matrix, precision="highest").reshape(x.shape)
