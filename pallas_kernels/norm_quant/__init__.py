"""Residual addition, RMSNorm and quantization of rows in one pass."""

from pallas_kernels.norm_quant.api import norm_quant

__all__ = ["norm_quant"]
