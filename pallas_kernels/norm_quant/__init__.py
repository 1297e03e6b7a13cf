"""Adds a residual, applies RMSNorm and quantizes rows in one pass."""

from pallas_kernels.norm_quant.api import norm_quant

__all__ = ["norm_quant"]
