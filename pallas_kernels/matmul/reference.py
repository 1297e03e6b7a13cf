"""matmul from its formula, float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike


def matmul(x: ArrayLike, w: ArrayLike, bias: ArrayLike | None) -> np.ndarray:
    """x [..., K], w [N, K], bias [N] -> float64 [..., N]."""
    y = np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T
    return y if bias is None else y + np.asarray(bias).astype(np.float64)
