"""Attention of one query token a sequence over paged K and V."""

from pallas_kernels.decode_attention.api import decode_attention, plan
from pallas_kernels.decode_attention.work import Work, make_work

__all__ = ["Work", "decode_attention", "make_work", "plan"]
