"""Computes causal attention of ragged prompt chunks over paged K and V."""

from pallas_kernels.prefill_attention.api import plan, prefill_attention
from pallas_kernels.prefill_attention.work import Work, make_work

__all__ = ["Work", "make_work", "plan", "prefill_attention"]
