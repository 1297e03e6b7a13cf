"""Attention of one query token a sequence over paged K and V."""

from pallas_kernels.decode_attention.api import decode_attention

__all__ = ["decode_attention"]
