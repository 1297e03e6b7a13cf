import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.hadamard import hadamard, turn
from pallas_kernels.formats.reference_pages import rotated


@pytest.mark.parametrize("size", [1, 2, 8, 64, 96, 128, 80])
def test_matrix_is_its_own_inverse(size):
    matrix = hadamard(size)
    assert np.array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-14)
    magnitudes = np.unique(np.round(np.abs(matrix), 12))
    assert magnitudes.tolist() == [0] * (size & -size != size) + [round((size & -size) ** -0.5, 12)]


@pytest.mark.parametrize("size", [64, 96])
def test_turning_is_the_matrix_and_keeps_products(size):
    with jax.enable_x64(True):
        q, k = (jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((2, 3, 2, size)))
        np.testing.assert_allclose(turn(q), q @ hadamard(size), atol=1e-13)
        np.testing.assert_allclose(turn(q)[1, 1], rotated(np.asarray(q)[1, 1]), atol=1e-13)
        np.testing.assert_allclose(turn(turn(q)), q, atol=1e-13)
        np.testing.assert_allclose(jnp.sum(turn(q) * turn(k), axis=-1), jnp.sum(q * k, axis=-1), atol=1e-12)
