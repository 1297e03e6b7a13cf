"""Computes scaled matmuls from their formula, float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike


def product(x: ArrayLike, w: ArrayLike) -> np.ndarray:
    """Returns x [M, K] times w [N, K] transposed: float64 [M, N]; exact for int8, as sums stay below 2^53."""
    return np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T


def scaled_matmul(
    x: ArrayLike,
    w: ArrayLike,
    x_scale: ArrayLike,
    w_scale: ArrayLike,
    bias: ArrayLike | None,
    residual: ArrayLike | None,
) -> np.ndarray:
    """Returns float64 [M, N] of x [M, K], w [N, K], x_scale [M] or [M, G], w_scale [N] or of blocks [G, N], bias [N]
    and residual [M, N]. Groups of blocks have 128 columns, and the last one what is left."""
    rows, columns = (np.asarray(scale).astype(np.float64) for scale in (x_scale, w_scale))
    x, w = (np.asarray(each).astype(np.float64) for each in (x, w))
    K = x.shape[1]
    each = 128 if columns.ndim == 2 else K // rows.shape[1] if rows.ndim == 2 else K
    if columns.ndim == 2:
        w, columns = w * np.repeat(columns, each, axis=0)[:K].T, np.ones(())
    y = product(x * np.repeat(rows.reshape(len(x), -1), each, axis=1)[:, :K], w) * columns
    for addend in (bias, residual):
        if addend is not None:
            y = y + np.asarray(addend).astype(np.float64)
    return y
