"""Computes differentiable causal attention without a cache."""

from pallas_kernels.causal_attention.api import causal_attention

__all__ = ["causal_attention"]
