"""Multiplies int8 rows and weights, scaled."""

from pallas_kernels.int8_matmul.api import int8_matmul

__all__ = ["int8_matmul"]
