"""Multiplies groups of rows, each by a weight of its own: experts of a layer, or adapters of a batch."""

from pallas_kernels.ragged_matmul.api import ragged_matmul

__all__ = ["ragged_matmul"]
