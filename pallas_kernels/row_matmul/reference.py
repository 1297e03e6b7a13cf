"""Computes row_matmul from its formula, float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike


def row_matmul(x: ArrayLike, w: ArrayLike, group: ArrayLike, parts: tuple[int, ...]) -> np.ndarray:
    """Returns float64 [M, N] of x [M, P, K] and w [X, N, K]. Rows of no group are zero."""
    x, w = (np.asarray(each).astype(np.float64) for each in (x, w))
    y, part = np.zeros((len(x), w.shape[1])), np.repeat(np.arange(len(parts)), parts)
    for row, own in enumerate(np.asarray(group).tolist()):
        if 0 <= own < len(w):
            y[row] = (x[row][part] * w[own]).sum(1)
    return y
