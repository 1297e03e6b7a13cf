"""Compares rows for the tests of the kernels over whole rows."""

import numpy as np


def units_apart(a, b) -> np.ndarray:
    """Counts the numbers of their 16-bit type that lie between a and b, value by value."""

    def rank(x) -> np.ndarray:  # sign and magnitude to an order without a gap: -0 and 0 are the same
        bits = np.asarray(x).view(np.int16).astype(np.int32)
        return np.where(bits < 0, -(bits & 0x7FFF), bits)

    return np.abs(rank(a) - rank(b))
