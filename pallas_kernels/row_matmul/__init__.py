"""Multiplies each row by a matrix of its own: adapters of a batch."""

from pallas_kernels.row_matmul.api import low_rank, low_rank_gates, row_matmul

__all__ = ["low_rank", "low_rank_gates", "row_matmul"]
