"""Computes ragged_matmul from its formula, float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike


def ragged_matmul(x: ArrayLike, w: ArrayLike, sizes: ArrayLike) -> np.ndarray:
    """Returns float64 [M, N] of x [M, K], w [X, N, K] and sizes i32[X]. Rows of no group are zero."""
    x, w = (np.asarray(each).astype(np.float64) for each in (x, w))
    y = np.zeros((x.shape[0], w.shape[1]))
    start = 0
    for matrix, size in zip(w, np.asarray(sizes).tolist(), strict=True):
        y[start : start + size] = x[start : start + size] @ matrix.T
        start += size
    return y
