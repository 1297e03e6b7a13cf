"""Multiplies float8 (e4m3) rows and weights, scaled."""

from pallas_kernels.fp8_matmul.api import fp8_matmul

__all__ = ["fp8_matmul"]
