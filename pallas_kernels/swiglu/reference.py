"""Computes swiglu from its formula, float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike


def swiglu(x: ArrayLike, w: ArrayLike) -> np.ndarray:
    """Returns float64 [..., F] of x [..., K] and w [2F, K]."""
    gate, up = np.split(np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T, 2, axis=-1)
    return gate / (1 + np.exp(np.minimum(-gate, 700.0))) * up
