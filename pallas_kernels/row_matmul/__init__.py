"""Multiplies each row by a matrix of its own: adapters of a batch."""

from pallas_kernels.row_matmul.api import row_matmul

__all__ = ["row_matmul"]
