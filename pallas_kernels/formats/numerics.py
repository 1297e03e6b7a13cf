"""Chooses the dtype that accumulation, softmax and rotation run in."""

import numpy as np
from jax.typing import DTypeLike


def compute_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns at least float32, float64 for float64, by NumPy's rule: jnp.promote_types refuses bf16 under strict
    promotion."""
    return np.promote_types(np.dtype(dtype), np.float32)
