"""One sampled token a row of logits, without a sort."""

from pallas_kernels.sample.api import sample

__all__ = ["sample"]
