"""Products of rows, each with a matrix of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.row_matmul import reference, row_matmul, xla
from tests.kernels.helpers import TOLERANCE, error

X, N, K = 4, 24, 64


def inputs(rows: int, parts=(N,), dtype="float32"):
    """Rows in any order over matrices of two layers, of which the first is poisoned, and the last group too."""
    rng = np.random.default_rng(rows)
    x, w = rng.normal(size=(rows, len(parts), K)), rng.normal(size=(2, X, sum(parts), K)) / K**0.5
    w[0], w[:, -1] = np.nan, np.nan
    group = rng.integers(-1, X - 1, rows)
    group[::7] = X  # no group either
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(group, jnp.int32)


@pytest.mark.parametrize("backend", [None, "deterministic"])
@pytest.mark.parametrize("rows", [1, 20, xla.FEW + 77])
def test_each_row_meets_its_own_matrix(rows, backend):
    parts = (10, 3, 11)
    x, w, group = inputs(rows, parts)
    got = row_matmul(x, w, jnp.int32(1), group, parts=parts, backend=backend)
    assert error(got, reference.row_matmul(x, w[1], group, parts)) < TOLERANCE["float32"]


def test_bits_of_one_order_do_not_depend_on_the_company_or_on_places():
    x, w, group = inputs(70, dtype="bfloat16")
    one = jax.jit(lambda *args: row_matmul(*args, out_dtype="float32", backend="deterministic"))
    many, few = one(x[:, 0], w, jnp.int32(1), group), one(x[33:36, 0], w[1:, :3], jnp.int32(0), group[33:36] % 3)
    kept = np.flatnonzero(np.asarray(group[33:36]) == np.asarray(group[33:36] % 3))
    assert len(kept)
    assert (np.asarray(many)[33:36][kept] == np.asarray(few)[kept]).all()


def test_shapes_that_disagree_are_refused():
    x, w, group = inputs(3)
    with pytest.raises(ValueError, match="expected .M, P, K., .L, X, N, K., .. and .M."):
        row_matmul(x, w, jnp.int32(1), group, parts=(N, 1))
