"""Samples one token a row of logits, without a sort."""

from pallas_kernels.sample.api import sample
from pallas_kernels.sample.parts import sample_parts

__all__ = ["sample", "sample_parts"]
