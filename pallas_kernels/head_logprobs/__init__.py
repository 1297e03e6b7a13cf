"""Computes log-probabilities of tokens from the head's inputs, without logits of the whole vocabulary."""

from pallas_kernels.head_logprobs.api import head_logprobs

__all__ = ["head_logprobs"]
