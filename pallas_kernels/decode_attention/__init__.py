"""Computes attention of one query token a sequence, or a short segment of them, over paged K and V."""

from pallas_kernels.decode_attention.api import decode_attention, plan
from pallas_kernels.decode_attention.work import Work, make_work
from pallas_kernels.formats.segments import Segments

__all__ = ["Segments", "Work", "decode_attention", "make_work", "plan"]
