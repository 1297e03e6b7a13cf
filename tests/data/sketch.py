"""Makes few numbers of large arrays, by which two programs' arrays are compared."""

import zlib
from collections.abc import Mapping

import numpy as np

SIGNS = 8  # numbers of an array


def sketch(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns float64 [names, SIGNS], in the names' order: sums of an array's elements with random signs. The name
    decides the signs."""
    return np.stack([_signs(name, arrays[name].size) @ np.float64(arrays[name]).ravel() for name in sorted(arrays)])


def _signs(name: str, size: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).choice([-1.0, 1.0], (SIGNS, size))
