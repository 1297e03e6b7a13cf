"""Multiplies by weights stored [out, in]."""

from pallas_kernels.matmul.api import matmul

__all__ = ["matmul"]
