"""Computes all_reduce from its definition, in numpy."""

import numpy as np


def all_reduce(parts: list[np.ndarray], bias: np.ndarray | None = None, residual: np.ndarray | None = None):
    """Returns the sum float64 [T, E] of the devices' parts, [T, E] each; see api.py."""
    added = [np.zeros(1) if x is None else x.astype(np.float64) for x in (bias, residual)]
    return sum(part.astype(np.float64) for part in parts) + sum(added)
