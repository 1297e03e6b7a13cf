"""Computes gate and up projections of an MLP with their SiLU and product, in one pass."""

from pallas_kernels.swiglu.api import swiglu

__all__ = ["swiglu"]
