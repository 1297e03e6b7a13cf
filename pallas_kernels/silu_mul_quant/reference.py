"""Computes silu_mul_quant from its definition, in float64 numpy."""

import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.formats.quantized_rows import QuantizedRows
from pallas_kernels.formats.reference_rows import quantize_rows


def silu_mul_quant(gate_up: ArrayLike, *, kind: str | None = None) -> np.ndarray | QuantizedRows:
    """Returns rows [T, F] in numpy of gate_up [T, 2F]; see api.py."""
    rounded = silu_mul(gate_up).astype(np.asarray(gate_up).dtype)
    return rounded if kind is None else quantize_rows(rounded, kind)


def silu_mul(gate_up: ArrayLike) -> np.ndarray:
    """Returns SiLU(gate) * up (arXiv:1702.03118; Shazeer, arXiv:2002.05202), float64 [T, F], not rounded."""
    x = np.asarray(gate_up).astype(np.float64)
    gate, up = np.split(x, 2, axis=-1)
    tail = np.exp(-np.abs(gate))  # never overflows
    return gate * np.where(gate >= 0, 1, tail) / (1 + tail) * up
