"""Causal attention of ragged prompt chunks over paged K and V."""

from pallas_kernels.prefill_attention.api import prefill_attention

__all__ = ["prefill_attention"]
