"""Matrix product of 16-bit inputs and quantized weights."""

from pallas_kernels.weight_only_matmul.api import weight_only_matmul

__all__ = ["weight_only_matmul"]
