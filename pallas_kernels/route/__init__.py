"""Routes tokens to experts: chooses, shares, and sorts rows by expert."""

from pallas_kernels.route.api import route
from pallas_kernels.route.xla import Here, Sorted, sort_rows

__all__ = ["Here", "Sorted", "route", "sort_rows"]
