"""Computes SiLU(gate) * up and quantizes rows in one pass."""

from pallas_kernels.silu_mul_quant.api import silu_mul_quant

__all__ = ["silu_mul_quant"]
