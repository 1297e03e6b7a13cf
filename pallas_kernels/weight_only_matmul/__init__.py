"""Multiplies 16-bit inputs and quantized weights."""

from pallas_kernels.weight_only_matmul.api import weight_only_matmul, weight_only_swiglu

__all__ = ["weight_only_matmul", "weight_only_swiglu"]
