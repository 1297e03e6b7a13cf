"""SiLU(gate) * up and quantization of rows in one pass."""

from pallas_kernels.silu_mul_quant.api import silu_mul_quant

__all__ = ["silu_mul_quant"]
