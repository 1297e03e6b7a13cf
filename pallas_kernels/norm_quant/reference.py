"""Computes norm_quant from its definition, in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.reference_rows import quantize_rows


def norm_quant(
    x: ArrayLike, weight: ArrayLike | None, *, eps: float, residual: ArrayLike | None = None, kind: str | None = None
) -> tuple[np.ndarray | QuantizedRows, np.ndarray]:
    """Returns rows [T, E], summed [T, E] in numpy of x, residual [T, E] and weight [E]; see api.py."""
    dtype = np.asarray(x).dtype
    summed = np.asarray(x).astype(np.float64)
    if residual is not None:
        summed = (summed + np.asarray(residual).astype(np.float64)).astype(dtype)
    normed = summed
    if weight is not None:
        normed = normalize(summed, eps).astype(dtype).astype(np.float64) * np.asarray(weight).astype(np.float64)
    normed, summed = normed.astype(dtype), summed.astype(dtype)
    return (normed if kind is None else quantize_rows(normed, kind)), summed


def normalize(x: ArrayLike, eps: float) -> np.ndarray:
    """Divides x [T, E] by its rows' root mean squares (Zhang and Sennrich, arXiv:1910.07467), float64, not rounded."""
    x = np.asarray(x).astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
