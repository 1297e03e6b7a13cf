"""Computes matmul from its formula, float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike


def matmul(x: ArrayLike, w: ArrayLike, bias: ArrayLike | None = None, residual: ArrayLike | None = None) -> np.ndarray:
    """Returns float64 [..., N] of x [..., K], w [N, K], bias [N] and residual [..., N]."""
    y = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    for term in (bias, residual):
        if term is not None:
            y = y + np.asarray(term).astype(np.float64)
    return y
