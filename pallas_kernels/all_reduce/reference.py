"""all_reduce from its definition, in numpy."""

import numpy as np


def all_reduce(parts: list[np.ndarray], bias: np.ndarray | None = None, residual: np.ndarray | None = None):
    """What each device has, [T, E] each -> float64 [T, E], which every device gets; see api.py."""
    added = [np.zeros(1) if x is None else x.astype(np.float64) for x in (bias, residual)]
    return sum(part.astype(np.float64) for part in parts) + sum(added)
